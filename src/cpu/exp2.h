/* Exponential and hyperbolic tangent on the vectors of one level (vector_*.h comes first). */
#ifndef FA3_CPU_EXP2_H
#define FA3_CPU_EXP2_H

/* (2^f - 1) for |f| <= 1/2: minimax for the relative error of 2^f, 1.1e-7. */
static inline vec vec_exp2_minus_one(vec f) {
  vec sum = vec_set(0.00132647273f);
  sum = vec_fma(sum, f, vec_set(0.009671513f));
  sum = vec_fma(sum, f, vec_set(0.0555073358f));
  sum = vec_fma(sum, f, vec_set(0.240222424f));
  sum = vec_fma(sum, f, vec_set(0.693147004f));
  return vec_mul(sum, f);
}

#ifndef VECTOR_EXP2
/* 2^x; exactly 0 from -160 down, infinity from 127.5 up, NaN for NaN. */
static inline vec vec_exp2(vec x) {
  x = vec_min(vec_set(128), vec_max(vec_set(-160), x));
  vec whole = vec_round(x);
  vec f = vec_sub(x, whole);
  return vec_scale(vec_add(vec_exp2_minus_one(f), vec_set(1)), whole);
}
#endif

/* e / (e + 2) with e = exp(2|x|) - 1, which loses nothing near 0. */
static inline vec vec_tanh(vec x) {
  const float log2_e = 1.44269504f;
  vec limited = vec_max(vec_set(-10), vec_sub(vec_set(0), vec_abs(x)));
  vec exponent = vec_mul(limited, vec_set(-2 * log2_e));
  vec whole = vec_round(exponent);
  vec power = vec_scale(vec_set(1), whole);
  vec f = vec_exp2_minus_one(vec_sub(exponent, whole));
  vec e = vec_fma(power, f, vec_sub(power, vec_set(1)));
  return vec_copysign(vec_div(e, vec_add(e, vec_set(2))), x);
}

#endif
