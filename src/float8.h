/* E4M3 codes (OCP 8-bit floating point, E4M3FN: no infinity, one NaN of either sign) to and from
 * float32, round to nearest even. */
#ifndef FA3_SRC_FLOAT8_H
#define FA3_SRC_FLOAT8_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float float_from_e4m3(uint8_t code) {
  /* The exponent and mantissa, where float32 has its own; its exponents begin 120 lower. A
   * subnormal code is a subnormal float, and so right too. */
  const uint32_t bits = (uint32_t)(code & 0x7f) << 20;
  float value;
  memcpy(&value, &bits, sizeof value);
  value = (code & 0x7f) == 0x7f ? NAN : value * 0x1p120f;
  return code & 0x80 ? -value : value;
}

/* What is beyond 448 becomes 448; NaN stays NaN. */
static inline uint8_t e4m3_from_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
  if (value != value) return sign | 0x7f;
  const float magnitude = fabsf(value);
  if (magnitude >= 448) return sign | 0x7e;
  /* Below the least normal number steps are of 2^-9. */
  if (magnitude < 0x1p-6f) return sign | (uint8_t)lrintf(magnitude * 0x1p9f);
  bits &= 0x7fffffff;
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | (uint8_t)((bits >> 20) - (120 << 3));
}

#endif
