// What K7 and K8 have in common before attention: a block of 128 rows of one head, in
// the registers of a block of threads, becomes E4M3 codes with one scale.
#ifndef WORKLOG_QUANTISE_CUH
#define WORKLOG_QUANTISE_CUH

#include "codes.cuh"
#include "ladder.cuh"

constexpr int kQuantiseThreads = 256;
constexpr int kColumns = 8;                                  // of a thread, side by side
constexpr int kRowThreads = kHeadDim / kColumns;             // threads of a row
constexpr int kRowsAtOnce = kQuantiseThreads / kRowThreads;  // rows of all threads
constexpr int kRowsOfThread = kBlockRows / kRowsAtOnce;      // kRowsAtOnce apart
constexpr float kGreatestCode = 448.0f;                      // of E4M3

struct block_of_rows {
  float x[kRowsOfThread][kColumns];
};

enum { kQuery, kKey, kValue, kTensors };

template <typename T>
__device__ __forceinline__ T of_three(int tensor, T query, T key, T value) {
  return tensor == kQuery ? query : tensor == kKey ? key : value;
}

// The grid: a block of threads for each block of rows, head, and tensor of each batch entry.
inline dim3 quantise_grid(const attention &a) {
  return dim3(a.seqlen / kBlockRows, a.heads, kTensors * a.batch);
}

__device__ __forceinline__ int tensor_of_block() {
  return blockIdx.z % kTensors;
}

// The element with which this thread's first row begins.
__device__ __forceinline__ int64_t first_element(const attention &a) {
  const int row = blockIdx.x * kBlockRows + threadIdx.x / kRowThreads;
  return row_at(a, blockIdx.z / kTensors, row, blockIdx.y) + threadIdx.x % kRowThreads * kColumns;
}

__device__ __forceinline__ void load_rows(block_of_rows &b, const attention &a) {
  const bf16 *from = of_three(tensor_of_block(), a.query, a.key, a.value) + first_element(a);
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const uint4 eight = *(const uint4 *)(from + (int64_t)i * kRowsAtOnce * a.heads * kHeadDim);
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < kColumns; ++j)  // a bf16 is the upper half of a float
      b.x[i][j] = __uint_as_float(j % 2 ? pairs[j / 2] & 0xffff0000 : pairs[j / 2] << 16);
  }
}

// The greatest number becomes the greatest code.
__device__ __forceinline__ void store_codes(const block_of_rows &b, const attention &a) {
  __shared__ float of_warp[kQuantiseThreads / 32];
  float greatest = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) greatest = fmaxf(greatest, fabsf(b.x[i][j]));
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, i));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = greatest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kQuantiseThreads / 32; ++i) greatest = fmaxf(greatest, of_warp[i]);

  const float scale = greatest > 0.0f ? greatest / kGreatestCode : 1.0f;
  const float inverse = 1.0f / scale;
  const quantised &c = a.codes;
  const int tensor = tensor_of_block();
  float *scales = of_three(tensor, c.query_scale, c.key_scale, c.value_scale);
  if (threadIdx.x == 0) scales[scale_at(a, blockIdx.z / kTensors, blockIdx.x, blockIdx.y)] = scale;
  uint8_t *to = of_three(tensor, c.query, c.key, c.value) + first_element(a);
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    float y[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) y[j] = b.x[i][j] * inverse;
    *(uint2 *)(to + (int64_t)i * kRowsAtOnce * a.heads * kHeadDim) =
        make_uint2(pack_codes(y[0], y[1], y[2], y[3]), pack_codes(y[4], y[5], y[6], y[7]));
  }
}

#endif
