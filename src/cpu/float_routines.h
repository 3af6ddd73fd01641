/* The routines of a level that computes in float32, whatever the inputs' dtype: after
 * vector_*.h. */
#ifndef FA3_CPU_FLOAT_ROUTINES_H
#define FA3_CPU_FLOAT_ROUTINES_H

#define MULTIPLY_ADD(sum, a, b) vec_fma(a, b, sum)
#define STORE_PROBABILITIES(words, a, b) \
  (vec_store(words, a), vec_store((words) + VECTOR, b), (words) + 2 * VECTOR)

#include "gradient.h"
#include "arrange.h"
#include "product.h"
#include "softmax.h"
#include "few_rows.h"

static void arrange_queries(const struct rows *queries, float factor, int64_t depth,
                            float *arranged) {
  BY_DTYPE(queries->dtype, arrange_queries_as, queries, factor, depth, arranged);
}

static void arrange_keys(const struct rows *keys, int64_t depth, float *arranged) {
  BY_DTYPE(keys->dtype, arrange_keys_as, keys, depth, arranged);
}

static void arrange_values(const struct rows *values, int64_t depth, int64_t panel_stride,
                           float *arranged) {
  (void)depth; /* a word is one key */
  BY_DTYPE(values->dtype, arrange_values_as, values, panel_stride, arranged);
}

static void transpose(const float *arranged, int64_t rows, int64_t columns, int64_t stride,
                      float *transposed, int64_t transposed_stride) {
  const int64_t whole = (rows + 7) / 8 * 8;
  for (int64_t row = 0; row < whole; row += VECTOR)
    for (int64_t column = 0; column < columns; column += VECTOR) {
      vec block[VECTOR];
      const float *from = arranged + row * stride + column;
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

#define FLOAT_ROUTINES                                                                        \
  {                                                                                           \
    .elements_per_word = 1, .vector = VECTOR, .panel = PANEL, .depth_step = 1, .strip = 24,   \
    .arrange_queries = arrange_queries, .arrange_keys = arrange_keys,                         \
    .arrange_values = arrange_values, .multiply = multiply, .cap = cap, .softmax = softmax,   \
    .store_row = store_row, .gradient = gradient, .transpose = transpose, .add_row = add_row, \
    .dot = dot, .few_rows = few_rows, .few_order = few_order,                                 \
  }

#endif
