/* Arranging and storing for one level (after vector_*.h). */
#ifndef FA3_CPU_ARRANGE_H
#define FA3_CPU_ARRANGE_H

#include "product.h"

/* Up to VECTOR keys x VECTOR words, turned: arranged[word][key]. */
INLINE void arrange_key_block(fa3_dtype dtype, const struct rows *keys, int64_t key, int64_t word,
                              float *arranged) {
  vec block[VECTOR];
  int64_t words = keys->width - word;
  const char *from = keys->data + key * keys->stride + word * size_of(dtype);
#pragma GCC unroll 16
  for (int r = 0; r < VECTOR; r++)
    block[r] =
        key + r < keys->count ? vec_load_as(dtype, from + r * keys->stride, words) : vec_set(0);
  vec_transpose(block);
  for (int r = 0; r < VECTOR && r < words; r++) vec_store(arranged + r * PANEL, block[r]);
}

INLINE void arrange_keys_as(fa3_dtype dtype, const struct rows *keys, int64_t depth,
                            float *arranged) {
  for (int64_t key = 0; key < keys->count; key += PANEL, arranged += depth * PANEL) {
    for (int64_t word = 0; word < keys->width; word += VECTOR)
      for (int v = 0; v < PANEL; v += VECTOR)
        arrange_key_block(dtype, keys, key + v, word, arranged + word * PANEL + v);
    for (int64_t i = keys->width * PANEL; i < depth * PANEL; i++) arranged[i] = 0;
  }
}

INLINE void arrange_values_as(fa3_dtype dtype, const struct rows *values, int64_t panel_stride,
                              float *arranged) {
  for (int64_t column = 0; column < values->width; column += VECTOR) {
    float *to = arranged + column / PANEL * panel_stride + column % PANEL;
    const char *from = values->data + column * size_of(dtype);
    for (int64_t key = 0; key < values->count; key++)
      vec_store(to + key * PANEL,
                vec_load_as(dtype, from + key * values->stride, values->width - column));
  }
}

INLINE void arrange_queries_as(fa3_dtype dtype, const struct rows *queries, float factor,
                               int64_t depth, float *arranged) {
  for (int64_t r = 0; r < queries->count; r++, arranged += depth)
    for (int64_t i = 0; i < queries->width; i += VECTOR) {
      const char *from = queries->data + r * queries->stride + i * size_of(dtype);
      vec_store_as(FA3_FLOAT32, (char *)(arranged + i), queries->width - i,
                   vec_mul(vec_load_as(dtype, from, queries->width - i), vec_set(factor)));
    }
}

INLINE void store_row_as(fa3_dtype dtype, const float *row, int64_t width, float factor, bool add,
                         char *stored) {
  for (int64_t i = 0; i < width; i += VECTOR, stored += VECTOR * size_of(dtype)) {
    vec value = vec_mul(vec_load(row + i), vec_set(factor));
    if (add) value = vec_add(vec_load_as(dtype, stored, width - i), value);
    vec_store_as(dtype, stored, width - i, value);
  }
}

static void store_row(const float *row, int64_t width, float factor, fa3_dtype dtype,
                      void *stored) {
  BY_DTYPE(dtype, store_row_as, row, width, factor, false, stored);
}

static void add_row(const float *row, int64_t width, float factor, fa3_dtype dtype, void *stored) {
  BY_DTYPE(dtype, store_row_as, row, width, factor, true, stored);
}

#endif
