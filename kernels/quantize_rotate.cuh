// The quantise kernel's rotation: random signs, then a Hadamard transform.
#ifndef FA3_QUANTIZE_ROTATE_CUH
#define FA3_QUANTIZE_ROTATE_CUH

#include "quantize_tile.cuh"

// Of the Hadamard transform of the block of elements that d is in: the head dim's highest bit that
// d lacks is the block's size.
__device__ __forceinline__ float factor_of(int d, int head_dim) {
  if (d >= head_dim) return 0.0f;
  const int log_size = 31 - __clz(head_dim ^ d);
  const uint32_t half = (uint32_t)(127 - log_size / 2) << 23;
  return __uint_as_float(half) * (log_size % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

// The random signs of the thread's elements, a bit each.
__device__ __forceinline__ uint32_t find_signs(const fa3_quantize_params &p) {
  uint32_t signs = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk++) {
    const int first = first_of(chunk);
    signs |= (uint32_t)(p.signs[first / 64] >> first % 64 & 0xff) << chunk * kChunk;
  }
  return signs;
}

// A step of the Hadamard transform on two of the thread's own elements.
__device__ __forceinline__ void add_and_subtract(float &a, float &b) {
  const float x = a, y = b;
  a = __fadd_rn(x, y);
  b = __fsub_rn(x, y);
}

// Random signs, and what makes the transform orthonormal.
template <bool kWhole>
__device__ __forceinline__ void multiply(const fa3_quantize_params &p,
                                         float (&x)[kRows][kElements]) {
  const uint32_t signs = find_signs(p);
  float factor = factor_of(0, kDim);
#pragma unroll
  for (int i = 0; i < kElements; i++) {
    if (!kWhole) factor = factor_of(index_of(i), p.head_dim);
    const float f = __uint_as_float(__float_as_uint(factor) ^ (signs << (31 - i) & 0x80000000));
#pragma unroll
    for (int r = 0; r < kRows; r++) x[r][i] = __fmul_rn(x[r][i], f);
  }
}

// The Hadamard transform of a row, in the CPU's order. Without kWhole the head dim may be less than
// kDim: a step is made where its pair of blocks is there.
template <bool kWhole>
__device__ __forceinline__ void transform(const fa3_quantize_params &p, float (&x)[kElements]) {
#pragma unroll
  for (int half = 1; half < kChunk; half *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++)
      if (!(i & half) &&
          (kWhole || first_of(i / kChunk) + (i % kChunk & -2 * half) + 2 * half <= p.head_dim))
        add_and_subtract(x[i], x[i + half]);
#pragma unroll
  for (int half = kChunk; half < kStride; half *= 2) {
    const float sign = first_of(0) & half ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      const bool there = kWhole || (first_of(i / kChunk) & -2 * half) + 2 * half <= p.head_dim;
      const float y = __shfl_xor_sync(0xffffffff, x[i], half / kChunk);
      if (there) x[i] = __fmaf_rn(x[i], sign, y); /* the sum, rounded once */
    }
  }
#pragma unroll
  for (int half = 1; half < kChunks; half *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      const int chunk = i / kChunk;
      if (!(chunk & half) &&
          (kWhole || (first_of(chunk) & -2 * half * kStride) + 2 * half * kStride <= p.head_dim))
        add_and_subtract(x[i], x[i + half * kChunk]);
    }
}

template <bool kWhole>
__device__ __forceinline__ void rotate(const fa3_quantize_params &p, float (&x)[kRows][kElements]) {
  multiply<kWhole>(p, x);
#pragma unroll
  for (int r = 0; r < kRows; r++) transform<kWhole>(p, x[r]);
}

#endif
