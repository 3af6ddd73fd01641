/* Few queries against many keys, for one level (after vector_*.h and softmax.h): memory bounds it,
 * so keys and values are read once, as they lie, and nothing is arranged.
 *
 * Four keys are taken together, all heads of them one after the other. They are not neighbours but
 * a quarter of a step's keys apart: so memory is read in four streams, each in its own pages from
 * its first byte to its last, which is what a processor foresees. (Several streams in one page it
 * does not.)
 *
 * bfloat16 is widened without moving elements between lanes: of each two vectors the even elements
 * come first, then the odd ones. Queries and outputs are in that order too (few_order). */
#ifndef FA3_CPU_FEW_ROWS_H
#define FA3_CPU_FEW_ROWS_H

#include <float.h>
#include <string.h>

#include "head_dim.h"
#include "product.h"
#include "routines.h"
#include "widen.h"

/* SUMS vectors are half of the registers (AVX-512 has 32, AVX2 has 16); the rest hold what is added
 * to them. */
enum { STREAMS = 4, PAIR = 2 * VECTOR, SUMS = VECTOR == 16 ? 16 : 8, WIDENED_HEADS = 8, LINE = 64 };

/* Keys of a stream; only the last streams may have fewer. */
INLINE int64_t few_stream(const struct few_rows_step *s) {
  return (s->count + STREAMS - 1) / STREAMS;
}

/* One head's rows of keys or values that are taken together. */
struct few_columns {
  const char *rows[STREAMS];
  int64_t keys[STREAMS]; /* which they are */
  int64_t count;         /* the first one stands in for those that are not there */
};

/* A step's rows of keys or values. */
struct few_operand {
  const char *const *rows; /* of the first head */
  int64_t head_stride;     /* bytes from head to head */
  int64_t width;           /* elements */
  int64_t fetched;         /* bytes of a row that are asked for early */
};

/* Codes of some heads' columns as the float16 that they are computed with. The heads are widened
 * one after the other before the first is used, as what has just been stored is slow to load. */
struct few_widened {
  largest_code largest;
  uint16_t halves[WIDENED_HEADS * STREAMS * LARGEST_HEAD_DIM] __attribute__((aligned(64)));
};

/* The keys at this position of the streams. */
INLINE void few_take(struct few_columns *columns, const struct few_rows_step *s, int64_t position) {
  const int64_t stream = few_stream(s);
  columns->count = 0;
  for (int64_t k = 0; k < STREAMS; k++) {
    columns->keys[k] = k * stream + position;
    columns->count += columns->keys[k] < s->count;
  }
}

/* Where they are, of one head. The streams' next rows are asked for: they are needed when all heads
 * of these are done, and once. */
INLINE void few_find(struct few_columns *columns, const struct few_rows_step *s,
                     const struct few_operand *operand, int64_t head) {
  const int64_t offset = head * operand->head_stride;
  const char *next[STREAMS];
  for (int64_t k = 0; k < STREAMS; k++) {
    const int64_t key = columns->keys[k < columns->count ? k : 0];
    columns->rows[k] = operand->rows[key] + offset;
    next[k] = operand->rows[key + 1 < s->count ? key + 1 : key] + offset;
  }
  for (int64_t i = 0; i < operand->fetched; i += LINE)
#pragma GCC unroll 4
    for (int k = 0; k < STREAMS; k++) __builtin_prefetch(next[k] + i, 0, 0);
}

/* The same, as float16. */
INLINE void few_find_codes(struct few_columns *columns, const struct few_rows_step *s,
                           const struct few_operand *operand, int64_t head,
                           struct few_widened *widened) {
  const int64_t width = operand->width, size = STREAMS * width;
  for (int64_t h = head; head % WIDENED_HEADS == 0 && h < head + WIDENED_HEADS && h < s->heads;
       h++) {
    few_find(columns, s, operand, h);
    widened->largest =
        widen_codes(columns->rows, width, widened->halves + (h - head) * size, widened->largest);
  }
  for (int64_t k = 0; k < STREAMS; k++)
    columns->rows[k] = (const char *)(widened->halves + head % WIDENED_HEADS * size + k * width);
}

/* Half of a pair of vectors. */
INLINE vec few_half(fa3_dtype dtype, const char *pair, const int half) {
  if (dtype == FA3_BFLOAT16) return half ? vec_load_odd(pair) : vec_load_even(pair);
  return vec_load_as(dtype, pair + half * VECTOR * size_of(dtype), VECTOR);
}

/* Scores of `rows` rows with `keys` of the columns; all of these are constants where this is
 * called. */
INLINE void few_scores_block(const struct few_rows_step *s, const struct few_columns *columns,
                             fa3_dtype dtype, int64_t row, const int first, const int rows,
                             const int keys) {
  const int64_t size = size_of(dtype), dim = s->head_dim;
  const int64_t whole = dim / PAIR * PAIR, stride = s->query_stride;
  const float *query = s->queries + row * stride;
  const char *from[4];
  vec sum[4][4];
#pragma GCC unroll 4
  for (int k = 0; k < keys; k++) from[k] = columns->rows[first + k];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < keys; k++) sum[r][k] = vec_set(0);
#define ADD_PRODUCTS(at, load)                                               \
  {                                                                          \
    vec column[4];                                                           \
    _Pragma("GCC unroll 4") for (int k = 0; k < keys; k++) column[k] = load; \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {                 \
      const vec element = vec_load(query + r * stride + (at));               \
      _Pragma("GCC unroll 4") for (int k = 0; k < keys; k++) sum[r][k] =     \
          vec_fma(element, column[k], sum[r][k]);                            \
    }                                                                        \
  }
  for (int64_t i = 0; i < whole; i += PAIR) {
    ADD_PRODUCTS(i, few_half(dtype, from[k] + i * size, 0))
    ADD_PRODUCTS(i + VECTOR, few_half(dtype, from[k] + i * size, 1))
  }
  for (int64_t i = whole; i < dim; i += VECTOR)
    ADD_PRODUCTS(i, vec_load_as(dtype, from[k] + i * size, dim - i))
#undef ADD_PRODUCTS
#pragma GCC unroll 4
  for (int n = 0; n < rows * keys; n += 4) {
    vec four[4];
    float sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) four[i] = sum[(n + i) / keys][(n + i) % keys];
    vec_reduce_add_quad(four, sums);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      s->scores[(row + (n + i) / keys) * FEW_KEYS + columns->keys[first + (n + i) % keys]] =
          sums[i];
  }
}

INLINE void few_scores_rows(const struct few_rows_step *s, const struct few_columns *columns,
                            fa3_dtype dtype, int64_t row, const int rows) {
  const int keys = rows * STREAMS <= SUMS ? STREAMS : SUMS / rows;
  few_scores_block(s, columns, dtype, row, 0, rows, keys);
  if (keys < STREAMS) few_scores_block(s, columns, dtype, row, keys, rows, keys);
}

static inline void few_scale(float *values, const float *scales, int64_t columns) {
  for (int64_t i = 0; i < columns; i += VECTOR)
    vec_store(values + i, vec_mul(vec_load(values + i), vec_load(scales + i)));
}

/* Of a row whose scores are there: -infinity where it sees no key, then the online softmax. */
static inline void few_softmax(const struct few_rows_step *s, int64_t head, int64_t row) {
  const int64_t at = head * s->rows + row;
  float *scores = s->scores + at * FEW_KEYS;
  const int64_t columns = (s->count + PAIR - 1) / PAIR * PAIR;
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

/* Adds elements from `i` on of the columns' values to `rows` rows: `vectors` vectors of them, in
 * pairs, or one that is no half of a pair. All but the positions are constants where this is
 * called.
 */
INLINE void few_values_block(const struct few_rows_step *s, const struct few_columns *columns,
                             fa3_dtype dtype, int64_t row, int64_t i, const int rows,
                             const int vectors) {
  const int64_t size = size_of(dtype), stride = s->output_stride;
  const int64_t left = s->value_head_dim - i, count = columns->count;
  const float *weights = s->scores + row * FEW_KEYS;
  float *output = s->output + row * stride + i;
  vec sum[4][8];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sum[r][v] = vec_load(output + r * stride + v * VECTOR);
  for (int64_t k = 0; k < count; k++) {
    const char *from = columns->rows[k] + i * size;
    vec weight[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) weight[r] = vec_set(weights[r * FEW_KEYS + columns->keys[k]]);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
      const vec column = vectors == 1 ? vec_load_as(dtype, from, left)
                                      : few_half(dtype, from + v / 2 * PAIR * size, v % 2);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][v] = vec_fma(weight[r], column, sum[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) vec_store(output + r * stride + v * VECTOR, sum[r][v]);
}

/* Many vectors at a time, as many as SUMS allows, then pairs, then single vectors. */
INLINE void few_values_rows(const struct few_rows_step *s, const struct few_columns *columns,
                            fa3_dtype dtype, int64_t row, const int rows) {
  const int vectors = rows * 8 <= SUMS ? 8 : SUMS / rows;
  int64_t i = 0;
  for (; i + vectors * VECTOR <= s->value_head_dim; i += vectors * VECTOR)
    few_values_block(s, columns, dtype, row, i, rows, vectors);
  for (; vectors > 2 && i + PAIR <= s->value_head_dim; i += PAIR)
    few_values_block(s, columns, dtype, row, i, rows, 2);
  for (; i < s->value_head_dim; i += VECTOR) few_values_block(s, columns, dtype, row, i, rows, 1);
}

/* A product of rows and columns: the scores of a step's keys, or the sums of its values. */
typedef void few_product(const struct few_rows_step *s, const struct few_columns *columns,
                         fa3_dtype dtype, int64_t row, const int rows);

/* All rows with all of `operand`, the step's keys or values: four rows of a head together, then
 * two, then one. Returns whether there are codes that are NaN, which are taken for numbers. */
INLINE bool few_multiply(const struct few_rows_step *s, const struct few_operand *operand,
                         fa3_dtype dtype, few_product *add) {
  const fa3_dtype loaded = dtype == FA3_FLOAT8_E4M3 ? FA3_FLOAT16 : dtype;
  const int64_t stream = few_stream(s);
  struct few_columns columns;
  struct few_widened widened;
  widened.largest = (largest_code){0};
  for (int64_t position = 0; position < stream; position++) {
    few_take(&columns, s, position);
    for (int64_t head = 0; head < s->heads; head++) {
      const int64_t end = (head + 1) * s->rows;
      int64_t row = head * s->rows;
      if (dtype == FA3_FLOAT8_E4M3)
        few_find_codes(&columns, s, operand, head, &widened);
      else
        few_find(&columns, s, operand, head);
      for (; row + 4 <= end; row += 4) add(s, &columns, loaded, row, 4);
      for (; row + 2 <= end; row += 2) add(s, &columns, loaded, row, 2);
      if (row < end) add(s, &columns, loaded, row, 1);
    }
  }
  return has_nan(widened.largest);
}

/* A key that has a NaN: its scores are NaN. */
static void few_spoil_scores(const struct few_rows_step *s) {
  for (int64_t head = 0; head < s->heads; head++)
    for (int64_t k = 0; k < s->count; k++)
      for (int64_t i = 0; i < s->head_dim; i++)
        for (int64_t row = 0; row < s->rows; row++)
          if (code_is_nan(s->keys[k][head * s->key_head_stride + i]))
            s->scores[(head * s->rows + row) * FEW_KEYS + k] = NAN;
}

/* A value that has one: so is that element of the rows that see it. */
static void few_spoil_outputs(const struct few_rows_step *s) {
  for (int64_t head = 0; head < s->heads; head++)
    for (int64_t k = 0; k < s->count; k++)
      for (int64_t i = 0; i < s->value_head_dim; i++)
        for (int64_t row = 0; row < s->rows; row++)
          if (code_is_nan(s->values[k][head * s->value_head_stride + i]) &&
              s->seen[row].begin <= k && k < s->seen[row].end)
            s->output[(head * s->rows + row) * s->output_stride + i] = NAN;
}

/* Rows of float32 arrive as fast as they can without being asked for early. */
INLINE int64_t few_fetched(fa3_dtype dtype, int64_t width) {
  return dtype == FA3_FLOAT32 ? 0 : width * size_of(dtype);
}

INLINE void few_rows_as(fa3_dtype dtype, const struct few_rows_step *s) {
  const struct few_operand keys = {s->keys, s->key_head_stride, s->head_dim,
                                   few_fetched(dtype, s->head_dim)};
  const struct few_operand values = {s->values, s->value_head_stride, s->value_head_dim,
                                     few_fetched(dtype, s->value_head_dim)};
  if (few_multiply(s, &keys, dtype, few_scores_rows)) few_spoil_scores(s);
  for (int64_t head = 0; head < s->heads; head++)
    for (int64_t row = 0; row < s->rows; row++) few_softmax(s, head, row);
  if (few_multiply(s, &values, dtype, few_values_rows)) few_spoil_outputs(s);
}

static void few_rows(const struct few_rows_step *s) {
  if (s->dtype == FA3_FLOAT8_E4M3)
    few_rows_as(FA3_FLOAT8_E4M3, s);
  else
    BY_DTYPE(s->dtype, few_rows_as, s);
}

/* A row in the order that a cache of the dtype is computed in, or back in its own. */
static void few_order(float *row, int64_t width, fa3_dtype dtype, bool back) {
  for (int64_t i = 0; dtype == FA3_BFLOAT16 && i + PAIR <= width; i += PAIR) {
    float pair[PAIR];
    memcpy(pair, row + i, sizeof pair);
    for (int n = 0; n < PAIR; n++) {
      const int there = n % 2 * VECTOR + n / 2;
      row[i + (back ? n : there)] = pair[back ? there : n];
    }
  }
}

#endif
