/* E4M3 codes as the float16 numbers of 1 / CODE_FACTOR their value, of one level: the four bits of
 * the exponent, whose bias is 7, at the foot of the five whose bias is 15. Subnormal codes become
 * subnormal float16. The two codes that are NaN, 0x7f and 0xff, become numbers like all others, and
 * what comes of them has to be made NaN afterwards: where there are none they cost little. */
#ifndef FA3_CPU_WIDEN_H
#define FA3_CPU_WIDEN_H

#include <stdbool.h>
#include <stdint.h>

static inline bool code_is_nan(char code) {
  return (code & 0x7f) == 0x7f;
}

/* Codes are widened four rows at a time, `width` of each, a multiple of 16; the float16 rows follow
 * each other. `largest` is the largest code so far without its sign, times 2. */
#ifdef __AVX2__
#include <immintrin.h>

typedef __m256i largest_code;

static inline bool has_nan(largest_code largest) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8((char)0xfe))) != 0;
}

static inline largest_code larger_code(largest_code largest, __m256i codes) {
  return _mm256_max_epu8(largest, _mm256_add_epi8(codes, codes));
}

static inline void widen_16(const char *codes, uint16_t *halves) {
  /* The sign is in the two highest bits. */
  const __m256i moved =
      _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes)), 7);
  _mm256_storeu_si256((__m256i *)halves,
                      _mm256_and_si256(moved, _mm256_set1_epi16((int16_t)0xbfff)));
}

static inline void widen_32(const char *codes, uint16_t *halves) {
#ifdef __AVX512BW__
  const __m512i moved =
      _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes)), 7);
  _mm512_storeu_si512(halves, _mm512_and_si512(moved, _mm512_set1_epi16((int16_t)0xbfff)));
#else
  widen_16(codes, halves);
  widen_16(codes + 16, halves + 16);
#endif
}

static inline largest_code widen_codes(const char *const rows[4], int64_t width, uint16_t *halves,
                                       largest_code largest) {
  const char *const from[4] = {rows[0], rows[1], rows[2], rows[3]};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      largest = larger_code(largest, _mm256_loadu_si256((const __m256i *)(from[k] + i)));
      widen_32(from[k] + i, halves + k * width + i);
    }
  for (int k = 0; i < width && k < 4; k++) {
    const __m128i codes = _mm_loadu_si128((const __m128i *)(from[k] + i));
    largest = larger_code(largest, _mm256_zextsi128_si256(codes));
    widen_16(from[k] + i, halves + k * width + i);
  }
  return largest;
}
#else
typedef unsigned largest_code;

static inline bool has_nan(largest_code largest) {
  return largest == 0xfe;
}

static inline largest_code widen_codes(const char *const rows[4], int64_t width, uint16_t *halves,
                                       largest_code largest) {
  for (int64_t k = 0; k < 4; k++)
    for (int64_t i = 0; i < width; i++) {
      const unsigned code = (unsigned char)rows[k][i], magnitude = code & 0x7f;
      halves[k * width + i] = (uint16_t)((code & 0x80) << 8 | magnitude << 7);
      if (2 * magnitude > largest) largest = 2 * magnitude;
    }
  return largest;
}
#endif

#endif
