#include "codes.h"

#include "float8.h"

void decode_row(const char *codes, int64_t width, float scale, float *values) {
  for (int64_t i = 0; i < width; i++) values[i] = float_from_e4m3((uint8_t)codes[i]) * scale;
}
