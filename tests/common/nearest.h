/* Rounding to 16-bit numbers, by comparing neighbours: another way than the library's. */
#ifndef FA3_TESTS_COMMON_NEAREST_H
#define FA3_TESTS_COMMON_NEAREST_H

#include <math.h>
#include <stdint.h>

#include "fa3.h"
#include "half.h"

/* Of float16 or bfloat16. */
static inline float number_of_bits(fa3_dtype dtype, uint16_t bits) {
  return dtype == FA3_FLOAT16 ? float_from_half(bits) : float_from_bfloat(bits);
}

static inline uint16_t bits_of_float(fa3_dtype dtype, float x) {
  return dtype == FA3_FLOAT16 ? half_from_float(x) : bfloat_from_float(x);
}

/* The number that is nearest to x, of two the even one: what x becomes by way of a float, or a
 * neighbour of that. */
static inline uint16_t nearest_bits(fa3_dtype dtype, long double x) {
  const uint16_t middle = bits_of_float(dtype, (float)x);
  uint16_t best = middle;
  for (int step = -1; step <= 1; step += 2) {
    const uint16_t other = (uint16_t)(middle + step); /* NaN beside 0: never nearer */
    const long double nearer = fabsl(x - (long double)number_of_bits(dtype, best)) -
                               fabsl(x - (long double)number_of_bits(dtype, other));
    if (nearer > 0 || (nearer == 0 && best % 2)) best = other;
  }
  return best;
}

#endif
