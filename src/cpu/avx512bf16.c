/* AVX512-BF16 for bfloat16: VDPBF16PS multiplies pairs and adds them to a float32. */
#include "bfloat16.h"
#include "half.h"
#include "vector_avx512.h"

#define MULTIPLY_ADD(sum, a, b) \
  _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b))
#define STORE_PROBABILITIES(words, a, b) store_pairs(words, a, b)

static inline float *store_pairs(float *words, vec a, vec b) {
  _mm512_storeu_si512(words, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  return words + VECTOR;
}

#include "pack.h"
#include "product.h"
#include "softmax.h"

void bfloat16_pack_queries(const struct rows *queries, float factor, int64_t depth, float *packed) {
  for (int64_t r = 0; r < queries->count; r++, packed += depth) {
    uint16_t *to = (uint16_t *)packed;
    memset(to, 0, (size_t)depth * sizeof(float));
    memcpy(to, queries->data + r * queries->stride, (size_t)queries->width * sizeof *to);
    if (factor != 1)
      for (int64_t i = 0; i < queries->width; i++)
        to[i] = bfloat_from_float(factor * float_from_bfloat(to[i]));
  }
}

/* A row's pairs are words as they lie: turning words is what packing floats does. */
void bfloat16_pack_keys(const struct rows *keys, int64_t depth, float *packed) {
  struct rows words = *keys;
  words.width /= 2;
  pack_keys_as(&words, FA3_FLOAT32, sizeof(float), depth, packed);
}

/* Two keys' values, interleaved. */
static inline vec pair_values(const struct rows *values, int64_t key, int64_t column) {
  int64_t count = values->width - column;
  const char *from = values->data + key * values->stride + column * (int64_t)sizeof(uint16_t);
  __mmask16 mask = vec_first(count);
  __m256i first = _mm256_maskz_loadu_epi16(mask, from);
  __m256i second = key + 1 < values->count ? _mm256_maskz_loadu_epi16(mask, from + values->stride)
                                           : _mm256_setzero_si256();
  __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(first), high));
}

void bfloat16_pack_values(const struct rows *values, int64_t depth, int64_t panel_stride,
                          float *packed) {
  for (int64_t column = 0; column < values->width; column += VECTOR) {
    float *to = packed + column / PANEL * panel_stride + column % PANEL;
    for (int64_t pair = 0; pair < depth; pair++)
      vec_store(to + pair * PANEL,
                2 * pair < values->count ? pair_values(values, 2 * pair, column) : vec_set(0));
  }
}

void bfloat16_cap(float *scores, int64_t columns, float scale, float softcap) {
  cap(scores, columns, scale, softcap);
}

void bfloat16_softmax(const struct softmax_step *step) {
  softmax(step);
}

void bfloat16_store_row(const float *row, int64_t width, float factor, fa3_dtype dtype,
                        void *stored) {
  store_row(row, width, factor, dtype, stored);
}

const struct routines avx512bf16_routines = {
    .elements_per_word = 2,
    .vector = VECTOR,
    .panel = PANEL,
    .depth_step = 1,
    .strip = 24,
    .pack_queries = bfloat16_pack_queries,
    .pack_keys = bfloat16_pack_keys,
    .pack_values = bfloat16_pack_values,
    .multiply = multiply,
    .cap = bfloat16_cap,
    .softmax = bfloat16_softmax,
    .store_row = bfloat16_store_row,
};
