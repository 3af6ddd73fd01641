/* The matrix product of one level: after vector_*.h, and after MULTIPLY_ADD(sum, a, b), which
 * adds the products of words to floats. Blocks of PRODUCT_ROWS x 2 vectors stay in registers
 * while the depth runs. */
#ifndef FA3_CPU_PRODUCT_H
#define FA3_CPU_PRODUCT_H

#include "routines.h"

/* Under a sanitizer the compiler decides: with all the checks inlined as well it took minutes. */
#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define INLINE static inline
#endif
#endif
#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

#define PANEL (2 * VECTOR)

/* The call with the dtype, of 16 bits or more, as a constant, so that none of its branches is left
 * in what is inlined. */
#define BY_DTYPE(dtype, function, ...)                           \
  ((dtype) == FA3_FLOAT32   ? function(FA3_FLOAT32, __VA_ARGS__) \
   : (dtype) == FA3_FLOAT16 ? function(FA3_FLOAT16, __VA_ARGS__) \
                            : function(FA3_BFLOAT16, __VA_ARGS__))

INLINE int64_t size_of(fa3_dtype dtype) {
  return dtype == FA3_FLOAT32 ? 4 : dtype == FA3_FLOAT8_E4M3 ? 1 : 2;
}

/* `rows` and `vectors` are constants where this is called: the sums become registers. */
INLINE void product_block(const struct product *p, const float *left, const float *right,
                          float *output, const int rows, const int vectors) {
  vec sum[PRODUCT_ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
      sum[r][v] = p->accumulate ? vec_load(output + r * p->output_stride + v * VECTOR) : vec_set(0);
  for (int64_t k = 0; k < p->depth; k++) {
    vec column[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) column[v] = vec_load(right + k * PANEL + v * VECTOR);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      vec element = vec_set(left[r * p->left_stride + k]);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; v++) sum[r][v] = MULTIPLY_ADD(sum[r][v], element, column[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++)
      vec_store(output + r * p->output_stride + v * VECTOR, sum[r][v]);
}

INLINE void product_rows(const struct product *p, int64_t row, const float *right, float *output,
                         const int vectors) {
  const float *left = p->left + row * p->left_stride;
  output += row * p->output_stride;
  int64_t rows = p->rows - row;
  switch (rows < PRODUCT_ROWS ? (int)rows : (int)PRODUCT_ROWS) {
#define ROWS(n)                                        \
  case n:                                              \
    product_block(p, left, right, output, n, vectors); \
    break;
    ROWS(1)
    ROWS(2)
    ROWS(3)
    ROWS(4)
#if PRODUCT_ROWS > 4
    ROWS(5)
    ROWS(6)
#endif
#if PRODUCT_ROWS > 6
    ROWS(7)
    ROWS(8)
    ROWS(9)
    ROWS(10)
    ROWS(11)
    ROWS(12)
#endif
#undef ROWS
  }
}

static void multiply(const struct product *p) {
  for (int64_t column = 0; column < p->columns; column += PANEL) {
    const float *right = p->right + column / PANEL * p->right_stride;
    float *output = p->output + column;
    for (int64_t row = 0; row < p->rows; row += PRODUCT_ROWS)
      if (p->columns - column > VECTOR)
        product_rows(p, row, right, output, 2);
      else
        product_rows(p, row, right, output, 1);
  }
}

#endif
