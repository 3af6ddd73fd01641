/* Vectors of 4 floats in GNU C, for any processor. */
#ifndef FA3_CPU_VECTOR_PLAIN_H
#define FA3_CPU_VECTOR_PLAIN_H

#include "half.h"

#define VECTOR 4
#define PRODUCT_ROWS 4

typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_bits __attribute__((vector_size(16)));

static inline vec vec_set(float value) {
  return (vec){value, value, value, value};
}

static inline vec vec_load(const float *from) {
  vec value;
  memcpy(&value, from, sizeof value);
  return value;
}

static inline void vec_store(float *to, vec value) {
  memcpy(to, &value, sizeof value);
}

static inline vec vec_load_as(fa3_dtype dtype, const char *from, int64_t count) {
  (void)count; /* widths are multiples of 8 */
  if (dtype == FA3_FLOAT32) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
  }
  uint16_t bits[VECTOR];
  memcpy(bits, from, sizeof bits);
  vec value;
  for (int i = 0; i < VECTOR; i++)
    value[i] = dtype == FA3_FLOAT16 ? float_from_half(bits[i]) : float_from_bfloat(bits[i]);
  return value;
}

/* Of two vectors of bfloat16 side by side the even elements, and the odd ones. */
static inline vec vec_load_even(const char *from) {
  uint16_t bits[2 * VECTOR];
  memcpy(bits, from, sizeof bits);
  vec value;
  for (int i = 0; i < VECTOR; i++) value[i] = float_from_bfloat(bits[2 * i]);
  return value;
}

static inline vec vec_load_odd(const char *from) {
  uint16_t bits[2 * VECTOR];
  memcpy(bits, from, sizeof bits);
  vec value;
  for (int i = 0; i < VECTOR; i++) value[i] = float_from_bfloat(bits[2 * i + 1]);
  return value;
}

static inline void vec_store_as(fa3_dtype dtype, char *to, int64_t count, vec value) {
  (void)count;
  if (dtype == FA3_FLOAT32) {
    memcpy(to, &value, sizeof value);
    return;
  }
  uint16_t bits[VECTOR];
  for (int i = 0; i < VECTOR; i++)
    bits[i] = dtype == FA3_FLOAT16 ? half_from_float(value[i]) : bfloat_from_float(value[i]);
  memcpy(to, bits, sizeof bits);
}

static inline vec vec_add(vec a, vec b) {
  return a + b;
}

static inline vec vec_sub(vec a, vec b) {
  return a - b;
}

static inline vec vec_mul(vec a, vec b) {
  return a * b;
}

static inline vec vec_div(vec a, vec b) {
  return a / b;
}

static inline vec vec_fma(vec a, vec b, vec c) {
  return a * b + c;
}

/* b where either is NaN. */
static inline vec vec_max(vec a, vec b) {
  vec_bits above = a > b;
  return (vec)((above & (vec_bits)a) | (~above & (vec_bits)b));
}

static inline vec vec_min(vec a, vec b) {
  vec_bits below = a < b;
  return (vec)((below & (vec_bits)a) | (~below & (vec_bits)b));
}

static inline vec vec_abs(vec a) {
  return (vec)((vec_bits)a & 0x7fffffff);
}

static inline vec vec_copysign(vec magnitude, vec sign) {
  return (vec)(((vec_bits)magnitude & 0x7fffffff) | ((vec_bits)sign & (int32_t)0x80000000));
}

/* To the nearest integer, for |a| below 2^22: the addend leaves no bits for a fraction. */
static inline vec vec_round(vec a) {
  const vec shift = vec_set(0x1.8p23f);
  return (a + shift) - shift;
}

/* a * 2^n for a whole n from -1000 to 128; 0 below 2^-126, and infinity for 128. */
static inline vec vec_scale(vec a, vec n) {
  vec_bits exponent = (vec_bits)(n + (0x1.8p23f + 127)) - (vec_bits)vec_set(0x1.8p23f);
  exponent &= exponent > 0;
  return a * (vec)(exponent << 23);
}

static inline float vec_reduce_max(vec a) {
  float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
}

static inline float vec_reduce_add(vec a) {
  return (a[0] + a[1]) + (a[2] + a[3]);
}

static inline void vec_reduce_add_quad(const vec a[4], float sums[4]) {
  for (int i = 0; i < 4; i++) sums[i] = vec_reduce_add(a[i]);
}

static inline void vec_transpose(vec rows[VECTOR]) {
  vec in[VECTOR];
  memcpy(in, rows, sizeof in);
  for (int i = 0; i < VECTOR; i++) rows[i] = (vec){in[0][i], in[1][i], in[2][i], in[3][i]};
}

#endif
