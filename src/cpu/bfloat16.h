/* The routines on bfloat16 words that the levels with a bfloat16 product share: their panels,
 * vectors and softmax are the same. */
#ifndef FA3_CPU_BFLOAT16_H
#define FA3_CPU_BFLOAT16_H

#include "routines.h"

void bfloat16_arrange_queries(const struct rows *queries, float factor, int64_t depth,
                              float *arranged);
void bfloat16_arrange_keys(const struct rows *keys, int64_t depth, float *arranged);
void bfloat16_arrange_values(const struct rows *values, int64_t depth, int64_t panel_stride,
                             float *arranged);
void bfloat16_cap(float *scores, int64_t columns, float scale, float softcap);
void bfloat16_softmax(const struct softmax_step *step);
void bfloat16_store_row(const float *row, int64_t width, float factor, fa3_dtype dtype,
                        void *stored);
void bfloat16_gradient(const struct gradient_step *step);
void bfloat16_transpose(const float *arranged, int64_t rows, int64_t columns, int64_t stride,
                        float *transposed, int64_t transposed_stride);
void bfloat16_add_row(const float *row, int64_t width, float factor, fa3_dtype dtype, void *stored);
float bfloat16_dot(const void *a, const void *b, int64_t width, fa3_dtype dtype);

/* On float32 words: few rows are bound by memory, and no product of matrices. */
void avx512_few_rows(const struct few_rows_step *step);
void avx512_few_order(float *row, int64_t width, fa3_dtype dtype, bool back);

/* What the tables of these levels share. */
#define BFLOAT16_ROUTINES                                                                      \
  .elements_per_word = 2, .arrange_queries = bfloat16_arrange_queries,                         \
  .arrange_keys = bfloat16_arrange_keys, .arrange_values = bfloat16_arrange_values,            \
  .cap = bfloat16_cap, .softmax = bfloat16_softmax, .store_row = bfloat16_store_row,           \
  .gradient = bfloat16_gradient, .transpose = bfloat16_transpose, .add_row = bfloat16_add_row, \
  .dot = bfloat16_dot, .few_rows = avx512_few_rows, .few_order = avx512_few_order

#endif
