/* Sizes and positions. */
#ifndef FA3_SRC_INTEGER_H
#define FA3_SRC_INTEGER_H

#include <stdint.h>

static inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static inline int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static inline int64_t round_down(int64_t value, int64_t step) {
  return value / step * step;
}

static inline int64_t divide_up(int64_t value, int64_t by) {
  return value / by + (value % by > 0); /* of any two: no sum overflows */
}

static inline int64_t round_up(int64_t value, int64_t step) {
  return divide_up(value, step) * step;
}

#endif
