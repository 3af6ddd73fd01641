/* Reproducible random numbers: splitmix64. */
#ifndef FA3_CLI_RANDOM_H
#define FA3_CLI_RANDOM_H

#include <stdint.h>

static inline uint64_t random_bits(uint64_t *state) {
  uint64_t bits = *state += 0x9e3779b97f4a7c15;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return bits ^ bits >> 31;
}

/* In [0, 1). */
static inline double random_unit(uint64_t *state) {
  return (double)(random_bits(state) >> 11) * 0x1p-53;
}

/* Close to normal, of mean 0 and variance 1: a sum of four uniform numbers. */
static inline float random_normal(uint64_t *state) {
  uint64_t bits = random_bits(state);
  int32_t sum = 0;
  for (int i = 0; i < 64; i += 16) sum += (int32_t)(bits >> i & 0xffff);
  return ((float)sum / 65535 - 2) * 1.7320508F;
}

#endif
