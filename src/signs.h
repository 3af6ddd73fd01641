/* The random signs of FA3_ROTATE. */
#ifndef FA3_SRC_SIGNS_H
#define FA3_SRC_SIGNS_H

#include <stdint.h>

/* Of the elements from 64 * number of a head on, a bit each: splitmix64, as fa3.h says it. */
static inline uint64_t random_signs(uint64_t seed, uint64_t number) {
  uint64_t bits = seed + (number + 1) * 0x9e3779b97f4a7c15;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return bits ^ bits >> 31;
}

#endif
