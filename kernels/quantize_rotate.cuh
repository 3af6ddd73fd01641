// The quantise kernel's rotation: random signs, then a Hadamard transform.
#ifndef FA3_QUANTIZE_ROTATE_CUH
#define FA3_QUANTIZE_ROTATE_CUH

#include "quantize_tile.cuh"

// Numbers of a chunk's elements lie in shared memory with room between chunks, so that a row's
// threads find theirs in different banks.
enum { kChunkRoom = kChunk + 4, kNumbersRoom = kDim / kChunk * kChunkRoom };

// Where a number of the row's element d is among those that are read four at a time.
__device__ __forceinline__ int room_of(int d) {
  return d / kChunk * kChunkRoom + d % kChunk;
}

// What makes the Hadamard transform of so many elements orthonormal.
__device__ __forceinline__ float magnitude_of(int log_size) {
  const uint32_t half = (uint32_t)(127 - log_size / 2) << 23;
  return __uint_as_float(half) * (log_size % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

__device__ __forceinline__ bool sign_of(const fa3_quantize_params &p, int d) {
  return p.signs[d / 64] >> d % 64 & 1;
}

// What element d is multiplied by: a random sign, and what the transform of the block of elements
// that d is in needs. The head dim's highest bit that d lacks is the block's size.
__device__ __forceinline__ float factor_of(const fa3_quantize_params &p, int d) {
  if (d >= p.head_dim) return 0.0f;
  const float factor = magnitude_of(31 - __clz(p.head_dim ^ d));
  return sign_of(p, d) ? -factor : factor;
}

// A step of the Hadamard transform on two of the thread's own elements.
__device__ __forceinline__ void add_and_subtract(float &a, float &b) {
  const float x = a, y = b;
  a = __fadd_rn(x, y);
  b = __fsub_rn(x, y);
}

// Whether the rotation has a step that joins halves of so many elements where element i of the
// thread's is: their pair of halves is in the head.
__device__ __forceinline__ bool has_step(const fa3_quantize_params &p, int i, int half) {
  const int first = first_of(i / kChunk) + i % kChunk;
  return (first & -2 * half) + 2 * half <= p.head_dim;
}

// The thread's numbers of a row of numbers, four at a time.
__device__ __forceinline__ float4 four_of(uint32_t numbers, int i) {
  return load_shared_floats(
      numbers +
      (this_thread() % kLanes * kChunkRoom + i / kChunk * kLanes * kChunkRoom + i % kChunk) * 4);
}

// The Hadamard transform of a row, in the CPU's order, after its factors. Without kWhole the head
// dim may be less than kDim; with kAny it may end within a chunk.
template <bool kWhole, bool kAny>
__device__ __forceinline__ void rotate(const fa3_quantize_params &p, uint32_t factors,
                                       float (&x)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const float4 f = four_of(factors, i);
    x[i] = __fmul_rn(x[i], f.x), x[i + 1] = __fmul_rn(x[i + 1], f.y);
    x[i + 2] = __fmul_rn(x[i + 2], f.z), x[i + 3] = __fmul_rn(x[i + 3], f.w);
    if (!kWhole)
      __syncwarp(); /* one by one: more at a time would take registers that are not there */
  }
#pragma unroll
  for (int half = 1; half < kChunk; half *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++)
      if (!(i & half) && (!kAny || has_step(p, i, half))) add_and_subtract(x[i], x[i + half]);
#pragma unroll
  for (int half = kChunk; half < kHalf; half *= 2) {
    float signs[2];
    bool there[2];
#pragma unroll
    for (int chunk = 0; chunk < 2; chunk++) {
      there[chunk] = kWhole || has_step(p, chunk * kChunk, half);
      signs[chunk] = there[chunk] && first_of(0) & half ? -1.0f : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      const float y = __shfl_xor_sync(0xffffffff, x[i], half / kChunk);
      /* The sum, rounded once; -0 leaves all as they are. */
      x[i] = __fmaf_rn(x[i], signs[i / kChunk], there[i / kChunk] ? y : -0.0f);
    }
  }
  if (kWhole || (kAny && p.head_dim == kDim))
#pragma unroll
    for (int i = 0; i < kChunk; i++) add_and_subtract(x[i], x[i + kChunk]);
}

#endif
