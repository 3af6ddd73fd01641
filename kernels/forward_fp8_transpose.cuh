// The FP8 forward kernel's warps that transpose V.
#ifndef FA3_FORWARD_FP8_TRANSPOSE_CUH
#define FA3_FORWARD_FP8_TRANSPOSE_CUH

#include "forward_fp8_work.cuh"
#include "transpose_chunk.cuh"

// Whether these warps have no registers for what they know, and find it out again and again.
constexpr bool kFew = kHeadDim > 128;

__device__ __forceinline__ const work &work_in_hand(uint32_t t) {
  return kFew ? work_again(t) : work_of(t);
}

__device__ __forceinline__ void transpose_chunk(uint32_t to, uint32_t from, int part, int keys) {
  const chunk_part p = part_of_chunk(to, from, part, kFew ? thread_again() : threadIdx.x);
  if (keys < kTileK) {
#pragma unroll 1
    for (int i = 0; i < kPartUnits; ++i) {
      uint32_t x[4];
      load_unit(p, i, x);
      clear_unit(i, keys, x);
      store_unit(p, i, x);
    }
    return;
  }
  // Loads run ahead of stores, as many as there are registers for.
  constexpr int kAhead = kWarpgroups == 3 ? 2 : 3;
  uint32_t x[kAhead][4];
#pragma unroll
  for (int i = 0; i < kPartUnits + kAhead - 1; ++i) {
    if (i < kPartUnits) load_unit(p, i, x[i % kAhead]);
    if (i >= kAhead - 1) store_unit(p, i - (kAhead - 1), x[(i - (kAhead - 1)) % kAhead]);
  }
}

__device__ __forceinline__ void transpose_values(const layout &m, int part) {
  // Of the ring of chunks. That of the tiles follows from it: to count both would take a register
  // that head dim 256 does not have.
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    if (work_in_hand(t).last) break;
    int left = (work_in_hand(t).tiles.end - work_in_hand(t).tiles.begin) * kCodeChunks;
#pragma unroll 1
    for (; left > 0; --left, ++use) {
      const uint32_t used = use / kCodeChunks, chunk = use % kCodeChunks;
      if (chunk == 0) ring_wait_empty(m.v_transposed, used);
      ring_wait_full(m.v, use);
      const int n = work_in_hand(t).tiles.begin + (left - 1) / kCodeChunks;
      transpose_chunk(ring_tile(m.v_transposed, used) + chunk * kCodes * kKeys, ring_tile(m.v, use),
                      part, work_in_hand(t).sequence.mask.keys - n * kTileK);
      __syncwarp();
      ring_release(m.v, use);
      if (chunk != kCodeChunks - 1) continue;
      fence_proxy_async();
      __syncwarp();
      barrier_arrive_warp(ring_full(m.v_transposed, used));
    }
    finish_work(m, t);
  }
}

#endif
