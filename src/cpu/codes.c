#include "codes.h"

#include "float8.h"

void decode_row(const char *codes, int64_t width, float scale, float *values) {
  /* Infinity times a code could become a score of -infinity, which hides it. */
  const float factor = isfinite(scale) ? scale : NAN;
  for (int64_t i = 0; i < width; i++) values[i] = float_from_e4m3((uint8_t)codes[i]) * factor;
}

float scale_for(float largest) {
  return fmaxf(largest / 448, 0x1p-126f);
}

float largest_of_row(const float *values, int64_t width, float largest) {
  /* Bits of positive floats are in the floats' order, and integers are compared side by side. */
  int32_t most = (int32_t)float_bits(largest);
  for (int64_t i = 0; i < width; i++) {
    const int32_t magnitude = (int32_t)(float_bits(values[i]) & 0x7fffffff);
    const int32_t finite = magnitude < (int32_t)float_bits(INFINITY) ? magnitude : 0;
    most = finite > most ? finite : most;
  }
  memcpy(&largest, &most, sizeof largest);
  return largest;
}

void encode_row(const float *restrict values, int64_t width, float scale, char *restrict codes) {
  for (int64_t i = 0; i < width; i++) {
    const uint8_t code = e4m3_from_float(values[i] / scale);
    const bool infinite = (float_bits(values[i]) & 0x7fffffff) == float_bits(INFINITY);
    codes[i] = (char)(infinite ? 0x7f : code);
  }
}
