/* AVX512-BF16 for bfloat16: VDPBF16PS multiplies pairs and adds them to a float32. AMX's level has
 * all but the product from here: its panels, vectors and softmax are the same. */
#include "amx.h"
#include "half.h"
#include "routines.h"
#include "vector_avx512.h"

#define MULTIPLY_ADD(sum, a, b) \
  _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b))
#define STORE_PROBABILITIES(words, a, b) store_pairs(words, a, b)

static inline float *store_pairs(float *words, vec a, vec b) {
  _mm512_storeu_si512(words, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  return words + VECTOR;
}

#include "gradient.h"
#include "arrange.h"
#include "product.h"
#include "softmax.h"
#define FEW_PAIRS 1
#include "few_rows.h"

static void arrange_queries(const struct rows *queries, float factor, int64_t depth,
                            float *arranged) {
  for (int64_t r = 0; r < queries->count; r++, arranged += depth) {
    uint16_t *to = (uint16_t *)arranged;
    memset(to, 0, (size_t)depth * sizeof(float));
    memcpy(to, queries->data + r * queries->stride, (size_t)queries->width * sizeof *to);
    if (factor != 1)
      for (int64_t i = 0; i < queries->width; i++)
        to[i] = bfloat_from_float(factor * float_from_bfloat(to[i]));
  }
}

/* A row's pairs are words as they lie: turning words is what arranging floats does. */
static void arrange_keys(const struct rows *keys, int64_t depth, float *arranged) {
  struct rows words = *keys;
  words.width /= 2;
  arrange_keys_as(FA3_FLOAT32, &words, depth, arranged);
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

static void arrange_values(const struct rows *values, int64_t depth, int64_t panel_stride,
                           float *arranged) {
  for (int64_t column = 0; column < values->width; column += VECTOR) {
    float *to = arranged + column / PANEL * panel_stride + column % PANEL;
    for (int64_t pair = 0; pair < depth; pair++)
      vec_store(to + pair * PANEL,
                2 * pair < values->count ? pair_values(values, 2 * pair, column) : vec_set(0));
  }
}

/* Up to 16 pairs of rows x 16 words. Two rows' words hold two columns each: a word of an even
 * column is made of their low halves, a word of an odd one of their high halves. */
static inline void transpose_block(const float *arranged, int64_t rows, int64_t stride,
                                   float *transposed, int64_t transposed_stride, int64_t words) {
  const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000);
  vec even[VECTOR], odd[VECTOR];
#pragma GCC unroll 16
  for (int i = 0; i < VECTOR; i++) {
    const float *from = arranged + 2 * i * stride;
    __m512i first = 2 * i < rows ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
    __m512i second = 2 * i + 1 < rows ? _mm512_loadu_si512(from + stride) : _mm512_setzero_si512();
    even[i] = _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_andnot_si512(high, first), _mm512_slli_epi32(second, 16)));
    odd[i] = _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(high, second)));
  }
  vec_transpose(even);
  vec_transpose(odd);
  const __mmask16 mask = vec_first(words);
#pragma GCC unroll 16
  for (int i = 0; i < VECTOR; i++) {
    float *to = transposed + 2 * i * transposed_stride;
    _mm512_mask_storeu_ps(to, mask, even[i]);
    _mm512_mask_storeu_ps(to + transposed_stride, mask, odd[i]);
  }
}

static void transpose(const float *arranged, int64_t rows, int64_t columns, int64_t stride,
                      float *transposed, int64_t transposed_stride) {
  const int64_t words = (rows + 7) / 8 * 4;
  for (int64_t word = 0; word < words; word += VECTOR)
    for (int64_t column = 0; column < columns; column += 2 * VECTOR)
      transpose_block(arranged + 2 * word * stride + column / 2, rows - 2 * word, stride,
                      transposed + column * transposed_stride + word, transposed_stride,
                      words - word);
}

#define SHARED_ROUTINES                                                                     \
  .elements_per_word = 2, .arrange_queries = arrange_queries, .arrange_keys = arrange_keys, \
  .arrange_values = arrange_values, .cap = cap, .softmax = softmax, .store_row = store_row, \
  .gradient = gradient, .transpose = transpose, .add_row = add_row, .dot = dot

const struct routines avx512bf16_routines = {
    .vector = VECTOR,
    .panel = PANEL,
    .depth_step = 1,
    .strip = 24,
    .multiply = multiply,
    .few_rows = few_rows,
    .few_order = few_order,
    SHARED_ROUTINES,
};

const struct routines amx_routines = {
    .vector = AMX_PANEL, /* columns come in whole blocks */
    .panel = AMX_PANEL,
    .depth_step = AMX_TILE,
    .strip = AMX_STRIP,
    .multiply = amx_multiply,
    .enter = amx_enter,
    .leave = amx_leave,
    .few_rows = avx512_few_rows, /* as Intel's VDPBF16PS is slower than what it stands for */
    .few_order = avx512_few_order,
    SHARED_ROUTINES,
};
