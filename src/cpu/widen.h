/* E4M3 codes as 16-bit numbers of 1 / CODE_FACTOR their value, of one level. The two codes that are
 * NaN, 0x7f and 0xff, become numbers like all others, and what comes of them has to be made NaN
 * afterwards: where there are none they cost little. */
#ifndef FA3_CPU_WIDEN_H
#define FA3_CPU_WIDEN_H

#include <stdbool.h>
#include <stdint.h>

static inline bool code_is_nan(char code) {
  return (code & 0x7f) == 0x7f;
}

#if FEW_PAIRS
#include <immintrin.h>

enum { CODES = 64 }; /* of a vector */

/* All low bytes so far. */
typedef __m512i code_marks;

/* The bfloat16 of a code without its sign: its bits moved and the bias of the exponent changed, or
 * what a subnormal code is, 1 to 7 times the least. The last bit is NaN's alone. */
#define CODE_WORD(code)                                    \
  ((code) >= 8   ? 0x3800 + (code)*0x10 + ((code) == 0x7f) \
   : (code) >= 4 ? 0x3800 + ((code)-4) * 0x20              \
   : (code) >= 2 ? 0x3780 + ((code)-2) * 0x40              \
                 : 0x3700 * (code))
#define LOW(code) (CODE_WORD(code) & 0xff)
#define HIGH(code) (CODE_WORD(code) >> 8)
#define OF_8(byte, code)                                                              \
  byte(code), byte((code) + 1), byte((code) + 2), byte((code) + 3), byte((code) + 4), \
      byte((code) + 5), byte((code) + 6), byte((code) + 7)
#define OF_32(byte, code) \
  OF_8(byte, code), OF_8(byte, (code) + 8), OF_8(byte, (code) + 16), OF_8(byte, (code) + 24)
#define OF_128(byte) OF_32(byte, 0), OF_32(byte, 32), OF_32(byte, 64), OF_32(byte, 96)
static const uint8_t code_low[128] __attribute__((aligned(64))) = {OF_128(LOW)};
static const uint8_t code_high[128] __attribute__((aligned(64))) = {OF_128(HIGH)};

/* A mask of the first `count` codes, or of all of a vector. */
static inline __mmask64 first_codes(int64_t count) {
  return count < CODES ? ((__mmask64)1 << count) - 1 : ~(__mmask64)0;
}

/* A byte permutation leaves out the eighth bit of its index, which is the code's sign. */
static inline void widen_codes_in(__m512i code, __m512i words[2], code_marks *marks) {
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(code_low), code,
                                               _mm512_load_si512(code_low + CODES));
  const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(code_high), code,
                                                     _mm512_load_si512(code_high + CODES));
  enum { FIRST_OR_BOTH = 0xf8 }; /* a | b & c */
  const __m512i high =
      _mm512_ternarylogic_epi32(magnitude, code, _mm512_set1_epi8((char)0x80), FIRST_OR_BOTH);
  words[0] = _mm512_unpacklo_epi8(low, high);
  words[1] = _mm512_unpackhi_epi8(low, high);
  *marks = _mm512_or_si512(*marks, low);
}

static inline void widen_vector(const char *codes, __mmask64 mask, __m512i words[2],
                                code_marks *marks) {
  widen_codes_in(_mm512_maskz_loadu_epi8(mask, codes), words, marks);
}

static inline bool has_nan(code_marks marks) {
  return _mm512_test_epi8_mask(marks, _mm512_set1_epi8(1)) != 0;
}
#else
/* As float16: the four bits of the exponent, whose bias is 7, at the foot of the five whose bias is
 * 15. Subnormal codes become subnormal float16.
 *
 * Codes are widened four rows at a time, `width` of each, a multiple of 16; the float16 rows follow
 * each other. The `next` rows are asked for meanwhile. `largest` is the largest code so far without
 * its sign, times 2. */
#ifdef __AVX2__
#include <immintrin.h>

typedef __m256i code_marks;

static inline bool has_nan(code_marks largest) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8((char)0xfe))) != 0;
}

static inline code_marks larger_code(code_marks largest, __m256i codes) {
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

static inline code_marks widen_codes(const char *const from[4], const char *const next[4],
                                     int64_t width, uint16_t *halves, code_marks largest) {
  int64_t i = 0;
  for (; i + 32 <= width; i += 32)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      __builtin_prefetch(next[k] + i);
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
typedef unsigned code_marks;

static inline bool has_nan(code_marks largest) {
  return largest == 0xfe;
}

static inline code_marks widen_codes(const char *const from[4], const char *const next[4],
                                     int64_t width, uint16_t *halves, code_marks largest) {
  (void)next;
  for (int64_t k = 0; k < 4; k++)
    for (int64_t i = 0; i < width; i++) {
      const unsigned code = (unsigned char)from[k][i], magnitude = code & 0x7f;
      halves[k * width + i] = (uint16_t)((code & 0x80) << 8 | magnitude << 7);
      if (2 * magnitude > largest) largest = 2 * magnitude;
    }
  return largest;
}
#endif
#endif

#endif
