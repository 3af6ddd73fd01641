/* Vectors of 8 floats: AVX2, FMA and F16C. */
#ifndef FA3_CPU_VECTOR_AVX2_H
#define FA3_CPU_VECTOR_AVX2_H

#include <immintrin.h>

#define VECTOR 8
#define PRODUCT_ROWS 6

typedef __m256 vec;

static inline vec vec_set(float value) {
  return _mm256_set1_ps(value);
}

static inline vec vec_load(const float *from) {
  return _mm256_loadu_ps(from);
}

static inline void vec_store(float *to, vec value) {
  _mm256_storeu_ps(to, value);
}

static inline vec vec_load_as(fa3_dtype dtype, const char *from, int64_t count) {
  (void)count; /* widths are multiples of 8 */
  if (dtype == FA3_FLOAT32) return _mm256_loadu_ps((const float *)from);
  __m128i bits = _mm_loadu_si128((const __m128i *)from);
  if (dtype == FA3_FLOAT16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/* Of two vectors of bfloat16 side by side the even elements, and the odd ones. */
static inline vec vec_load_even(const char *from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)from), 16));
}

static inline vec vec_load_odd(const char *from) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)from),
                                              _mm256_set1_epi32((int32_t)0xffff0000)));
}

static inline __m128i bfloat_from_vec(vec value) {
  __m256i bits = _mm256_castps_si256(value);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  vec nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
  rounded = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

static inline void vec_store_as(fa3_dtype dtype, char *to, int64_t count, vec value) {
  (void)count;
  if (dtype == FA3_FLOAT32)
    _mm256_storeu_ps((float *)to, value);
  else if (dtype == FA3_FLOAT16)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  else
    _mm_storeu_si128((__m128i *)to, bfloat_from_vec(value));
}

static inline vec vec_add(vec a, vec b) {
  return _mm256_add_ps(a, b);
}

static inline vec vec_sub(vec a, vec b) {
  return _mm256_sub_ps(a, b);
}

static inline vec vec_mul(vec a, vec b) {
  return _mm256_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b) {
  return _mm256_div_ps(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c) {
  return _mm256_fmadd_ps(a, b, c);
}

/* b where either is NaN. */
static inline vec vec_max(vec a, vec b) {
  return _mm256_max_ps(a, b);
}

static inline vec vec_min(vec a, vec b) {
  return _mm256_min_ps(a, b);
}

static inline vec vec_abs(vec a) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}

static inline vec vec_copysign(vec magnitude, vec sign) {
  const vec bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}

static inline vec vec_round(vec a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* a * 2^n for a whole n from -1000 to 128; 0 below 2^-126, and infinity for 128. */
static inline vec vec_scale(vec a, vec n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  exponent = _mm256_max_epi32(exponent, _mm256_setzero_si256());
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

static inline float vec_reduce_max(vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

static inline float vec_reduce_add(vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* Of two vectors, in each half: sums of two elements of a, b, a and b. */
static inline vec vec_add_pairs(vec a, vec b) {
  return vec_add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
}

static inline void vec_reduce_add_quad(const vec a[4], float sums[4]) {
  const vec first = vec_add_pairs(a[0], a[1]), second = vec_add_pairs(a[2], a[3]);
  const vec halves =
      vec_add(_mm256_shuffle_ps(first, second, 0x44), _mm256_shuffle_ps(first, second, 0xee));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

static inline void vec_transpose(vec rows[VECTOR]) {
  vec pairs[VECTOR], quads[VECTOR];
  for (int i = 0; i < VECTOR; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < VECTOR; i += 4)
    for (int j = 0; j < 2; j++) {
      quads[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      quads[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    rows[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

#endif
