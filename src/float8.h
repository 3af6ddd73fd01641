/* E4M3 codes (OCP 8-bit floating point, E4M3FN: no infinity, one NaN of either sign) to and from
 * float32, round to nearest even. */
#ifndef FA3_SRC_FLOAT8_H
#define FA3_SRC_FLOAT8_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float float_from_e4m3(uint8_t code) {
  /* The exponent and mantissa, where float32 has its own; its exponents begin 120 lower. No step
   * has a subnormal float, which a thread may have set to be taken for 0. */
  const uint32_t magnitude = code & 0x7f, bits = (magnitude << 20) + (120u << 23);
  float value;
  memcpy(&value, &bits, sizeof value);
  if (magnitude < 8) value = (float)(int32_t)magnitude * 0x1p-9f;
  if (magnitude == 0x7f) value = NAN;
  return code & 0x80 ? -value : value;
}

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* What is beyond 448 becomes 448; NaN stays NaN. */
static inline uint8_t e4m3_from_float(float value) {
  const uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffff;
  const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  /* Below the least normal number, 2^-6, steps are of 2^-9: the last place of 2^14. */
  const uint32_t subnormal = float_bits(fabsf(value) + 0x1p14f) - float_bits(0x1p14f);
  uint32_t code = magnitude < float_bits(0x1p-6f) ? subnormal : normal;
  code = magnitude > float_bits(448) ? 0x7e : code;
  code = magnitude > float_bits(INFINITY) ? 0x7f : code;
  return (uint8_t)((bits >> 24 & 0x80) | code);
}

#endif
