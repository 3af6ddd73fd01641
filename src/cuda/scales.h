/* What kernels multiply by: the factors that turn a product of query and key into an exponent of 2,
 * and the scales of FP8 operands. */
#ifndef FA3_SRC_CUDA_SCALES_H
#define FA3_SRC_CUDA_SCALES_H

#include <float.h>
#include <math.h>

#include "kernels/fp8_scales.h"
#include "kernels/softmax_scale.h"
#include "problem.h"

struct scales {
  float scale;        /* of the scores, or the cap */
  float scale_log2;   /* the same times log2(e) */
  float softcap_log2; /* 0: no cap; else scale / cap * 2 log2(e) */
};

/* Never 0, which would make NaN of a masked score, or of a cap none. It is no infinity either:
 * check_scale refuses what would be. */
static inline float scales_nonzero(double factor) {
  const float rounded = (float)factor;
  return rounded != 0 ? rounded : FLT_TRUE_MIN;
}

static inline struct scales make_scales(double scale, double softcap) {
  const double log2e = 1.4426950408889634;
  if (softcap > 0)
    return (struct scales){.scale = scales_nonzero(softcap),
                           .scale_log2 = scales_nonzero(softcap * log2e),
                           .softcap_log2 = scales_nonzero(2 * log2e * scale / softcap)};
  return (struct scales){.scale = scales_nonzero(scale),
                         .scale_log2 = scales_nonzero(scale * log2e)};
}

/* Of an operand of so many heads. */
static inline fa3_scales make_fp8_scales(const struct operand *scale, int64_t rows, int64_t heads) {
  return (fa3_scales){.data = (const float *)(const void *)scale->data,
                      .stride_batch = scale->stride_batch,
                      .stride_head = scale->stride_head,
                      .stride_block = scale->stride_row,
                      .rows = rows < INT32_MAX ? (int)rows : INT32_MAX,
                      .heads_per_scale = scale->heads ? (int)(heads / scale->heads) : 1};
}

/* `factor`, which is not negative, is the scale of the scores, or the cap. */
static inline fa3_softmax_scale make_softmax_scale(double factor) {
  const double least_exponent = -1.7e38, largest_exponent = 0x1p22;
  const float log2 = make_scales(factor, 0).scale_log2;
  const double inverse = 1 / (double)log2;
  return (fa3_softmax_scale){
      .natural = (float)factor,
      .log2 = log2,
      .inverse = (float)fmin(inverse, (double)FLT_MAX),
      .limit = (float)fmin(largest_exponent * inverse, (double)FLT_MAX),
      .none = (float)(log2 > 1 ? least_exponent / (double)log2 : least_exponent)};
}

#endif
