/* The gradients of fa3.h's definition, row by row; the bounds are those of docs/numerics.md. */
#include <math.h>

#include "reference.h"
#include "row.h"
#include "tensors.h"

static const double u = UNIT_ROUNDOFF;
static const double flushed = 0x1p-126; /* what float32 loses below its normal numbers */
static const double most_exponent = 88; /* of e, in float32 */
/* Beyond it an engine rounds a score's product with the scale before it subtracts lse. */
static const double large_lse = 4096;

fa3_forward_args reference_forward_args(const fa3_backward_args *args) {
  const struct argument_struct *list = arguments_of(FA3_BACKWARD);
  fa3_forward_args forward = {.struct_size = sizeof forward,
                              .max_seqlen_q = args->max_seqlen_q,
                              .max_seqlen_k = args->max_seqlen_k,
                              .flags = args->flags,
                              .softmax_scale = args->softmax_scale,
                              .softcap = args->softcap,
                              .window_left = args->window_left,
                              .window_right = args->window_right};
  for (int i = 0; i < list->count; i++) {
    const struct argument *same = find_argument(FA3_FORWARD, list->arguments[i].tensor);
    if (same) *argument_in(&forward, same) = *argument_in(args, &list->arguments[i]);
  }
  return forward;
}

int64_t reference_grad_query_index(const fa3_backward_args *args, int64_t batch, int64_t head,
                                   int64_t row) {
  return sequence_element(&args->grad_query, &args->cu_seqlens_q, batch, row, head);
}

static int64_t key_index(const fa3_backward_args *args, const fa3_tensor *tensor, int64_t batch,
                         int64_t head_k, int64_t row) {
  return sequence_element(tensor, &args->cu_seqlens_k, batch,
                          sequence_leftpad(&args->leftpad_k, batch) + row, head_k);
}

int64_t reference_grad_key_index(const fa3_backward_args *args, int64_t batch, int64_t head_k,
                                 int64_t row) {
  return key_index(args, &args->grad_key, batch, head_k, row);
}

int64_t reference_grad_value_index(const fa3_backward_args *args, int64_t batch, int64_t head_k,
                                   int64_t row) {
  return key_index(args, &args->grad_value, batch, head_k, row);
}

/* A query's row: what all its scores share. */
struct query {
  struct row row;
  double query[MAX_HEAD_DIM];
  double grad_output[MAX_HEAD_DIM];
  double lse;
  double delta; /* D, the row sum of grad_output * output, less the gradient of lse */
  double delta_error;
};

static void load_query(const fa3_backward_args *args, const fa3_forward_args *forward,
                       int64_t batch, int64_t head, int64_t i, struct query *query) {
  const int64_t head_dim = args->query.shape[args->query.rank - 1];
  const int64_t value_head_dim = args->value.shape[args->value.rank - 1];
  double output[MAX_HEAD_DIM], magnitude;
  query->row = row_of(forward, batch, head, i);
  load_elements(&args->query, query->row.query, head_dim, query->query);
  load_elements(&args->output, reference_output_index(forward, batch, head, i), value_head_dim,
                output);
  load_elements(&args->grad_output,
                sequence_element(&args->grad_output, &args->cu_seqlens_q, batch, i, head),
                value_head_dim, query->grad_output);
  query->lse = reference_load(&args->lse, reference_lse_index(forward, batch, head, i));
  query->delta = dot(query->grad_output, output, value_head_dim, &magnitude);
  query->delta_error = chain((double)value_head_dim) * magnitude;
  if (args->grad_lse.data) {
    query->delta -= reference_load(
        &args->grad_lse, row_value_index(&args->grad_lse, &args->cu_seqlens_q, batch, i, head));
    query->delta_error += u * fabs(query->delta);
  }
}

/* P and dS of one query and one key that it sees, and how far they may be off when they enter a
 * product. */
struct pair {
  double key[MAX_HEAD_DIM];
  double probability;
  double probability_error;
  double grad_score;
  double grad_score_error;
};

/* Error of a score's sum of products before the scale. One product of 16-bit numbers is exact. */
static double sum_error(const double *query, const double *key, int64_t count, double magnitude,
                        fa3_dtype dtype) {
  int64_t terms = 0;
  for (int64_t i = 0; i < count; i++) terms += query[i] * key[i] != 0;
  if (terms == 0 || (terms == 1 && dtype != FA3_FLOAT32 && magnitude >= flushed)) return 0;
  return chain((double)count) * magnitude + (double)terms * flushed;
}

/* The greatest that exp(exponent) may be, where the exponent is off by so much: infinity where it
 * may be no number of the dtype any more. Nothing bounds it then, nor what it enters. */
static double largest_power(double exponent, double error, fa3_dtype dtype) {
  const double most = dtype == FA3_FLOAT16 ? 11 : most_exponent;
  return exponent + error > most ? INFINITY : exp(exponent + error) * (1 + 4 * u);
}

static void load_pair(const struct query *query, int64_t j, struct pair *pair) {
  const struct row *row = &query->row;
  const fa3_forward_args *args = row->args;
  const int64_t head_dim = args->query.shape[args->query.rank - 1];
  const int64_t value_head_dim = args->value.shape[args->value.rank - 1];
  const double cap = (double)args->softcap;
  const struct rounding rounding = weight_rounding(args->query.dtype);
  double value[MAX_HEAD_DIM], magnitude;

  load_elements(
      &args->key,
      sequence_element(&args->key, &args->cu_seqlens_k, row->batch_k, row->row_k + j, row->head_k),
      head_dim, pair->key);
  const double product = dot(query->query, pair->key, head_dim, &magnitude);
  const double raw = row->scale * product;
  const double raw_error =
      fabs(row->scale) * sum_error(query->query, pair->key, head_dim, magnitude, args->query.dtype);
  double score = row_cap(row, raw);
  double score_error = raw_error + 16 * u * fmax(fabs(score), fabs(query->lse)) + 8 * u * cap;
  if (raw_error == 0 && cap == 0 && fabs(query->lse) > large_lse) {
    score = (double)(float)((double)(float)row->scale * product);
    score_error = 4 * u * fabs(score - query->lse);
  }
  const double exponent = score - query->lse;
  const double probability = exp(exponent > most_exponent ? most_exponent : exponent);
  const double largest_probability = largest_power(exponent, score_error, args->query.dtype);

  load_elements(&args->value,
                sequence_element(&args->value, &args->cu_seqlens_k, row->batch_k, row->row_k + j,
                                 row->head_k),
                value_head_dim, value);
  const double grad_probability = dot(query->grad_output, value, value_head_dim, &magnitude);
  const double difference = grad_probability - query->delta;
  const double difference_error = chain((double)value_head_dim) * magnitude + query->delta_error +
                                  2 * u * (fabs(grad_probability) + fabs(query->delta));

  /* The cap's derivative, 1 - tanh^2. */
  double slope = 1, slope_error = 0;
  if (cap > 0) {
    const double bent = score / cap, bent_error = fmin(raw_error / cap + 24 * u, 2);
    slope = 1 - bent * bent;
    slope_error = 2 * fabs(bent) * bent_error + bent_error * bent_error + 4 * u;
  }

  const double largest = fabs(difference) + difference_error;
  pair->probability = probability;
  pair->probability_error =
      largest_probability * (1 + rounding.relative) - probability + rounding.absolute + flushed;
  pair->grad_score = probability * difference * slope;
  const double error = largest_probability * (largest * (slope + slope_error) * (1 + 4 * u)) -
                       probability * fabs(difference) * slope + flushed * (largest + 1);
  pair->grad_score_error =
      error + rounding.relative * (fabs(pair->grad_score) + error) + rounding.absolute;
  if (isinf(largest_probability)) pair->probability_error = pair->grad_score_error = INFINITY;
}

/* A sum of weight * vector, its terms' magnitudes, and what the weights' errors make of it. */
struct sum {
  double *value; /* `count` elements each */
  double *error;
  double magnitude[MAX_HEAD_DIM];
  int64_t count;
  double terms;
};

static struct sum sum_new(double *result, double *bound, int64_t count) {
  struct sum sum = {.value = result, .error = bound, .count = count};
  for (int64_t d = 0; d < count; d++) result[d] = bound[d] = 0;
  return sum;
}

static void sum_add(struct sum *sum, double weight, double error, const double *vector) {
  for (int64_t d = 0; d < sum->count; d++) {
    sum->value[d] += weight * vector[d];
    sum->error[d] += isinf(error) ? error : error * fabs(vector[d]);
    sum->magnitude[d] += fabs(weight * vector[d]);
  }
  sum->terms++;
}

/* Its last step is a product with `factor`, in float32. A sum of nothing is exactly 0. */
static void sum_finish(struct sum *sum, double factor) {
  if (sum->terms == 0) return;
  for (int64_t d = 0; d < sum->count; d++) {
    double error = sum->error[d] + chain(sum->terms + 1) * (sum->magnitude[d] + sum->error[d]) +
                   sum->terms * flushed;
    sum->value[d] *= factor;
    if (isinf(error)) continue;
    sum->error[d] =
        fabs(factor) * error + 4 * u * (fabs(sum->value[d]) + fabs(factor) * error) + flushed;
  }
}

void reference_grad_query(const fa3_backward_args *args, int64_t batch, int64_t head, int64_t row,
                          double *gradient, double *bound) {
  const fa3_forward_args forward = reference_forward_args(args);
  struct sum sum = sum_new(gradient, bound, args->query.shape[args->query.rank - 1]);
  struct query query;
  load_query(args, &forward, batch, head, row, &query);
  for (int64_t j = 0; j < query.row.seqlen_k; j++) {
    struct pair pair;
    if (!row_sees(&query.row, j)) continue;
    load_pair(&query, j, &pair);
    sum_add(&sum, pair.grad_score, pair.grad_score_error, pair.key);
  }
  sum_finish(&sum, query.row.scale);
}

void reference_grad_key_value(const fa3_backward_args *args, int64_t batch, int64_t head_k,
                              int64_t row, double *grad_key, double *grad_value, double *key_bound,
                              double *value_bound) {
  const fa3_forward_args forward = reference_forward_args(args);
  const int64_t group =
      args->query.shape[args->query.rank - 2] / args->key.shape[args->key.rank - 2];
  struct sum key = sum_new(grad_key, key_bound, args->query.shape[args->query.rank - 1]);
  struct sum value = sum_new(grad_value, value_bound, args->value.shape[args->value.rank - 1]);
  double scale = 0;
  for (int64_t head = head_k * group; head < (head_k + 1) * group; head++)
    for (int64_t i = 0; i < reference_seqlen_q(&forward, batch); i++) {
      const struct row seen_from = row_of(&forward, batch, head, i);
      struct query query;
      struct pair pair;
      if (!row_sees(&seen_from, row)) continue;
      load_query(args, &forward, batch, head, i, &query);
      load_pair(&query, row, &pair);
      sum_add(&value, pair.probability, pair.probability_error, query.grad_output);
      sum_add(&key, pair.grad_score, pair.grad_score_error, query.query);
      scale = seen_from.scale;
    }
  sum_finish(&key, scale);
  sum_finish(&value, 1);
}

void reference_grad_sink(const fa3_backward_args *args, int64_t head, double *gradient,
                         double *bound) {
  const fa3_forward_args forward = reference_forward_args(args);
  const fa3_tensor *batches = args->cu_seqlens_q.data ? &args->cu_seqlens_q : &args->query;
  const int64_t batch = batches->shape[0] - (args->cu_seqlens_q.data ? 1 : 0);
  const double sink = sink_of(&forward, head);
  struct sum sum = sum_new(gradient, bound, 1);
  for (int64_t b = 0; b < batch && sink != -INFINITY; b++)
    for (int64_t i = 0; i < reference_seqlen_q(&forward, b); i++) {
      struct query query;
      load_query(args, &forward, b, head, i, &query);
      const double exponent = sink - query.lse;
      const double weight = exp(exponent > most_exponent ? most_exponent : exponent);
      const double largest = largest_power(exponent, 4 * u * fabs(exponent), FA3_FLOAT32);
      const double error = largest * (fabs(query.delta) + query.delta_error) -
                           weight * fabs(query.delta) + flushed * (1 + fabs(query.delta));
      sum_add(&sum, weight * query.delta, error, (const double[]){1});
    }
  sum_finish(&sum, -1);
}

double reference_stored_bound(fa3_dtype dtype, double value, double bound) {
  if (bound == 0) return 0; /* nothing was summed */
  const struct rounding stored = rounding_of(dtype);
  bound += u * (fabs(value) + bound); /* the sum with what was there */
  return bound + stored.relative * (fabs(value) + bound) + stored.absolute;
}
