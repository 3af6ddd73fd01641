// The FP8 forward kernel's warps that transpose V, where a tile of it is one chunk: head dims up to
// 128 (forward_fp8_transpose_chunks.cuh has others).
#ifndef FA3_FORWARD_FP8_TRANSPOSE_CUH
#define FA3_FORWARD_FP8_TRANSPOSE_CUH

#include "forward_fp8_work.cuh"
#include "transpose_chunk.cuh"

static_assert(kCodeChunks == 1, "a tile of V is a chunk");

__device__ __forceinline__ void transpose_chunk(uint32_t to, uint32_t from, int part, int keys) {
  const chunk_part p = part_of_chunk(to, from, part, threadIdx.x);
  if (keys < kTileK) {
    if constexpr (kUnitSteps > 3) {
#pragma unroll 1
      for (int step = 0; step < kUnitSteps; ++step) transpose_end_step(p, step, keys);
    } else {  // too few registers for that
#pragma unroll 1
      for (int i = 0; i < kPartUnits; ++i) {
        uint32_t x[4];
        load_unit(p, i, x);
        clear_unit(i, keys, x);
        store_unit(p, i, x);
      }
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
  uint32_t used = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    if (work_of(t).last) break;
    int left = work_of(t).tiles.end - work_of(t).tiles.begin;
#pragma unroll 1
    for (; left > 0; --left, ++used) {
      ring_wait_empty(m.v_transposed, used);
      ring_wait_full(m.v, used);
      const int n = work_of(t).tiles.begin + left - 1;
      transpose_chunk(ring_tile(m.v_transposed, used), ring_tile(m.v, used), part,
                      work_of(t).sequence.mask.keys - n * kTileK);
      __syncwarp();
      ring_release(m.v, used);
      fence_proxy_async();
      __syncwarp();
      barrier_arrive_warp(ring_full(m.v_transposed, used));
    }
    finish_work(m, t);
  }
}

#endif
