#include "reference.h"

#include "half.h"

#include <math.h>
#include <stdbool.h>

double reference_load(const fa3_tensor *tensor, int64_t index) {
  switch (tensor->dtype) {
    case FA3_FLOAT32:
      return ((const float *)tensor->data)[index];
    case FA3_FLOAT16:
      return float_from_half(((const uint16_t *)tensor->data)[index]);
    case FA3_BFLOAT16:
      return float_from_bfloat(((const uint16_t *)tensor->data)[index]);
    case FA3_INT32:
      return ((const int32_t *)tensor->data)[index];
    case FA3_INT64:
      return (double)((const int64_t *)tensor->data)[index];
    default:
      return NAN;
  }
}

static int32_t length_at(const fa3_tensor *lengths, int64_t index) {
  return ((const int32_t *)lengths->data)[index];
}

static bool present(const fa3_tensor *tensor) {
  return tensor->data != NULL;
}

/* Index of (batch, row, head, 0), where a packed tensor's row counts from its first sequence. */
static int64_t element(const fa3_tensor *tensor, int64_t batch, int64_t row, int64_t head) {
  const int64_t *stride = tensor->strides;
  if (tensor->rank == 3) return row * stride[0] + head * stride[1];
  return batch * stride[0] + row * stride[1] + head * stride[2];
}

static int64_t first_row(const fa3_tensor *cu_seqlens, int64_t batch) {
  return present(cu_seqlens) ? length_at(cu_seqlens, batch) : 0;
}

static int64_t used_rows(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens,
                         const fa3_tensor *seqused, int64_t batch) {
  if (present(seqused)) return length_at(seqused, batch);
  if (present(cu_seqlens)) return length_at(cu_seqlens, batch + 1) - length_at(cu_seqlens, batch);
  return tensor->shape[1];
}

int64_t reference_seqlen_q(const fa3_forward_args *args, int64_t batch) {
  return used_rows(&args->query, &args->cu_seqlens_q, &args->seqused_q, batch);
}

int64_t reference_output_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                               int64_t row) {
  return element(&args->output, batch, first_row(&args->cu_seqlens_q, batch) + row, head);
}

int64_t reference_lse_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                            int64_t row) {
  const int64_t *stride = args->lse.strides;
  if (args->lse.rank == 2)
    return head * stride[0] + (first_row(&args->cu_seqlens_q, batch) + row) * stride[1];
  return batch * stride[0] + head * stride[1] + row * stride[2];
}

/* One query row and the keys of its sequence. */
struct row {
  const fa3_forward_args *args;
  int64_t query;   /* index of its first element */
  int64_t batch_k; /* where key and value rows are */
  int64_t head_k;
  int64_t row_k;
  int64_t seqlen_k;
  long double center; /* i + diagonal; a long double holds every int64 and their sums */
  double scale;
};

static struct row row_of(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t i) {
  const fa3_tensor *query = &args->query;
  const fa3_tensor *key = &args->key;
  int64_t leftpad = present(&args->leftpad_k) ? length_at(&args->leftpad_k, batch) : 0;
  int64_t seqlen_q = reference_seqlen_q(args, batch);
  int64_t heads_q = query->shape[query->rank - 2];
  int64_t heads_k = key->shape[key->rank - 2];

  struct row row = {.args = args};
  row.query = element(query, batch, first_row(&args->cu_seqlens_q, batch) + i, head);
  row.batch_k =
      present(&args->cache_batch_index) ? length_at(&args->cache_batch_index, batch) : batch;
  row.head_k = head / (heads_q / heads_k);
  row.row_k = first_row(&args->cu_seqlens_k, batch) + leftpad;
  row.seqlen_k = used_rows(key, &args->cu_seqlens_k, &args->seqused_k, batch) - leftpad;
  row.center = (long double)i;
  row.center += present(&args->diagonal) ? ((const int64_t *)args->diagonal.data)[batch]
                                         : row.seqlen_k - seqlen_q;
  row.scale = args->flags & FA3_SCALE ? (double)args->softmax_scale
                                      : 1 / sqrt((double)query->shape[query->rank - 1]);
  return row;
}

static bool sees(const struct row *row, int64_t j) {
  const fa3_forward_args *args = row->args;
  bool causal = args->flags & FA3_CAUSAL;
  bool window = args->flags & FA3_WINDOW;
  if (causal && !((long double)j <= row->center)) return false;
  if (!window) return true;
  if (args->window_left != -1 && !((long double)j >= row->center - args->window_left)) return false;
  if (causal || args->window_right == -1) return true;
  return (long double)j <= row->center + args->window_right;
}

static double sink_of(const fa3_forward_args *args, int64_t head) {
  if (!present(&args->sink)) return -INFINITY;
  return reference_load(&args->sink, head * args->sink.strides[0]);
}

/* The score of key j; *magnitude is the same sum over absolute values, before the cap. */
static double score(const struct row *row, int64_t j, double *magnitude) {
  const fa3_tensor *query = &row->args->query;
  const fa3_tensor *key = &row->args->key;
  int64_t first = element(key, row->batch_k, row->row_k + j, row->head_k);
  double cap = row->args->softcap;
  double sum = 0;
  *magnitude = 0;
  for (int64_t d = 0; d < query->shape[query->rank - 1]; d++) {
    double product = reference_load(query, row->query + d) * reference_load(key, first + d);
    sum += product;
    *magnitude += fabs(product);
  }
  sum *= row->scale;
  *magnitude *= fabs(row->scale);
  return cap > 0 ? cap * tanh(sum / cap) : sum;
}

void reference_row(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                   double *output, double *lse) {
  const struct row r = row_of(args, batch, head, row);
  const fa3_tensor *value = &args->value;
  int64_t value_head_dim = value->shape[value->rank - 1];
  double sink = sink_of(args, head);
  double magnitude;

  double max = sink; /* subtracted from every score: exp() then can't overflow */
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!sees(&r, j)) continue;
    double x = score(&r, j, &magnitude);
    if (!(x <= max)) max = x; /* NaN too, and it stays */
    if (isnan(max)) break;
  }

  for (int64_t d = 0; d < value_head_dim; d++) output[d] = 0;
  *lse = -INFINITY;
  if (max == -INFINITY) return;

  double sum = exp(sink - max);
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!sees(&r, j)) continue;
    double weight = exp(score(&r, j, &magnitude) - max);
    int64_t first = element(value, r.batch_k, r.row_k + j, r.head_k);
    sum += weight;
    for (int64_t d = 0; d < value_head_dim; d++)
      output[d] += weight * reference_load(value, first + d);
  }
  for (int64_t d = 0; d < value_head_dim; d++) output[d] /= sum;
  *lse = max + log(sum);
}

/* Unit roundoff, and half the distance between subnormal numbers. */
struct rounding {
  double relative;
  double absolute;
};

static struct rounding rounding_of(fa3_dtype dtype) {
  if (dtype == FA3_FLOAT16) return (struct rounding){0x1p-11, 0x1p-25};
  if (dtype == FA3_BFLOAT16) return (struct rounding){0x1p-8, 0x1p-134};
  return (struct rounding){0x1p-24, 0x1p-150};
}

/* Relative error of a chain of n float32 roundings: the smaller of the certain bound and the
 * probabilistic one with lambda = 8 (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). */
static double chain(double n) {
  double error = fmin(n, 8 * sqrt(n)) * 0x1p-24;
  return error / (1 - error);
}

/* Relative error of exp(score - max) after it has been summed with the other `keys`. */
static double weight_error(double score_error, double keys) {
  return exp(score_error) * (1 + 4 * 0x1p-24) * (1 + chain(2 * keys)) - 1;
}

void reference_bound(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                     const double *output, double lse, double *output_bound, double *lse_bound) {
  const double u = 0x1p-24;
  const struct row r = row_of(args, batch, head, row);
  const fa3_tensor *value = &args->value;
  int64_t head_dim = args->query.shape[args->query.rank - 1];
  int64_t value_head_dim = value->shape[value->rank - 1];
  struct rounding weights = {0, 0};
  struct rounding stored = rounding_of(args->output.dtype);
  if (args->query.dtype != FA3_FLOAT32) weights = rounding_of(args->query.dtype);

  double max = sink_of(args, head);
  double largest = isfinite(max) ? fabs(max) : 0; /* score, by magnitude */
  double keys = 0;
  double magnitude;
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!sees(&r, j)) continue;
    double x = score(&r, j, &magnitude);
    if (isfinite(x)) largest = fmax(largest, fabs(x));
    max = fmax(max, x);
    keys++;
  }
  if (lse == -INFINITY) { /* sees nothing: exactly 0 */
    for (int64_t d = 0; d < value_head_dim; d++) output_bound[d] = 0;
    *lse_bound = 0;
    return;
  }
  double sum = exp(lse - max); /* of the weights: the largest is 1 */

  double common_error = 16 * u * largest + 8 * u * args->softcap;

  /* Relative error of the denominator. */
  double error = exp(sink_of(args, head) - lse) * weight_error(16 * u * largest, keys);
  for (int64_t d = 0; d < value_head_dim; d++) output_bound[d] = 0;
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!sees(&r, j)) continue;
    double probability = exp(score(&r, j, &magnitude) - lse);
    double relative = weight_error(chain((double)head_dim) * magnitude + common_error, keys);
    int64_t first = element(value, r.batch_k, r.row_k + j, r.head_k);
    if (probability > 0) error += probability * relative;
    for (int64_t d = 0; d < value_head_dim; d++) {
      double v = fabs(reference_load(value, first + d));
      if (probability > 0) output_bound[d] += probability * (relative + weights.relative) * v;
      output_bound[d] += (weights.absolute + 0x1p-126) / sum * v + 0x1p-126;
    }
  }
  for (int64_t d = 0; d < value_head_dim; d++) {
    double before = (output_bound[d] + (error + 4 * u) * fabs(output[d])) / (1 - error);
    output_bound[d] = before + stored.relative * (fabs(output[d]) + before) + stored.absolute;
  }
  *lse_bound = -log1p(-error) + 8 * u * (largest + fabs(log(sum)));
}
