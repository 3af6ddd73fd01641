/* What a row's online softmax comes to. */
#ifndef FA3_CPU_ROW_END_H
#define FA3_CPU_ROW_END_H

#include <math.h>
#include <string.h>

#include "element.h"
#include "routines.h"

/* What a row's sums have to be multiplied by, and its log-sum-exp. */
struct row_end {
  float factor;
  float lse;
};

/* A sink joins the sum of exp(score - largest) as a score of its own, and may be larger than all.
 */
static inline struct row_end end_row(float largest, float sum, float sink) {
  if (sink == -INFINITY || largest == INFINITY)
    return (struct row_end){sum == 0 ? 0 : 1 / sum, sum == 0 ? -INFINITY : largest + logf(sum)};
  const float top = largest > sink ? largest : sink;
  const float weight = largest == -INFINITY ? 0 : expf(largest - top);
  const float whole = (sum == 0 ? 0 : sum * weight) + expf(sink - top);
  return (struct row_end){weight / whole, top + logf(whole)};
}

/* Stores a query's output and its lse: `output` are the values, summed with the weights whose sum
 * is `sum`. */
static inline void store_row_end(const struct problem *problem, const struct routines *routines,
                                 const struct sequence *sequence, int64_t query, int64_t head,
                                 float maximum, float sum, const float *output) {
  const int64_t batch = sequence->batch_q, row = sequence->row_q + query;
  const float sink = problem->sink.data ? load_head_value(&problem->sink, head) : -INFINITY;
  const struct row_end end = end_row(maximum * score_scale(problem), sum, sink);
  char *to = element(&problem->output, batch, row, head);
  if (sum == 0 && end.factor == 0) /* no key: zero bits are 0 in every dtype */
    memset(to, 0, (size_t)(problem->value_head_dim * element_size(&problem->output)));
  else
    routines->store_row(output, problem->value_head_dim, end.factor, problem->output.dtype, to);
  if (problem->lse.data) *(float *)(void *)element(&problem->lse, batch, row, head) = end.lse;
}

#endif
