// The quantise kernel's scales, and numbers divided by them.
#ifndef FA3_QUANTIZE_DIVIDE_CUH
#define FA3_QUANTIZE_DIVIDE_CUH

#include "registers.cuh"

// A normal number, as on the CPU: the largest over 448, divided as below.
__device__ __forceinline__ float scale_for(float largest) {
  const float inverse = 1.0f / 448.0f, near = __fmul_rn(largest, inverse);
  return fmaxf(__fmaf_rn(__fmaf_rn(-448.0f, near, largest), inverse, near), 0x1p-126f);
}

// Division by a scale, correctly rounded: the quotient by its inverse is corrected once (Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). Where the
// correction could underflow, scale and numbers are shifted. A quotient of 0 keeps its sign.
struct divisor {
  float shift, scale, inverse;
};

// PTX ISA, "rcp"; a step of Newton's rounds it correctly.
__device__ __forceinline__ float invert(float x) {
  const float near = reciprocal_unit(x);
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
}

__device__ __forceinline__ divisor make_divisor(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  const bool far = scale < 0x1p-60f || scale > 0x1p60f;
  divisor by;
  by.shift = far ? __uint_as_float((254 - (bits >> 23)) << 23) : 1;
  by.scale = far ? __uint_as_float((bits & 0x7fffff) | 127 << 23) : scale;
  by.inverse = invert(by.scale);
  return by;
}

__device__ __forceinline__ float divide(float x, const divisor &by) {
  x = __fmul_rn(x, by.shift);
  const float near = __fmul_rn(x, by.inverse);
  const float too_much = __fmaf_rn(by.scale, near, -x);
  return __fmaf_rn(-too_much, by.inverse, near);
}

// Of a finite number, for its code alone, with one operation less: the inverse is a float that is
// no larger, and another for what is missing. The sum is within 2^-45 of the quotient, and its code
// is that of the correctly rounded quotient unless the quotient is as near to where rounding to a
// float changes beside a number halfway between two codes. That number has 5 bits, so such a place
// is an odd 25-bit integer next to a multiple of 2^20. Times the scale's 24 bits it can be within
// 16 of a number's multiple of 2^24 only if the scale is within 16 of a multiple of 2^20.
struct inverse {
  float most, rest;
};

__device__ __forceinline__ bool has_inverse(float scale) {
  return scale >= 0x1p-60f && scale <= 0x1p60f && ((__float_as_uint(scale) + 16) & 0xfffff) > 32;
}

__device__ __forceinline__ inverse make_inverse(float scale) {
  const float near = invert(scale);
  const bool above = __fmaf_rn(-scale, near, 1.0f) < 0;
  const float most = __uint_as_float(__float_as_uint(near) - above);
  const float left = __fmaf_rn(-scale, most, 1.0f); /* exactly */
  return {most, __fmaf_rn(__fmul_rn(left, most), left, __fmul_rn(left, most))};
}

__device__ __forceinline__ float divide(float x, const inverse &by) {
  return __fmaf_rn(x, by.most, __fmul_rn(x, by.rest));
}

#endif
