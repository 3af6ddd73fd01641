#include "reference.h"

#include <math.h>

#include "row.h"

int64_t reference_batch(const fa3_forward_args *args) {
  return args->query.rank == 4 ? args->query.shape[0] : args->cu_seqlens_q.shape[0] - 1;
}

int64_t reference_output_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                               int64_t row) {
  return sequence_element(&args->output, &args->cu_seqlens_q, batch, row, head);
}

int64_t reference_lse_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                            int64_t row) {
  return row_value_index(&args->lse, &args->cu_seqlens_q, batch, row, head);
}

/* The capped score. */
static double score(const struct row *row, int64_t j, double *magnitude) {
  return row_cap(row, row_score(row, j, magnitude));
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
    if (!row_sees(&r, j)) continue;
    double x = score(&r, j, &magnitude);
    if (!(x <= max)) max = x; /* NaN too, and it stays */
    if (isnan(max)) break;
  }

  for (int64_t d = 0; d < value_head_dim; d++) output[d] = 0;
  *lse = -INFINITY;
  if (max == -INFINITY) return;

  double sum = exp(sink - max);
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!row_sees(&r, j)) continue;
    double weight = exp(score(&r, j, &magnitude) - max);
    double values[MAX_HEAD_DIM];
    load_key(&r, j, true, values);
    sum += weight;
    for (int64_t d = 0; d < value_head_dim; d++) output[d] += weight * values[d];
  }
  for (int64_t d = 0; d < value_head_dim; d++) output[d] /= sum;
  *lse = max + log(sum);
}

/* What a row's scores say before its values are looked at. */
struct scores {
  double keys;
  double largest;   /* by magnitude */
  double top;       /* the largest, the sink among them */
  double top_error; /* of it, and the largest of all */
  double most_error;
  int64_t top_key; /* -1: the sink, or none */
  bool overflow;   /* a product may leave float32's range */
};

/* The largest number that a score is rounded with: itself, or what is subtracted from it, which
 * lies between it and the top, less what it may lag behind by. */
static double largest_beside(const struct scores *scores, double score) {
  const double lag = 4;
  const double largest = fmax(fabs(score), fabs(scores->top)) + lag;
  return isfinite(largest) ? fmin(largest, scores->largest) : scores->largest;
}

/* How far the engine's score of a key may be off. */
static double score_error(const struct row *row, double magnitude, double largest) {
  const fa3_forward_args *args = row->args;
  const double head_dim = (double)args->query.shape[args->query.rank - 1];
  const double factors = args->key.dtype == FA3_FLOAT8_E4M3 ? 4 : 0;
  const double cut = multiplies_codes(args) ? code_sum_error(head_dim) : 0;
  return (chain(head_dim) + factors * UNIT_ROUNDOFF + cut) * magnitude +
         fabs(row->scale) * head_dim * 0x1p-126 + 16 * UNIT_ROUNDOFF * largest +
         8 * UNIT_ROUNDOFF * (double)args->softcap;
}

static struct scores scores_of(const struct row *row, double sink) {
  struct scores s = {.largest = isfinite(sink) ? fabs(sink) : 0, .top = sink, .top_key = -1};
  double magnitude, most = 0, top = 0;
  for (int64_t j = 0; j < row->seqlen_k; j++) {
    if (!row_sees(row, j)) continue;
    const double x = score(row, j, &magnitude);
    if (isfinite(x)) s.largest = fmax(s.largest, fabs(x));
    if (x > s.top) {
      s.top = x;
      s.top_key = j;
      top = magnitude;
    }
    most = fmax(most, magnitude);
    s.overflow |= isfinite(magnitude) && magnitude > 0x1p127 * fabs(row->scale);
    s.keys++;
  }
  s.top_error = score_error(row, top, largest_beside(&s, s.top));
  s.most_error = score_error(row, most, s.largest);
  return s;
}

/* exp(exponent), with what an exponential and a sum of `keys` of them lose. */
static double weight_at_most(double exponent, double keys) {
  return exp(exponent) * (1 + 4 * UNIT_ROUNDOFF) * (1 + chain(2 * keys));
}

/* Three bounds of a row's output before it is stored (docs/numerics.md): the smallest holds. */
struct bounds {
  double denominator; /* relative error */
  double absolute[MAX_HEAD_DIM];
  double sums[MAX_HEAD_DIM];
  double beside_top[MAX_HEAD_DIM]; /* what other keys than the top one can add */
  double top[MAX_HEAD_DIM];
  double least[MAX_HEAD_DIM];
  double most[MAX_HEAD_DIM];
};

static void include_value(struct bounds *bounds, int64_t d, double value) {
  bounds->least[d] = fmin(bounds->least[d], value);
  bounds->most[d] = fmax(bounds->most[d], value);
}

static double smallest_bound(const struct bounds *b, int64_t d, double output, double rounding) {
  const double size = fmax(fabs(b->least[d]), fabs(b->most[d]));
  double bound = fmax(b->most[d] - output, output - b->least[d]) + rounding * size + b->absolute[d];
  const double decided = fabs(output - b->top[d]) + b->beside_top[d] +
                         rounding * (fabs(b->top[d]) + b->beside_top[d]) + b->absolute[d];
  if (decided < bound) bound = decided;
  const double summed =
      (b->sums[d] + b->absolute[d] + (b->denominator + 4 * UNIT_ROUNDOFF) * fabs(output)) /
      (1 - b->denominator);
  return b->denominator < 1 && summed < bound ? summed : bound;
}

/* Weights of 2^7 or more at the top become codes, with 4 bits, or multiples of 2^-9. Where keys and
 * values have a scale for each head the top may be as little as 2^3. Sums go to float32 after 4096
 * keys at most. */
static struct rounding code_rounding(const fa3_forward_args *args, double keys) {
  const bool of_heads = args->key_scale_rows == 0 && args->value_scale_rows == 0;
  return (struct rounding){0x1p-4 + code_sum_error(fmin(keys, 4096)), of_heads ? 0x1p-13 : 0x1p-17};
}

void reference_bound(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                     const double *output, double lse, double *output_bound, double *lse_bound) {
  const double u = UNIT_ROUNDOFF, sink = sink_of(args, head);
  const struct row r = row_of(args, batch, head, row);
  const fa3_tensor *value = &args->value;
  const int64_t value_head_dim = value->shape[value->rank - 1];
  const bool codes = multiplies_codes(args), scaled = codes || rounds_scaled_weights(args);
  const struct rounding stored = rounding_of(args->output.dtype);
  const struct scores s = scores_of(&r, sink);
  const struct rounding weights = codes    ? code_rounding(args, s.keys)
                                  : scaled ? rounding_of(FA3_FLOAT16)
                                           : weight_rounding(value->dtype);
  if (lse == -INFINITY || s.overflow) { /* sees nothing: exactly 0 */
    for (int64_t d = 0; d < value_head_dim; d++) output_bound[d] = s.overflow ? INFINITY : 0;
    *lse_bound = s.overflow ? INFINITY : 0;
    return;
  }
  const double sum = exp(lse - s.top); /* of the weights: the largest is 1 */
  const double sink_error = 16 * u * largest_beside(&s, sink);
  double greatest_scale = 0;
  for (int64_t j = 0; j < r.seqlen_k && scaled; j++)
    if (row_sees(&r, j)) greatest_scale = fmax(greatest_scale, value_scale(&r, j));

  struct bounds b = {0};
  if (s.top_key >= 0) load_key(&r, s.top_key, true, b.top);
  for (int64_t d = 0; d < value_head_dim; d++) {
    b.least[d] = b.most[d] = b.top[d];
    if (sink > -INFINITY) include_value(&b, d, 0);
    if (sink > -INFINITY && s.top_key >= 0)
      b.beside_top[d] +=
          weight_at_most(sink - s.top + sink_error + s.top_error, s.keys) * fabs(b.top[d]);
  }
  b.denominator = weight_at_most(sink - lse + sink_error, s.keys) - exp(sink - lse);
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!row_sees(&r, j)) continue;
    double magnitude, values[MAX_HEAD_DIM];
    const double x = score(&r, j, &magnitude), probability = exp(x - lse);
    const double error = score_error(&r, magnitude, largest_beside(&s, x));
    const double off = weight_at_most(x - lse + error, s.keys) - probability;
    const double beside =
        j == s.top_key ? 0 : weight_at_most(x - s.top + error + s.top_error, s.keys);
    const double scale = scaled ? value_scale(&r, j) : 1;
    const double absolute = weights.absolute * (scaled && scale > 0 ? greatest_scale / scale : 1);
    load_key(&r, j, true, values);
    b.denominator += off;
    for (int64_t d = 0; d < value_head_dim; d++) {
      const double v = fabs(values[d]);
      b.sums[d] += (off + probability * weights.relative) * v;
      b.absolute[d] += (absolute + 0x1p-126) / sum * v + 0x1p-126;
      if (beside > 0) b.beside_top[d] += beside * fabs(values[d] - b.top[d]);
      include_value(&b, d, values[d]);
    }
  }
  const double rounding = 2 * (weights.relative + 8 * u + chain(2 * s.keys));
  for (int64_t d = 0; d < value_head_dim; d++) {
    const double before = smallest_bound(&b, d, output[d], rounding);
    output_bound[d] = before + stored.relative * (fabs(output[d]) + before) + stored.absolute;
  }
  /* A log-sum-exp moves by no more than the score that moves most. */
  const double moved = fmax(s.most_error, sink_error) + 4 * u + chain(2 * s.keys);
  const double summed = b.denominator < 1 ? -log1p(-b.denominator) : INFINITY;
  *lse_bound = fmin(moved, summed) + 8 * u * (largest_beside(&s, s.top) + fabs(log(sum)));
}
