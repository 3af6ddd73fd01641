/* E4M3 codes as the float16 numbers of 1 / CODE_FACTOR their value, of one level: the four bits of
 * the exponent, whose bias is 7, at the foot of the five whose bias is 15. Subnormal codes become
 * subnormal float16. */
#ifndef FA3_CPU_WIDEN_H
#define FA3_CPU_WIDEN_H

#include <stdint.h>

#ifdef __AVX2__
#include <immintrin.h>

/* `width` is a multiple of 16. */
static inline void widen_codes(const char *codes, int64_t width, uint16_t *halves) {
  int64_t i = 0;
#ifdef __AVX512BW__
  for (; i + 32 <= width; i += 32) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)(codes + i));
    const __m512i moved = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
    const __m512i magnitude = _mm512_and_si512(moved, _mm512_set1_epi16(0x3f80));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3f80));
    const __m512i half = _mm512_and_si512(moved, _mm512_set1_epi16((int16_t)0xbfff));
    _mm512_store_si512(halves + i, _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(-1)));
  }
#endif
  for (; i < width; i += 16) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(codes + i));
    /* The sign is in the two highest bits. */
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i magnitude = _mm256_and_si256(moved, _mm256_set1_epi16(0x3f80));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
    const __m256i half = _mm256_and_si256(moved, _mm256_set1_epi16((int16_t)0xbfff));
    _mm256_store_si256((__m256i *)(halves + i), _mm256_or_si256(half, nan));
  }
}
#else
static inline void widen_codes(const char *codes, int64_t width, uint16_t *halves) {
  for (int64_t i = 0; i < width; i++) {
    const unsigned code = (unsigned char)codes[i];
    halves[i] =
        (uint16_t)((code & 0x7f) == 0x7f ? 0x7fff : (code & 0x80) << 8 | (code & 0x7f) << 7);
  }
}
#endif

#endif
