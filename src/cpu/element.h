/* Elements in the caller's memory. */
#ifndef FA3_CPU_ELEMENT_H
#define FA3_CPU_ELEMENT_H

#include "half.h"
#include "integer.h"
#include "problem.h"

static inline int64_t element_size(const struct operand *operand) {
  return (int64_t)fa3_dtype_size(operand->dtype);
}

static inline char *element(const struct operand *operand, int64_t batch, int64_t row,
                            int64_t head) {
  return operand->data +
         (batch * operand->stride_batch + row * operand->stride_row + head * operand->stride_head) *
             element_size(operand);
}

/* Element `i` from `at` on. */
static inline float load_element(const char *at, fa3_dtype dtype, int64_t i) {
  if (dtype == FA3_FLOAT32) return ((const float *)(const void *)at)[i];
  const uint16_t bits = ((const uint16_t *)(const void *)at)[i];
  return dtype == FA3_FLOAT16 ? float_from_half(bits) : float_from_bfloat(bits);
}

static inline void store_element(char *at, fa3_dtype dtype, int64_t i, float value) {
  if (dtype == FA3_FLOAT32)
    ((float *)(void *)at)[i] = value;
  else
    ((uint16_t *)(void *)at)[i] =
        dtype == FA3_FLOAT16 ? half_from_float(value) : bfloat_from_float(value);
}

/* What a head's sink holds. */
static inline float load_head_value(const struct operand *values, int64_t head) {
  return load_element(element(values, 0, 0, head), values->dtype, 0);
}

static inline void store_head_value(const struct operand *values, int64_t head, float value) {
  store_element(element(values, 0, 0, head), values->dtype, 0, value);
}

/* The softmax's scale: its size is what scores are multiplied by, its sign (1, -1 or 0) is in the
 * arranged operands, so that what masks a score is the same for every scale. */
static inline float scale_size(const struct problem *problem) {
  return problem->scale == 0 ? 1 : problem->scale > 0 ? problem->scale : -problem->scale;
}

static inline float scale_sign(const struct problem *problem) {
  return problem->scale > 0 ? 1.0f : problem->scale < 0 ? -1.0f : 0.0f;
}

/* What a score is multiplied by after the cap. */
static inline float score_scale(const struct problem *problem) {
  return problem->softcap > 0 ? 1 : scale_size(problem);
}

/* Query heads of a key head. The tile loops take them side by side, so that they share the tiles of
 * keys and values: row r is query r / group of the group's head r % group. */
static inline int64_t group_size(const struct problem *problem) {
  return problem->heads_q / problem->heads_k; /* there is at least one head */
}

/* A bound of a sequence's length; the caller's, `max_seqlen`, is 0 if not given and may be any. */
static inline int64_t longest_sequence(int64_t max_seqlen, int64_t rows) {
  return max_seqlen ? smaller(max_seqlen, rows) : rows;
}

#endif
