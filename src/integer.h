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

/* The product; much, if it is too large, and yet so little that some such can be added up. */
static inline int64_t multiply(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX / 1024 : product;
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
