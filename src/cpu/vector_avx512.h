/* Vectors of 16 floats: AVX-512 F, BW, VL and DQ. */
#ifndef FA3_CPU_VECTOR_AVX512_H
#define FA3_CPU_VECTOR_AVX512_H

#include <immintrin.h>

#define VECTOR 16
#define PRODUCT_ROWS 12

typedef __m512 vec;

static inline vec vec_set(float value) {
  return _mm512_set1_ps(value);
}

static inline vec vec_load(const float *from) {
  return _mm512_loadu_ps(from);
}

static inline void vec_store(float *to, vec value) {
  _mm512_storeu_ps(to, value);
}

static inline __mmask16 vec_first(int64_t count) {
  return (__mmask16)(count < VECTOR ? (1 << count) - 1 : 0xffff);
}

/* The first `count` elements (all of them, if there are more than a vector's), then zeros. */
static inline vec vec_load_as(fa3_dtype dtype, const char *from, int64_t count) {
  __mmask16 mask = vec_first(count);
  if (dtype == FA3_FLOAT32) return _mm512_maskz_loadu_ps(mask, from);
  __m256i bits = _mm256_maskz_loadu_epi16(mask, from);
  if (dtype == FA3_FLOAT16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* Of two vectors of bfloat16 side by side the even elements, and the odd ones. */
static inline vec vec_even(__m512i words) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

static inline vec vec_odd(__m512i words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int32_t)0xffff0000)));
}

static inline vec vec_load_even(const char *from) {
  return vec_even(_mm512_loadu_si512(from));
}

static inline vec vec_load_odd(const char *from) {
  return vec_odd(_mm512_loadu_si512(from));
}

static inline __m256i bfloat_from_vec(vec value) {
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

static inline void vec_store_as(fa3_dtype dtype, char *to, int64_t count, vec value) {
  __mmask16 mask = vec_first(count);
  if (dtype == FA3_FLOAT32)
    _mm512_mask_storeu_ps(to, mask, value);
  else if (dtype == FA3_FLOAT16)
    _mm256_mask_storeu_epi16(to, mask, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  else
    _mm256_mask_storeu_epi16(to, mask, bfloat_from_vec(value));
}

static inline vec vec_add(vec a, vec b) {
  return _mm512_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b) {
  return _mm512_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b) {
  return _mm512_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b) {
  return _mm512_div_ps(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c) {
  return _mm512_fmadd_ps(a, b, c);
}

/* b where either is NaN. */
static inline vec vec_max(vec a, vec b) {
  return _mm512_max_ps(a, b);
}

static inline vec vec_abs(vec a) {
  return _mm512_abs_ps(a);
}

static inline vec vec_copysign(vec magnitude, vec sign) {
  const vec bit = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
}

static inline vec vec_round(vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a * 2^n. */
static inline vec vec_scale(vec a, vec n) {
  return _mm512_scalef_ps(a, n);
}

/* 2^x, exactly 0 for -infinity, NaN for NaN. VREDUCEPS leaves x - floor(x), and 0 of an infinity;
 * VSCALEFPS takes the floor itself. Minimax on [0, 1]: 9.5e-8. */
#define VECTOR_EXP2
static inline vec vec_exp2(vec x) {
  vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vec sum = vec_set(0.00186713017f);
  sum = vec_fma(sum, f, vec_set(0.00901702978f));
  sum = vec_fma(sum, f, vec_set(0.0557999127f));
  sum = vec_fma(sum, f, vec_set(0.240164444f));
  sum = vec_fma(sum, f, vec_set(0.693151295f));
  sum = vec_fma(sum, f, vec_set(1));
  return _mm512_scalef_ps(sum, x);
}

static inline float vec_reduce_max(vec a) {
  return _mm512_reduce_max_ps(a);
}

static inline float vec_reduce_add(vec a) {
  return _mm512_reduce_add_ps(a);
}

/* Of two vectors, in each four lanes: sums of two elements of a, b, a and b. */
static inline vec vec_add_pairs(vec a, vec b) {
  return vec_add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

static inline void vec_reduce_add_quad(const vec a[4], float sums[4]) {
  const vec first = vec_add_pairs(a[0], a[1]), second = vec_add_pairs(a[2], a[3]);
  const vec quads =
      vec_add(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xee));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

/* First the 4x4 blocks inside the 128-bit lanes, then the lanes. */
static inline void vec_transpose(vec rows[VECTOR]) {
  vec pairs[VECTOR], quads[VECTOR];
  for (int i = 0; i < VECTOR; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < VECTOR; i += 4)
    for (int j = 0; j < 2; j++) {
      quads[i + 2 * j] = _mm512_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      quads[i + 2 * j + 1] = _mm512_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    vec even_low = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0x88);
    vec odd_low = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0xdd);
    vec even_high = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0x88);
    vec odd_high = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}

#endif
