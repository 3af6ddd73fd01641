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
#include "softmax_scale.h"

constexpr int kHeadDim = 128;
constexpr float kScale = 0.08838834764831845f;         // 1/sqrt(128)
constexpr float kScaleLog2 = kScale * 1.44269504089f;  // for exponentials in base 2

typedef __nv_bfloat16 bf16;

// For the library's softmax_finish; what is 0 is for scores that the ladder does not have.
__device__ __forceinline__ fa3_softmax_scale softmax_scale(void) {
  return {kScale, kScaleLog2, 1 / kScaleLog2, 0, 0};
}

// E4M3 codes of Q, K and V, laid out as they are, and a scale for each block of
// kBlockRows rows of a head: a number is its code times its block's scale.
constexpr int kBlockRows = 128;

struct quantised {
  uint8_t *query, *key, *value;
  float *query_scale, *key_scale, *value_scale;  // (batch, heads, blocks)
};

struct attention {
  int batch, heads, seqlen;
  bool causal;
  const bf16 *query, *key, *value;
  bf16 *out;
  float *scores;    // batch * heads * seqlen^2, for K0 alone
  quantised codes;  // for K7 and K8 alone
};

struct step {
  const char *name;
  const char *idea;
  const void *kernel;  // the one whose registers are reported
  int threads;
  int shared_bytes;  // dynamic shared memory of a block
  void (*launch)(const attention &);
  void (*quantise)(const attention &);  // before the launch, if it takes codes
  bool rotates;                         // quantise() turns Q and K first
};

extern const step k0_naive, k1_tiled, k2_mma_sync, k3_tma, k4_wgmma, k5_specialised, k6_overlap,
    k7_fp8, k8_incoherent;

// K7's kernel, which is K8's, too.
void attend_to_codes(const attention &a);

// The tensor as the copy engine sees it: tiles of `rows` rows of one head, as two
// halves of 64 columns each, 128 bytes a row, swizzled. A host function.
CUtensorMap tile_map(const attention &a, const bf16 *tensor, int rows);

// The same of codes, whose rows of 128 bytes need no halves.
CUtensorMap code_map(const attention &a, const uint8_t *codes, int rows);

// The element where a head's row begins.
__host__ __device__ inline int64_t row_at(const attention &a, int batch, int row, int head) {
  return (((int64_t)batch * a.seqlen + row) * a.heads + head) * kHeadDim;
}

// A block's scale.
__host__ __device__ inline int64_t scale_at(const attention &a, int batch, int block, int head) {
  return ((int64_t)batch * a.heads + head) * (a.seqlen / kBlockRows) + block;
}

// K8's random signs, one for each column: any fixed bits do.
__host__ __device__ inline float random_sign(int column) {
  const uint32_t bits[4] = {0x9d2c5680, 0x4f1bbcdc, 0xb5297a4d, 0x68e31da4};
  return bits[column / 32] >> column % 32 & 1 ? -1.0f : 1.0f;
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
