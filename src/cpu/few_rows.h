/* Few queries against many keys, for one level (after vector_*.h and softmax.h): memory bounds it,
 * so keys and values are read once, in the order in which they lie (four keys, then head after
 * head), and nothing is packed. */
#ifndef FA3_CPU_FEW_ROWS_H
#define FA3_CPU_FEW_ROWS_H

#include <float.h>

#include "product.h"
#include "routines.h"
#include "widen.h"

enum { FEW_TOGETHER = 4, FEW_WIDEST = 256 };

/* One head's rows of keys or values that share their loads. */
struct few_columns {
  const char *rows[FEW_TOGETHER];
  int64_t there; /* how many there are; the last one stands in for the others */
  uint16_t widened[FEW_TOGETHER * FEW_WIDEST] __attribute__((aligned(64)));
};

/* Where they are: codes as the float16 that they are computed with. */
INLINE void few_find(struct few_columns *columns, const char *const *rows, int64_t key,
                     int64_t count, int64_t offset, fa3_dtype dtype, int64_t width) {
  columns->there = count - key < FEW_TOGETHER ? count - key : FEW_TOGETHER;
  for (int64_t k = 0; k < FEW_TOGETHER; k++)
    columns->rows[k] = rows[key + (k < columns->there ? k : columns->there - 1)] + offset;
  if (dtype != FA3_FLOAT8_E4M3) return;
  for (int64_t k = 0; k < columns->there; k++)
    widen_codes(columns->rows[k], width, columns->widened + k * FEW_WIDEST);
  for (int64_t k = 0; k < FEW_TOGETHER; k++)
    columns->rows[k] = (const char *)(columns->widened +
                                      (k < columns->there ? k : columns->there - 1) * FEW_WIDEST);
}

/* Scores of `rows` rows with `keys` of the columns; all of these are constants where this is
 * called. */
INLINE void few_scores_block(const struct few_rows_step *s, const struct few_columns *columns,
                             fa3_dtype dtype, int64_t row, int64_t key, const int first,
                             const int rows, const int keys) {
  const int64_t size = dtype == FA3_FLOAT32 ? 4 : 2;
  const float *query = s->queries + row * s->query_stride;
  vec sum[4][4];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < keys; k++) sum[r][k] = vec_set(0);
  for (int64_t i = 0; i < s->head_dim; i += VECTOR) {
    vec column[4];
#pragma GCC unroll 4
    for (int k = 0; k < keys; k++)
      column[k] = vec_load_as(dtype, columns->rows[first + k] + i * size, s->head_dim - i);
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
      s->scores[(row + r) * FEW_KEYS + key + first + k] = vec_reduce_add(sum[r][k]);
}

INLINE void few_scores(const struct few_rows_step *s, fa3_dtype dtype) {
  const fa3_dtype loaded = dtype == FA3_FLOAT8_E4M3 ? FA3_FLOAT16 : dtype;
  struct few_columns columns;
  for (int64_t key = 0; key < s->count; key += FEW_TOGETHER)
    for (int64_t head = 0; head < s->heads; head++) {
      const int64_t end = (head + 1) * s->rows;
      int64_t row = head * s->rows;
      few_find(&columns, s->keys, key, s->count, head * s->key_head_stride, dtype, s->head_dim);
      for (; row + 4 <= end; row += 4) {
        few_scores_block(s, &columns, loaded, row, key, 0, 4, 2);
        few_scores_block(s, &columns, loaded, row, key, 2, 4, 2);
      }
      for (; row + 2 <= end; row += 2) few_scores_block(s, &columns, loaded, row, key, 0, 2, 4);
      if (row < end) few_scores_block(s, &columns, loaded, row, key, 0, 1, 4);
    }
}

static inline void few_scale(float *values, const float *scales, int64_t columns) {
  for (int64_t i = 0; i < columns; i += VECTOR)
    vec_store(values + i, vec_mul(vec_load(values + i), vec_load(scales + i)));
}

/* Of a row whose scores are there: -infinity where it sees no key, then the online softmax. */
static inline void few_softmax(const struct few_rows_step *s, int64_t head, int64_t row) {
  const int64_t at = head * s->rows + row;
  float *scores = s->scores + at * FEW_KEYS;
  const int64_t columns = (s->count + 2 * VECTOR - 1) / (2 * VECTOR) * (2 * VECTOR);
  float scale = s->scale;
  if (s->key_scales) few_scale(scores, s->key_scales + head * FEW_KEYS, columns);
  if (s->softcap > 0) {
    for (int64_t i = s->count; i < columns; i++) scores[i] = 0;
    cap(scores, columns, scale, s->softcap);
    scale = 1;
  }
  for (int64_t i = 0; i < s->seen[row].begin; i++) scores[i] = -INFINITY;
  for (int64_t i = s->seen[row].end; i < columns; i++) scores[i] = -INFINITY;
  const float to_exponent = fminf(scale * 1.44269504f, FLT_MAX);
  const float here = row_maximum(scores, columns);
  const float before = s->maximum[at];
  const float now = here > before ? here : before;
  if (now > before) {
    const float rescale = exp2f((before - now) * to_exponent);
    s->maximum[at] = now;
    s->sum[at] *= rescale;
    float *output = s->output + at * s->output_stride;
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
  s->sum[at] += vec_reduce_add(sum);
  if (s->value_scales) few_scale(scores, s->value_scales + head * FEW_KEYS, columns);
}

/* Adds the columns' values to `rows` rows, a constant where this is called. */
INLINE void few_values_block(const struct few_rows_step *s, const struct few_columns *columns,
                             fa3_dtype dtype, int64_t row, int64_t key, const int rows) {
  const int64_t size = dtype == FA3_FLOAT32 ? 4 : 2;
  float *output = s->output + row * s->output_stride;
  vec weight[2][FEW_TOGETHER];
#pragma GCC unroll 4
  for (int k = 0; k < FEW_TOGETHER; k++)
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++)
      weight[r][k] = vec_set(k < columns->there ? s->scores[(row + r) * FEW_KEYS + key + k] : 0);
  for (int64_t i = 0; i < s->value_head_dim; i += VECTOR) {
    vec column[FEW_TOGETHER];
#pragma GCC unroll 4
    for (int k = 0; k < FEW_TOGETHER; k++)
      column[k] = vec_load_as(dtype, columns->rows[k] + i * size, s->value_head_dim - i);
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
      vec sum = vec_load(output + r * s->output_stride + i);
#pragma GCC unroll 4
      for (int k = 0; k < FEW_TOGETHER; k++) sum = vec_fma(weight[r][k], column[k], sum);
      vec_store(output + r * s->output_stride + i, sum);
    }
  }
}

INLINE void few_values(const struct few_rows_step *s, fa3_dtype dtype) {
  const fa3_dtype loaded = dtype == FA3_FLOAT8_E4M3 ? FA3_FLOAT16 : dtype;
  struct few_columns columns;
  for (int64_t key = 0; key < s->count; key += FEW_TOGETHER)
    for (int64_t head = 0; head < s->heads; head++) {
      const int64_t end = (head + 1) * s->rows;
      int64_t row = head * s->rows;
      few_find(&columns, s->values, key, s->count, head * s->value_head_stride, dtype,
               s->value_head_dim);
      for (; row + 2 <= end; row += 2) few_values_block(s, &columns, loaded, row, key, 2);
      if (row < end) few_values_block(s, &columns, loaded, row, key, 1);
    }
}

INLINE void few_rows_as(const struct few_rows_step *s, fa3_dtype dtype) {
  few_scores(s, dtype);
  for (int64_t head = 0; head < s->heads; head++)
    for (int64_t row = 0; row < s->rows; row++) few_softmax(s, head, row);
  few_values(s, dtype);
}

static void few_rows(const struct few_rows_step *s) {
  if (s->dtype == FA3_FLOAT32)
    few_rows_as(s, FA3_FLOAT32);
  else if (s->dtype == FA3_FLOAT16)
    few_rows_as(s, FA3_FLOAT16);
  else if (s->dtype == FA3_BFLOAT16)
    few_rows_as(s, FA3_BFLOAT16);
  else
    few_rows_as(s, FA3_FLOAT8_E4M3);
}

#endif
