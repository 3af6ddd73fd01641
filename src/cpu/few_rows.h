/* Few queries against many keys, for one level (after vector_*.h and softmax.h): memory bounds it,
 * so keys and values are read once, as they lie, and nothing is arranged.
 *
 * A group of neighbouring keys is taken together, all heads of it one after the other, and while a
 * head is computed with, as many rows of the next group are asked for, a line at a time: of many
 * lines at once the processor forgets some. Where memory decides, a group is four keys, and rows of
 * the same head are asked for: so memory is read in four streams. Where computing does, a group is
 * larger, for its sake, and its rows are asked for in their order.
 *
 * bfloat16 is widened without moving elements between lanes: of each two vectors the even elements
 * come first, then the odd ones. Queries and outputs are in that order too (few_order). With
 * FEW_PAIRS, MULTIPLY_ADD multiplies pairs of bfloat16: then queries are bfloat16 alone, or codes,
 * and they and keys are multiplied as they are, or as what codes are in bfloat16 (few_codes.h). */
#ifndef FA3_CPU_FEW_ROWS_H
#define FA3_CPU_FEW_ROWS_H

#include <float.h>
#include <string.h>

#include "head_dim.h"
#include "product.h"
#include "routines.h"

#ifndef FEW_PAIRS
#define FEW_PAIRS 0
#endif
#include "widen.h"

/* SUMS vectors are half of the registers (AVX-512 has 32, AVX2 has 16); the rest hold what is added
 * to them. */
enum {
  TOGETHER = 4,
  PAIR = 2 * VECTOR,
  SUMS = VECTOR == 16 ? 16 : 8,
  WAITING_ROWS = SUMS / TOGETHER, /* with so few memory decides, not computing */
  LINE = 64,
  NEAR = 16 << 10 /* bytes that are asked for early and still in the first cache when needed */
};

/* A step's rows of keys or values. */
struct few_operand {
  const char *const *rows; /* of the first head */
  int64_t head_stride;     /* bytes from head to head */
  int64_t width;           /* elements */
};

/* One head's rows of a group, and the rows that are asked for meanwhile. */
struct few_columns {
  const char *const *rows;
  const char *const *next;
  int64_t first; /* key of the step */
  int64_t count;
  code_marks marks; /* of all codes so far */
};

static inline bool few_waits(const struct few_rows_step *s) {
  return s->rows <= WAITING_ROWS && s->dtype != FA3_FLOAT8_E4M3;
}

/* How many keys a group has. Large ones should not leave the first cache. */
static inline int64_t few_group(const struct few_rows_step *s) {
  if (few_waits(s)) return TOGETHER;
  return s->dtype == FA3_FLOAT8_E4M3 && s->rows >= TOGETHER ? FEW_GROUP : FEW_GROUP / 2;
}

/* Asks for `size` bytes, a constant, of a row: where memory decides, as read once. */
INLINE void few_fetch(const char *row, const int64_t size, const int rows) {
#pragma GCC unroll 16
  for (int64_t at = 0; at < size; at += LINE) {
    if (rows <= WAITING_ROWS)
      __builtin_prefetch(row + at, 0, 0);
    else
      __builtin_prefetch(row + at);
  }
}

/* `vectors` vectors of `rows` rows' outputs, which are added to in registers. Both are constants
 * where this is called. */
INLINE void few_load_sums(vec sum[4][8], const float *output, const int rows, const int vectors) {
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sum[r][v] = vec_load(output + r * FEW_STRIDE + v * VECTOR);
}

INLINE void few_store_sums(vec sum[4][8], float *output, const int rows, const int vectors) {
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) vec_store(output + r * FEW_STRIDE + v * VECTOR, sum[r][v]);
}

#if FEW_PAIRS
#include "few_codes.h"
#endif

/* Half of a pair of vectors. */
INLINE vec few_half(fa3_dtype dtype, const char *pair, const int half) {
  if (dtype == FA3_BFLOAT16) return half ? vec_load_odd(pair) : vec_load_even(pair);
  return vec_load_as(dtype, pair + half * VECTOR * size_of(dtype), VECTOR);
}

/* Where a row's element is in an output. */
static inline int64_t few_place(int64_t i, int64_t width, fa3_dtype dtype) {
#if FEW_PAIRS
  if (dtype == FA3_FLOAT8_E4M3) return few_code_place(i);
#endif
  const int64_t n = i % PAIR, pair = i - n;
  return dtype == FA3_BFLOAT16 && pair + PAIR <= width ? pair + n % 2 * VECTOR + n / 2 : i;
}

/* Scores of `rows` rows with four keys; dtype and rows are constants where this is called. */
INLINE void few_scores_block(const float *query, int64_t dim, const char *const rows_of[TOGETHER],
                             const char *const next_of[TOGETHER], float *scores, fa3_dtype dtype,
                             const int rows) {
  const char *const from[TOGETHER] = {rows_of[0], rows_of[1], rows_of[2], rows_of[3]};
  const char *const next[TOGETHER] = {next_of[0], next_of[1], next_of[2], next_of[3]};
  const int64_t size = size_of(dtype), whole = dim / PAIR * PAIR;
  vec sum[4][TOGETHER];
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < TOGETHER; k++) sum[r][k] = vec_set(0);
#define ADD_PRODUCTS(at, load)                                                   \
  {                                                                              \
    vec column[TOGETHER];                                                        \
    _Pragma("GCC unroll 4") for (int k = 0; k < TOGETHER; k++) column[k] = load; \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {                     \
      const vec element = vec_load(query + r * FEW_STRIDE + (at));               \
      _Pragma("GCC unroll 4") for (int k = 0; k < TOGETHER; k++) sum[r][k] =     \
          MULTIPLY_ADD(sum[r][k], element, column[k]);                           \
    }                                                                            \
  }
  for (int64_t i = 0; i < whole; i += PAIR) {
#pragma GCC unroll 4
    for (int k = 0; k < TOGETHER; k++) few_fetch(next[k] + i * size, PAIR * size, rows);
    ADD_PRODUCTS(i, few_half(dtype, from[k] + i * size, 0))
    ADD_PRODUCTS(i + VECTOR, few_half(dtype, from[k] + i * size, 1))
  }
  for (int64_t i = whole; i < dim; i += VECTOR)
    ADD_PRODUCTS(i, vec_load_as(dtype, from[k] + i * size, dim - i))
#undef ADD_PRODUCTS
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++) vec_reduce_add_quad(sum[r], scores + r * FEW_KEYS);
}

/* Scores of `rows` rows with the columns. */
INLINE void few_scores(const struct few_rows_step *s, struct few_columns *c, fa3_dtype dtype,
                       int64_t row, const int rows) {
  /* Read once: scores are stored meanwhile, and might be these for all that a compiler knows. */
  const int64_t dim = FEW_PAIRS ? s->head_dim / 2 : s->head_dim, count = c->count;
  const fa3_dtype loaded = FEW_PAIRS ? FA3_FLOAT32 : dtype; /* pairs are words as they lie */
  const float *query = s->queries + row * FEW_STRIDE;
  float *scores = s->scores + row * FEW_KEYS + c->first;
  const int together = rows * TOGETHER <= SUMS ? rows : SUMS / TOGETHER;
  for (int64_t k = 0; k < count; k += TOGETHER)
#pragma GCC unroll 2
    for (int r = 0; r < rows; r += together)
      few_scores_block(query + r * FEW_STRIDE, dim, c->rows + k, c->next + k,
                       scores + r * FEW_KEYS + k, loaded, together);
}

static inline void few_scale(float *values, float factor, const float *scales, int64_t columns) {
  for (int64_t i = 0; i < columns; i += VECTOR)
    vec_store(values + i,
              vec_mul(vec_mul(vec_load(values + i), vec_set(factor)), vec_load(scales + i)));
}

/* Of a row whose scores are there: -infinity where it sees no key, then the online softmax. */
static inline void few_softmax(const struct few_rows_step *s, int64_t head, int64_t row) {
  const int64_t at = head * s->rows + row;
  float *scores = s->scores + at * FEW_KEYS;
  const int64_t columns = (s->count + PAIR - 1) / PAIR * PAIR;
  const int64_t width =
      (s->value_head_dim + 2 * PAIR - 1) / (2 * PAIR) * 2 * PAIR; /* in any order */
  float scale = s->scale;
  if (s->key_scales)
    few_scale(scores, s->query_scales[at], s->key_scales + head * FEW_KEYS, columns);
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
    float *output = s->output + at * FEW_STRIDE;
    for (int64_t i = 0; i < width; i += VECTOR)
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
  if (s->value_scales) few_scale(scores, 1, s->value_scales + head * FEW_KEYS, columns);
}

/* Adds elements from `i` on of the columns' values to `rows` rows: `vectors` vectors of them, in
 * pairs, or one that is no half of a pair. dtype, rows and vectors are constants where this is
 * called. */
INLINE void few_values_block(const struct few_columns *c, const float *weights, float *output,
                             int64_t width, int64_t i, fa3_dtype dtype, const int rows,
                             const int vectors) {
  const int64_t size = size_of(dtype);
  vec sum[4][8];
  few_load_sums(sum, output + i, rows, vectors);
  for (int64_t k = 0; k < c->count; k++) {
    const char *from = c->rows[k] + i * size;
    few_fetch(c->next[k] + i * size, vectors * VECTOR * size, rows);
    vec weight[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) weight[r] = vec_set(weights[r * FEW_KEYS + k]);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
      const vec column = vectors == 1 ? vec_load_as(dtype, from, width - i)
                                      : few_half(dtype, from + v / 2 * PAIR * size, v % 2);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][v] = vec_fma(weight[r], column, sum[r][v]);
    }
  }
  few_store_sums(sum, output + i, rows, vectors);
}

/* Many vectors at a time, as many as SUMS allows, then pairs, then single vectors. */
INLINE void few_values(const struct few_rows_step *s, struct few_columns *c, fa3_dtype dtype,
                       int64_t row, const int rows) {
  const int64_t width = s->value_head_dim;
  const float *weights = s->scores + row * FEW_KEYS + c->first;
  float *output = s->output + row * FEW_STRIDE;
  const int vectors = rows * 8 <= SUMS ? 8 : SUMS / rows;
  int64_t i = 0;
  for (; i + vectors * VECTOR <= width; i += vectors * VECTOR)
    few_values_block(c, weights, output, width, i, dtype, rows, vectors);
  for (; vectors > 2 && i + PAIR <= width; i += PAIR)
    few_values_block(c, weights, output, width, i, dtype, rows, 2);
  for (; i < width; i += VECTOR) few_values_block(c, weights, output, width, i, dtype, rows, 1);
}

/* A product of rows and columns: the scores of a group's keys, or the sums of its values. It is a
 * function of its own for each dtype and number of rows, so that registers hold what its loops
 * need. */
typedef void few_product(const struct few_rows_step *s, struct few_columns *columns, int64_t row);
#define FEW_PRODUCT(kind, dtype, rows)                                                            \
  static void kind##_##dtype##_##rows(const struct few_rows_step *s, struct few_columns *columns, \
                                      int64_t row) {                                              \
    kind(s, columns, FA3_##dtype, row, rows);                                                     \
  }
#define FEW_PRODUCTS(kind, dtype) \
  FEW_PRODUCT(kind, dtype, 1)     \
  FEW_PRODUCT(kind, dtype, 2)     \
  FEW_PRODUCT(kind, dtype, 4)
FEW_PRODUCTS(few_scores, BFLOAT16)
FEW_PRODUCTS(few_values, BFLOAT16)

/* Of one, two, four and, if that is not twice four, eight rows. */
struct few_products {
  few_product *of[4];
};
#define FEW_OF(kind, dtype)                                        \
  {                                                                \
    { kind##_##dtype##_1, kind##_##dtype##_2, kind##_##dtype##_4 } \
  }
#if FEW_PAIRS
FEW_PRODUCTS(few_code_scores, FLOAT8_E4M3)
FEW_PRODUCT(few_code_scores, FLOAT8_E4M3, 8)
FEW_PRODUCTS(few_code_values, FLOAT8_E4M3)
static const struct few_products few_all_scores[] = {
    [FA3_BFLOAT16] = FEW_OF(few_scores, BFLOAT16),
    [FA3_FLOAT8_E4M3] = {{few_code_scores_FLOAT8_E4M3_1, few_code_scores_FLOAT8_E4M3_2,
                          few_code_scores_FLOAT8_E4M3_4, few_code_scores_FLOAT8_E4M3_8}},
};
static const struct few_products few_all_values[] = {
    [FA3_BFLOAT16] = FEW_OF(few_values, BFLOAT16),
    [FA3_FLOAT8_E4M3] = FEW_OF(few_code_values, FLOAT8_E4M3),
};
#else
FEW_PRODUCTS(few_scores, FLOAT32)
FEW_PRODUCTS(few_scores, FLOAT16)
FEW_PRODUCTS(few_values, FLOAT32)
FEW_PRODUCTS(few_values, FLOAT16)
#define FEW_TABLE(kind)                                                                 \
  {                                                                                     \
    [FA3_FLOAT32] = FEW_OF(kind, FLOAT32), [FA3_FLOAT16] = FEW_OF(kind, FLOAT16),       \
    [FA3_BFLOAT16] = FEW_OF(kind, BFLOAT16), [FA3_FLOAT8_E4M3] = FEW_OF(kind, FLOAT16), \
  }
static const struct few_products few_all_scores[] = FEW_TABLE(few_scores);
static const struct few_products few_all_values[] = FEW_TABLE(few_values);
#endif

#if !FEW_PAIRS
/* A group's codes of one head become the float16 that they are computed with. */
static inline void few_widen(struct few_columns *c, int64_t width, uint16_t *halves,
                             const char *rows[FEW_GROUP]) {
  for (int64_t k = 0; k < c->count; k += TOGETHER)
    c->marks = widen_codes(c->rows + k, c->next + k, width, halves + k * width, c->marks);
  for (int64_t k = 0; k < FEW_GROUP; k++) rows[k] = (const char *)(halves + k * width);
  c->rows = c->next = rows;
}
#endif

/* Where a group's rows are of the head that is so many bytes from the first. */
static inline void few_find_rows(const char *const *rows, int64_t group, int64_t offset,
                                 const char **restrict found) {
  for (int64_t k = 0; k < group; k += TOGETHER)
#pragma GCC unroll 4
    for (int i = 0; i < TOGETHER; i++) found[k + i] = rows[k + i] + offset;
}

/* The same of all heads, in the order of memory. */
static inline void few_find_all(const char *const *rows, int64_t group, int64_t heads,
                                int64_t head_stride, const char **restrict found) {
  for (int64_t k = 0; k < group; k++)
    for (int64_t head = 0; head < heads; head++)
      found[k * heads + head] = rows[k] + head * head_stride;
}

/* All rows with all of `operand`, the step's keys or values: four rows of a head together, or
 * eight, then two, then one. `after` are the rows that are needed then. Returns whether there are
 * codes that are NaN, which are taken for numbers. */
static bool few_multiply(const struct few_rows_step *s, const struct few_operand *operand,
                         const struct few_operand *after, const struct few_products *products) {
  const int64_t group = few_group(s);
  const bool codes = s->dtype == FA3_FLOAT8_E4M3, in_order = !few_waits(s);
  const int64_t bytes = s->heads * operand->width * (codes ? 1 : size_of(s->dtype));
  const int64_t ahead = few_waits(s) && 2 * group * bytes <= NEAR ? 2 * group : group;
  const char *rows[FEW_GROUP], *next_rows[MOST_ROWS * FEW_GROUP / 2];
#if !FEW_PAIRS
  uint16_t halves[FEW_GROUP * LARGEST_HEAD_DIM] __attribute__((aligned(64)));
#endif
  struct few_columns c;
  memset(&c.marks, 0, sizeof c.marks);
  for (int64_t first = 0; first < s->count; first += group) {
    const int64_t left = s->count - first;
    const int64_t there = first + ahead;
    const struct few_operand *next = there < s->count ? operand : after;
    const int64_t first_next = there < s->count ? there : few_waits(s) ? there - s->count : 0;
    c.first = first;
    c.count = left < group ? left : group;
    if (in_order)
      few_find_all(next->rows + first_next, group, s->heads, next->head_stride, next_rows);
    for (int64_t head = 0; head < s->heads; head++) {
      few_find_rows(operand->rows + first, group, head * operand->head_stride, rows);
      if (!in_order)
        few_find_rows(next->rows + first_next, group, head * next->head_stride, next_rows);
      c.rows = rows;
      c.next = in_order ? next_rows + head * group : next_rows;
#if !FEW_PAIRS
      if (codes) few_widen(&c, operand->width, halves, rows);
#endif
      const int64_t end = (head + 1) * s->rows;
      for (int64_t row = head * s->rows, size; row < end; row += size) {
        int log2 = end - row >= 4 ? 2 : end - row >= 2 ? 1 : 0;
        if (end - row >= 8 && products->of[3]) log2 = 3;
        size = 1 << log2;
        products->of[log2](s, &c, row);
      }
    }
  }
  return has_nan(c.marks);
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
            s->output[(head * s->rows + row) * FEW_STRIDE +
                      few_place(i, s->value_head_dim, s->dtype)] = NAN;
}

static void few_rows(const struct few_rows_step *s) {
  const struct few_operand keys = {s->keys, s->key_head_stride, s->head_dim};
  const struct few_operand values = {s->values, s->value_head_stride, s->value_head_dim};
  const struct few_operand next_keys = {s->keys + s->count, s->key_head_stride, s->head_dim};
  if (few_multiply(s, &keys, &values, &few_all_scores[s->dtype])) few_spoil_scores(s);
  for (int64_t head = 0; head < s->heads; head++)
    for (int64_t row = 0; row < s->rows; row++) few_softmax(s, head, row);
  if (few_multiply(s, &values, &next_keys, &few_all_values[s->dtype])) few_spoil_outputs(s);
}

/* A row in the order that a cache of the dtype is computed in, or back in its own. */
static void few_order(float *row, int64_t width, fa3_dtype dtype, bool back) {
#if FEW_PAIRS
  if (!back) {
    uint16_t words[2 * LARGEST_HEAD_DIM] = {0};
    for (int64_t i = 0; i < width; i++) words[i] = bfloat_from_float(row[i]);
    if (dtype == FA3_BFLOAT16)
      memcpy(row, words, (size_t)width * sizeof *row);
    else
      few_order_code_queries(row, words, width);
    return;
  }
  if (dtype == FA3_FLOAT8_E4M3) few_order_code_outputs(row, width);
#endif
  for (int64_t i = 0; dtype == FA3_BFLOAT16 && i + PAIR <= width; i += PAIR) {
    float pair[PAIR];
    memcpy(pair, row + i, sizeof pair);
    for (int n = 0; n < PAIR; n++) {
      const int there = (int)few_place(n, PAIR, dtype);
      row[i + (back ? n : there)] = pair[back ? there : n];
    }
  }
}

#endif
