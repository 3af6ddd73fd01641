/* float16 and bfloat16 to and from float32, round to nearest even. */
#ifndef FA3_SRC_HALF_H
#define FA3_SRC_HALF_H

#include <fp16.h> /* Debian's libfp16-dev; the compilers' own _Float16 and __bf16 differ too much */
#include <stdint.h>
#include <string.h>

static inline float float_from_half(uint16_t bits) {
  return fp16_ieee_to_fp32_value(bits);
}

static inline uint16_t half_from_float(float value) {
  return fp16_ieee_from_fp32_value(value);
}

static inline float float_from_bfloat(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static inline uint16_t bfloat_from_float(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  if (value != value) return (uint16_t)((wide >> 16) | 0x40); /* stays NaN, made quiet */
  return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

#endif
