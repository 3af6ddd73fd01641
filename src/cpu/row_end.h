/* What a row's online softmax comes to. */
#ifndef FA3_CPU_ROW_END_H
#define FA3_CPU_ROW_END_H

#include <math.h>

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

#endif
