#include "reference.h"

#include <math.h>

#include "row.h"

int64_t reference_batch(const fa3_forward_args *args) {
  return args->query.rank == 4 ? args->query.shape[0] : args->cu_seqlens_q.shape[0] - 1;
}

int64_t reference_seqlen_q(const fa3_forward_args *args, int64_t batch) {
  return sequence_rows(&args->query, &args->cu_seqlens_q, &args->seqused_q, batch);
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

/* Element 0 of the value of key j. */
static int64_t value_index(const struct row *row, int64_t j) {
  const fa3_forward_args *args = row->args;
  return sequence_element(&args->value, &args->cu_seqlens_k, row->batch_k, row->row_k + j,
                          row->head_k);
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
    load_elements(value, value_index(&r, j), value_head_dim, values);
    sum += weight;
    for (int64_t d = 0; d < value_head_dim; d++) output[d] += weight * values[d];
  }
  for (int64_t d = 0; d < value_head_dim; d++) output[d] /= sum;
  *lse = max + log(sum);
}

/* Relative error of exp(score - max) after it has been summed with the other `keys`. */
static double weight_error(double score_error, double keys) {
  return exp(score_error) * (1 + 4 * UNIT_ROUNDOFF) * (1 + chain(2 * keys)) - 1;
}

void reference_bound(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                     const double *output, double lse, double *output_bound, double *lse_bound) {
  const double u = UNIT_ROUNDOFF;
  const struct row r = row_of(args, batch, head, row);
  const fa3_tensor *value = &args->value;
  int64_t head_dim = args->query.shape[args->query.rank - 1];
  int64_t value_head_dim = value->shape[value->rank - 1];
  struct rounding weights = weight_rounding(args->query.dtype);
  struct rounding stored = rounding_of(args->output.dtype);

  double max = sink_of(args, head);
  double largest = isfinite(max) ? fabs(max) : 0; /* score, by magnitude */
  double keys = 0;
  double magnitude;
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!row_sees(&r, j)) continue;
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
    if (!row_sees(&r, j)) continue;
    double probability = exp(score(&r, j, &magnitude) - lse);
    double relative = weight_error(chain((double)head_dim) * magnitude + common_error, keys);
    double values[MAX_HEAD_DIM];
    load_elements(value, value_index(&r, j), value_head_dim, values);
    if (probability > 0) error += probability * relative;
    for (int64_t d = 0; d < value_head_dim; d++) {
      double v = fabs(values[d]);
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
