/* The routines of a level that computes in float32, whatever the inputs' dtype: after
 * vector_*.h. */
#ifndef FA3_CPU_FLOAT_ROUTINES_H
#define FA3_CPU_FLOAT_ROUTINES_H

#define MULTIPLY_ADD(sum, a, b) vec_fma(a, b, sum)
#define STORE_PROBABILITIES(words, a, b) \
  (vec_store(words, a), vec_store((words) + VECTOR, b), (words) + 2 * VECTOR)

#include "gradient.h"
#include "pack.h"
#include "product.h"
#include "softmax.h"
#include "few_rows.h"

static void pack_queries(const struct rows *queries, float factor, int64_t depth, float *packed) {
  if (queries->dtype == FA3_FLOAT32)
    pack_queries_as(queries, FA3_FLOAT32, 4, factor, depth, packed);
  else if (queries->dtype == FA3_FLOAT16)
    pack_queries_as(queries, FA3_FLOAT16, 2, factor, depth, packed);
  else
    pack_queries_as(queries, FA3_BFLOAT16, 2, factor, depth, packed);
}

static void pack_keys(const struct rows *keys, int64_t depth, float *packed) {
  if (keys->dtype == FA3_FLOAT32)
    pack_keys_as(keys, FA3_FLOAT32, 4, depth, packed);
  else if (keys->dtype == FA3_FLOAT16)
    pack_keys_as(keys, FA3_FLOAT16, 2, depth, packed);
  else
    pack_keys_as(keys, FA3_BFLOAT16, 2, depth, packed);
}

static void pack_values(const struct rows *values, int64_t depth, int64_t panel_stride,
                        float *packed) {
  (void)depth; /* a word is one key */
  if (values->dtype == FA3_FLOAT32)
    pack_values_as(values, FA3_FLOAT32, 4, panel_stride, packed);
  else if (values->dtype == FA3_FLOAT16)
    pack_values_as(values, FA3_FLOAT16, 2, panel_stride, packed);
  else
    pack_values_as(values, FA3_BFLOAT16, 2, panel_stride, packed);
}

static void transpose(const float *packed, int64_t rows, int64_t columns, int64_t stride,
                      float *transposed, int64_t transposed_stride) {
  const int64_t whole = (rows + 7) / 8 * 8;
  for (int64_t row = 0; row < whole; row += VECTOR)
    for (int64_t column = 0; column < columns; column += VECTOR) {
      vec block[VECTOR];
      const float *from = packed + row * stride + column;
      float *to = transposed + column * transposed_stride + row;
#pragma GCC unroll 16
      for (int i = 0; i < VECTOR; i++)
        block[i] = row + i < rows ? vec_load(from + i * stride) : vec_set(0);
      vec_transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < VECTOR; i++)
        vec_store_as(FA3_FLOAT32, (char *)(to + i * transposed_stride), whole - row, block[i]);
    }
}

#define FLOAT_ROUTINES                                                                      \
  {                                                                                         \
    .elements_per_word = 1, .vector = VECTOR, .panel = PANEL, .depth_step = 1, .strip = 24, \
    .pack_queries = pack_queries, .pack_keys = pack_keys, .pack_values = pack_values,       \
    .multiply = multiply, .cap = cap, .softmax = softmax, .store_row = store_row,           \
    .gradient = gradient, .transpose = transpose, .add_row = add_row, .dot = dot,           \
    .few_rows = few_rows, .few_order = few_order,                                           \
  }

#endif
