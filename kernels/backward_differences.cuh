// P and dS = P (dP - D) of the warpgroup's keys and a block of queries, from products in registers.
#ifndef FA3_BACKWARD_DIFFERENCES_CUH
#define FA3_BACKWARD_DIFFERENCES_CUH

#include "backward_probability.cuh"
#include "backward_work.cuh"

// The queries that see the thread's two keys. Where a staggered tile has gone round, block
// b - blocks stands for block b (backward_work.cuh), so queries may be negative.
__device__ __forceinline__ void find_seeing(const work &w, int warpgroup, int lane,
                                            fa3_range (&seen)[2]) {
  const int row = (thread_again() & 127) / 32 * 16 + lane / 4;  // and the one eight below
  const fa3_mask &mask = w.sequence.mask;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = w.tile * kTileK + warpgroup * kKeys + row + 8 * r;
    seen[r] = fa3_seeing_queries(&mask, key);
    if (seen[r].begin == 0) seen[r].begin = -mask.queries;
    if (key >= mask.keys) seen[r].end = -mask.queries;
  }
}

// Scores become probabilities; where lse are large, as backward_probability.cuh has it. `lse` is
// the address of the thread's first query's.
template <bool kLarge>
__device__ __forceinline__ void take_exponentials(const fa3_backward_params &p,
                                                  float (&s)[kTileQ / 2], uint32_t lse) {
#pragma unroll
  for (int j = 0; j < kTileQ / 8; ++j) {
    const float2 l = load_shared_pair(lse + 32 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float &x = s[4 * j + e];
      x = kLarge ? large_probability(x, p.natural, e % 2 ? l.y : l.x)
                 : exp2_unit(fmaf(x, p.scale_log2, e % 2 ? -l.y : -l.x));
    }
  }
}

// Zeros where the thread's two keys are not seen. `column` is the query of its first probability.
__device__ __forceinline__ void hide(float (&s)[kTileQ / 2], const fa3_range (&seen)[2],
                                     int column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = seen[r].begin - column, end = seen[r].end - column;
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int offset = 8 * j + e;
        if (offset < begin || offset >= end) s[4 * j + 2 * r + e] = 0.0f;
      }
    }
  }
}

// P and dS = P (dP - D), packed. `d` is the address of the thread's first query's D.
__device__ __forceinline__ void take_differences(uint32_t (&weights)[kTileQ / 4],
                                                 uint32_t (&ds)[kTileQ / 4],
                                                 const float (&s)[kTileQ / 2],
                                                 const float (&dp)[kTileQ / 2], uint32_t d) {
#pragma unroll
  for (int j = 0; j < kTileQ / 8; ++j) {
    const float2 l = load_shared_pair(d + 32 * j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 4 * j + 2 * r;
      weights[2 * j + r] = pack_pair(s[i], s[i + 1]);
      ds[2 * j + r] = pack_pair(s[i] * (dp[i] - l.x), s[i + 1] * (dp[i + 1] - l.y));
    }
  }
}

// The same where scores are capped: from the scores themselves, and dS is also multiplied by the
// derivative of the cap. `seen` are the queries that see the thread's two keys.
__device__ __forceinline__ void take_capped_differences(
    uint32_t (&weights)[kTileQ / 4], uint32_t (&ds)[kTileQ / 4], float (&s)[kTileQ / 2],
    const float (&dp)[kTileQ / 2], const fa3_range (&seen)[2], int column, uint32_t lse, uint32_t d,
    const fa3_backward_params &p) {
  const bool large = has_large_lse<kTileQ>(lse);
  cap_scores(s, p.softcap_log2);
#pragma unroll
  for (int j = 0; j < kTileQ / 8; ++j) {
    const float2 l = load_shared_pair(lse + 32 * j), k = load_shared_pair(d + 32 * j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float weight[2], grad[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * j + 2 * r + e, query = column + 8 * j + e;
        const bool hidden = query < seen[r].begin || query >= seen[r].end;
        const float of_row = e ? l.y : l.x;
        weight[e] = hidden  ? 0.0f
                    : large ? large_probability(s[i], p.natural, of_row)
                            : exp2_unit(fmaf(s[i], p.scale_log2, -of_row));
        grad[e] = weight[e] * fmaf(-s[i], s[i], 1.0f) * (dp[i] - (e ? k.y : k.x));
      }
      weights[2 * j + r] = pack_pair(weight[0], weight[1]);
      ds[2 * j + r] = pack_pair(grad[0], grad[1]);
    }
  }
}

// The lane's row of dS in shared memory, for `store_ds`, without the swizzle.
__device__ __forceinline__ uint32_t row_of_ds(uint32_t base, int warpgroup) {
  const int thread = thread_again() & 127, warp = thread / 32, lane = thread & 31;
  if (kTransposed)
    return base + warpgroup * kDsBlockBytes + (lane / 16 * 8 + (lane & 7)) * kDsRowBytes +
           (((warp * 2 + lane / 8 % 2) ^ (lane & 7)) << 4);
  return base + (warpgroup * kKeys + warp * 16 + (lane & 15)) * kDsRowBytes;
}

// The warp's 16 keys of dS^T, to shared memory, where dQ's product takes them from.
__device__ __forceinline__ void store_ds(const uint32_t (&ds)[kTileQ / 4], uint32_t row) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < kTileQ / 8; j += 2) {
    const uint32_t to =
        kTransposed ? row + j * 8 * kDsRowBytes
                    : row + j / 8 * kDsBlockBytes + (((j % 8 + lane / 16) ^ (lane & 7)) << 4);
    store_matrices<kTransposed>(to, ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);
  }
}

#endif
