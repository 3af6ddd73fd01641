#include "e4m3.h"

#include <math.h>
#include <stdbool.h>

double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude =
      exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp((double)mantissa, -9);
  return code & 0x80 ? -magnitude : magnitude;
}

/* Whether element d becomes negative. */
static bool sign_of(uint64_t seed, int d) {
  uint64_t z = seed + ((uint64_t)d / 64 + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return z >> d % 64 & 1;
}

/* The Hadamard matrices that lie along the diagonal, as sums of all their elements. */
void rotate_head(uint64_t seed, int width, double *x) {
  double before[E4M3_MOST_DIM];
  for (int d = 0; d < width; d++) before[d] = sign_of(seed, d) ? -x[d] : x[d];
  for (int first = 0, size; first < width; first += size) {
    for (size = 1; 2 * size <= width - first;) size *= 2;
    for (int i = 0; i < size; i++) {
      double sum = 0;
      for (int j = 0; j < size; j++)
        sum += __builtin_parity((unsigned)(i & j)) ? -before[first + j] : before[first + j];
      x[first + i] = sum / sqrt(size);
    }
  }
}
