// What all steps of the ladder share: the problem, how a step presents itself to
// the harness, and the two ends of a kernel that no step is about.
//
// Tensors are bf16, (batch, seqlen, heads, 128), contiguous. The sequence is a
// multiple of 128, so that no step needs code for tails, and the scale is
// 1/sqrt(128). Everything else that attention can be is the product kernel's
// business (kernels/forward.cu).
#ifndef WORKLOG_LADDER_CUH
#define WORKLOG_LADDER_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#include "registers.cuh"

constexpr int kHeadDim = 128;
constexpr float kScale = 0.08838834764831845f;         // 1/sqrt(128)
constexpr float kScaleLog2 = kScale * 1.44269504089f;  // for exponentials in base 2

typedef __nv_bfloat16 bf16;

struct attention {
  int batch, heads, seqlen;
  bool causal;
  const bf16 *query, *key, *value;
  bf16 *out;
  float *scores;  // batch * heads * seqlen^2, for K0 alone
};

struct step {
  const char *name;
  const char *idea;
  const void *kernel;  // the one whose registers are reported
  int threads;
  int shared_bytes;  // dynamic shared memory of a block
  void (*launch)(const attention &);
};

extern const step k0_naive, k1_tiled, k2_mma_sync, k3_tma, k4_wgmma, k5_specialised, k6_overlap;

// The tensor as the copy engine sees it: tiles of `rows` rows of one head, as two
// halves of 64 columns each, 128 bytes a row, swizzled. A host function.
CUtensorMap tile_map(const attention &a, const bf16 *tensor, int rows);

// The element where a head's row begins.
__host__ __device__ inline int64_t row_at(const attention &a, int batch, int row, int head) {
  return (((int64_t)batch * a.seqlen + row) * a.heads + head) * kHeadDim;
}

// Dynamic shared memory, aligned as the 128-byte swizzle needs it. A launch asks
// for kAlignment bytes more than the tiles take.
constexpr int kAlignment = 1024;

__device__ __forceinline__ uint32_t shared_base() {
  extern __shared__ unsigned char shared[];
  return ((uint32_t)__cvta_generic_to_shared(shared) + kAlignment - 1) & ~(kAlignment - 1);
}

// Rows `row` and `row + 8` of the output, in the register layout that mma.sync and
// wgmma share: o[4j + 2r + e] is column 8j + 2 * (lane % 4) + e of row r.
__device__ __forceinline__ void store_rows(const attention &a, const float (&o)[kHeadDim / 2],
                                           const float (&factor)[2], int batch, int row, int head) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bf16 *to = a.out + row_at(a, batch, row + 8 * r, head) + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      *(uint32_t *)(to + 8 * j) =
          pack_pair(o[4 * j + 2 * r] * factor[r], o[4 * j + 2 * r + 1] * factor[r]);
  }
}

#endif
