// The quantise kernel's rotation as matrix products, of rows of 16-bit numbers that fill the head
// dim. A Hadamard matrix is the Kronecker product of smaller ones: tensor cores multiply by one of
// 16 rows, whose columns are bits 0, 3, 4 and 5 of an element's index, and sums and differences of
// what one thread has do the other bits. Products with its factors are exact, sums of 16 have
// float32's precision, but not the CPU's order.
//
// The first operand is numbers, of 16 segments of 64: rows, or halves or quarters of rows. A lane
// l, with g = l / 4 and t = l % 4, has of segments g and g + 8 the elements 16t to 16t + 15 of the
// result: of one row, as without the rotation, or of rows of 64 one chunk each of two.
#ifndef FA3_QUANTIZE_PRODUCTS_CUH
#define FA3_QUANTIZE_PRODUCTS_CUH

#include "mma.cuh"
#include "quantize_rotate.cuh"

enum {
  kSegment = 64,
  kRowSegments = kDim / kSegment,
  kProductRows = kDim == 64 ? 2 : 1,      /* of a thread, eight apart */
  kProductLanes = kDim == 64 ? 4 : kLanes /* of a row */
};

// A Hadamard transform of kDim elements is orthonormal with the factor 1 / sqrt(kDim). The matrix
// has 1/8 or 1/16, which are exact in 16 bits; at head dim 128 finish_product multiplies by the
// square root of 2 that is missing.
constexpr float kMatrixFactor = kDim == 64 ? 0x1p-3f : 0x1p-4f;
__device__ __forceinline__ float finish_product(float x) {
  return kDim == 128 ? __fmul_rn(x, 0x1.6a09e6p+0f) : x;
}

// The thread's first row of a tile, and its first element there.
__device__ __forceinline__ int product_row(void) {
  return kDim == 64 ? warp_row() + (int)(this_thread() % 32 / 4) : row_of();
}

__device__ __forceinline__ int product_first(void) {
  return (int)(this_thread() % kProductLanes * kChunk);
}

// The segments of a lane are g and g + 8: of a row of 256 the first and the third quarter, or the
// others.
__device__ __forceinline__ int quarter_of(int lane) {
  return kDim == 256 ? lane / 4 % 2 : 0;
}

// What a lane has of the second operand (mma.cuh): two words for columns 2t and 2t + 1 of each four
// of the result, two for the others.
__device__ __forceinline__ uint4 find_matrix(int lane) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = lane / 8 * 4 + i / 2 * 2 + lane / 4 % 2, k = 2 * (lane % 4) + 8 * (i % 2);
    const uint32_t low = __popc(column & k) & 1, high = __popc(column & (k + 1)) & 1;
    words[i] = pack_pair(kMatrixFactor, kMatrixFactor) ^ (low << 15 | high << 31);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The signs of the numbers that lanes t have, of one quarter and the one two on, two to a word of
// the first operand: those of word n are bits 31 and 15 of the result << n. By a warp.
__device__ __forceinline__ uint32_t find_signs(const fa3_quantize_params &p, int t, int quarter) {
  const int i = (int)(threadIdx.x % 32), n = i / 2;
  const int segment = quarter + (kDim == 64 ? 0 : n % 2 * (kRowSegments / 2));
  const int vector = t + n / 2 % 2 * 4, d = segment * kSegment + 8 * vector + n / 4 * 2 + i % 2;
  return __reduce_or_sync(0xffffffff, (uint32_t)sign_of(p, d) << ((i % 2 ? 31 : 15) - n));
}

// What a thread knows of its segments.
struct product_place {
  uint32_t own;  // the first vector that it reads
  uint32_t signs;
  float sign;       // of its own quarter, where two neighbouring ones are added
  uint32_t unused;  // it is read as one vector of 16 bytes
};

__device__ __forceinline__ product_place find_product_place(uint32_t stage,
                                                            const uint32_t (&signs)[8]) {
  const unsigned lane = this_thread() % 32, quarter = quarter_of((int)lane);
  return {own_vector<kRowBytes, true>(stage), signs[lane % 4 + quarter * 4], quarter ? -1.0f : 1.0f,
          0};
}

__device__ __forceinline__ product_place load_product_place(uint32_t from) {
  const uint4 at = load_shared_vector(from);
  return {at.x, at.y, __uint_as_float(at.z), at.w};
}

// The numbers of segments g and g + 8, vectors t, and then t + 4.
__device__ __forceinline__ void read_words(const product_place &at, uint32_t (&words)[4][4]) {
#pragma unroll
  for (int v = 0; v < 4; v++) {
    const uint4 raw =
        load_shared_vector((at.own ^ v / 2 * 64) + v % 2 * (kDim == 64 ? 1024 : kDim));
    words[v][0] = raw.x, words[v][1] = raw.y, words[v][2] = raw.z, words[v][3] = raw.w;
  }
}

// The thread's elements, rotated but for finish_product: products do bits 0, 3, 4 and 5 of their
// index, sums of its own elements bits 1, 2 and, from head dim 128 on, the highest. At 256 bit 6
// takes a neighbour's.
__device__ __forceinline__ void multiply_words(const product_place &at, uint32_t matrix,
                                               const uint32_t (&words)[4][4],
                                               float (&x)[kElements]) {
  const uint4 b = load_shared_vector(matrix + this_thread() % 32 * 16);
  float sums[4][2][4] = {};
#pragma unroll
  for (int n = 0; n < 4; n++) {
    uint32_t a[4];
#pragma unroll
    for (int v = 0; v < 4; v++) a[v] = words[v][n] ^ (at.signs << (4 * n + v) & 0x80008000);
    mma_16_8_16(sums[n][0], a, b.x, b.y);
    mma_16_8_16(sums[n][1], a, b.z, b.w);
  }
#pragma unroll
  for (int half = 1; half < 4; half *= 2)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (!(n & half)) add_and_subtract(sums[n][i / 4][i % 4], sums[n + half][i / 4][i % 4]);
#pragma unroll
  for (int i = 0; i < kElements; i++) x[i] = sums[i / 2 % 4][i / 8 % 2][i / kChunk * 2 + i % 2];
  if (kDim == 256)
#pragma unroll
    for (int i = 0; i < kElements; i++)
      x[i] = __fmaf_rn(x[i], at.sign, __shfl_xor_sync(0xffffffff, x[i], 4));
  if (kDim > 64)
#pragma unroll
    for (int i = 0; i < kChunk; i++) add_and_subtract(x[i], x[i + kChunk]);
}

// The mean of rows becomes that of their products, in double precision, by a warp.
__device__ __forceinline__ void rotate_mean(const fa3_quantize_params &p, float *mean) {
  constexpr int kOwn = kDim / 32;
  const int lane = (int)threadIdx.x % 32;
  double x[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; i++) {
    const int d = 32 * i + lane;
    x[i] = (double)mean[room_of(d)] * (sign_of(p, d) ? -kMatrixFactor : kMatrixFactor);
  }
#pragma unroll
  for (int half = 1; half < 32; half *= 2)
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const double y = __shfl_xor_sync(0xffffffff, x[i], half);
      x[i] = lane & half ? y - x[i] : x[i] + y;
    }
#pragma unroll
  for (int half = 1; half < kOwn; half *= 2)
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      if (i & half) continue;
      const double a = x[i], b = x[i + half];
      x[i] = a + b, x[i + half] = a - b;
    }
#pragma unroll
  for (int i = 0; i < kOwn; i++) mean[room_of(32 * i + lane)] = (float)x[i];
}

// It is taken off the thread's elements.
__device__ __forceinline__ void subtract_from_products(uint32_t mean, float (&x)[kElements]) {
  mean += this_thread() % kProductLanes * kChunkRoom * 4;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const int chunk = kProductRows == 1 ? i / kChunk : 0;
    const float4 m = load_shared_floats(mean + (chunk * kLanes * kChunkRoom + i % kChunk) * 4);
    x[i] = __fsub_rn(x[i], m.x), x[i + 1] = __fsub_rn(x[i + 1], m.y);
    x[i + 2] = __fsub_rn(x[i + 2], m.z), x[i + 3] = __fsub_rn(x[i + 3], m.w);
  }
}

// The CPU rounds these sums otherwise, so a quotient needs not be rounded correctly: a product of
// the inverse, with the other factor, will do.
struct factor {
  float by;
};

__device__ __forceinline__ float divide(float x, const factor &f) {
  return __fmul_rn(x, f.by);
}

// Where some of a row are infinite they become NaN. `by` has no part of finish_product.
struct careful_factor {
  float by;
};

__device__ __forceinline__ float divide(float x, const careful_factor &f) {
  const float y = finish_product(x);
  return __fmaf_rn(y, 0, __fmul_rn(y, f.by));
}

#endif
