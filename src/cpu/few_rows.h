/* Few queries against many keys, for one level (after vector_*.h and softmax.h): memory bounds it,
 * so keys and values are read once, as they lie, and nothing is packed. */
#ifndef FA3_CPU_FEW_ROWS_H
#define FA3_CPU_FEW_ROWS_H

#include <float.h>

#include "product.h"
#include "routines.h"

/* Scores of `rows` x `keys` rows that share their loads; both are constants where this is called.
 */
INLINE void few_scores_block(const struct few_rows_step *s, fa3_dtype dtype, int64_t element_size,
                             int64_t row, int64_t key, const int rows, const int keys) {
  vec sum[4][4];
  const char *from[4];
  const float *query = s->queries + row * s->query_stride;
  for (int k = 0; k < keys; k++) from[k] = s->keys[key + k < s->count ? key + k : s->count - 1];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < keys; k++) sum[r][k] = vec_set(0);
  for (int64_t i = 0; i < s->head_dim; i += VECTOR) {
    vec column[4];
#pragma GCC unroll 4
    for (int k = 0; k < keys; k++)
      column[k] = vec_load_as(dtype, from[k] + i * element_size, s->head_dim - i);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      const vec element = vec_load(query + r * s->query_stride + i);
#pragma GCC unroll 4
      for (int k = 0; k < keys; k++) sum[r][k] = vec_fma(element, column[k], sum[r][k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < keys; k++)
      s->scores[(row + r) * FEW_KEYS + key + k] = vec_reduce_add(sum[r][k]);
}

/* Rows that come next, which lie apart: no processor foresees them. */
static inline void few_prefetch(const char *const *rows, int64_t count, int64_t key,
                                int64_t bytes) {
  for (int64_t k = key; k < key + 4 && k < count; k++)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[k] + i);
}

INLINE void few_scores(const struct few_rows_step *s, fa3_dtype dtype, int64_t element_size) {
  for (int64_t key = 0; key < s->count; key += 4) {
    int64_t row = 0;
    few_prefetch(s->values, s->count, key, s->value_head_dim * element_size);
    for (; row + 4 <= s->rows; row += 4) {
      few_scores_block(s, dtype, element_size, row, key, 4, 2);
      few_scores_block(s, dtype, element_size, row, key + 2, 4, 2);
    }
    for (; row < s->rows; row++) few_scores_block(s, dtype, element_size, row, key, 1, 4);
  }
}

/* Of a row whose scores are there: -infinity where it sees no key, then the online softmax. */
static inline void few_softmax(const struct few_rows_step *s, int64_t row) {
  float *scores = s->scores + row * FEW_KEYS;
  const int64_t columns = (s->count + 2 * VECTOR - 1) / (2 * VECTOR) * (2 * VECTOR);
  float scale = s->scale;
  if (s->softcap > 0) {
    for (int64_t i = s->count; i < columns; i++) scores[i] = 0;
    cap(scores, columns, scale, s->softcap);
    scale = 1;
  }
  for (int64_t i = 0; i < s->seen[row].begin; i++) scores[i] = -INFINITY;
  for (int64_t i = s->seen[row].end; i < columns; i++) scores[i] = -INFINITY;
  const float to_exponent = fminf(scale * 1.44269504f, FLT_MAX);
  const float here = row_maximum(scores, columns);
  const float before = s->maximum[row];
  const float now = here > before ? here : before;
  if (now > before) {
    const float rescale = exp2f((before - now) * to_exponent);
    s->maximum[row] = now;
    s->sum[row] *= rescale;
    float *output = s->output + row * s->output_stride;
    for (int64_t i = 0; i < s->output_stride; i += VECTOR)
      vec_store(output + i, vec_mul(vec_load(output + i), vec_set(rescale)));
  }
  /* The difference comes first, as in softmax.h. */
  const vec shift = vec_set(now == -INFINITY ? 0 : now), factor = vec_set(to_exponent);
  vec sum = vec_set(0);
  for (int64_t i = 0; i < columns; i += VECTOR) {
    const vec weight = vec_exp2(vec_mul(vec_sub(vec_load(scores + i), shift), factor));
    vec_store(scores + i, weight);
    sum = vec_add(sum, weight);
  }
  s->sum[row] += vec_reduce_add(sum);
}

/* Adds four keys' values to `rows` rows, a constant where this is called. */
INLINE void few_values_block(const struct few_rows_step *s, fa3_dtype dtype, int64_t element_size,
                             int64_t row, int64_t key, const int rows) {
  vec weight[2][4];
  const char *from[4];
  float *output = s->output + row * s->output_stride;
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    const int64_t there = key + k < s->count ? key + k : s->count - 1;
    from[k] = s->values[there];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
      weight[r][k] = vec_set(there == key + k ? s->scores[(row + r) * FEW_KEYS + there] : 0);
  }
  for (int64_t i = 0; i < s->value_head_dim; i += VECTOR) {
    vec column[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
      column[k] = vec_load_as(dtype, from[k] + i * element_size, s->value_head_dim - i);
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
      vec sum = vec_load(output + r * s->output_stride + i);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) sum = vec_fma(weight[r][k], column[k], sum);
      vec_store(output + r * s->output_stride + i, sum);
    }
  }
}

INLINE void few_values(const struct few_rows_step *s, fa3_dtype dtype, int64_t element_size) {
  for (int64_t key = 0; key < s->count; key += 4) {
    int64_t row = 0;
    few_prefetch(s->next_keys, s->next_count, key, s->head_dim * element_size);
    for (; row + 2 <= s->rows; row += 2) few_values_block(s, dtype, element_size, row, key, 2);
    if (row < s->rows) few_values_block(s, dtype, element_size, row, key, 1);
  }
}

INLINE void few_rows_as(const struct few_rows_step *s, fa3_dtype dtype, int64_t element_size) {
  few_scores(s, dtype, element_size);
  for (int64_t row = 0; row < s->rows; row++) few_softmax(s, row);
  few_values(s, dtype, element_size);
}

static void few_rows(const struct few_rows_step *s) {
  if (s->dtype == FA3_FLOAT32)
    few_rows_as(s, FA3_FLOAT32, 4);
  else if (s->dtype == FA3_FLOAT16)
    few_rows_as(s, FA3_FLOAT16, 2);
  else
    few_rows_as(s, FA3_BFLOAT16, 2);
}

#endif
