// The forward kernel's loading warps.
#ifndef FA3_FORWARD_LOAD_CUH
#define FA3_FORWARD_LOAD_CUH

#include "forward_work.cuh"

template <int kChunksOfTile>
__device__ __forceinline__ void load_tile(uint32_t to, const fa3_tensor_map *map, barrier full,
                                          int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    tma_load_4d(to + c * kTileN * kRowBytes, map, full.address, c * kChunk, row, head, batch);
}

__device__ __forceinline__ void load_keys_and_values(const fa3_forward_params &p, const layout &m) {
  const bool leader = elect_one();
  uint32_t key = 0, value = 0, landed = 0;  // buffers filled so far
  for (uint32_t t = 0;; ++t) {
    wait_for_work(m, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int head = p.packed == 1 ? w.head / p.queries_per_key : w.head;
    const int keys = w.mask.keys, key_row = w.key_row, batch = w.key_batch;
    const int begin = w.tiles.begin, end = w.tiles.end;
    finish_work(m, t);
    // Values run one tile behind the keys, as the consumers use them.
    for (int n = end - 1; n >= begin - 1; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (n == min(begin, end - 1) && p.next_tile != nullptr && leader)
        barrier_arrive(m.work_wanted);
      if (n >= begin) {
        ring_wait_empty(m.key, key);
        if (leader) {
          const barrier full = ring_full(m.key, key);
          barrier_expect(full, kKeyBytes);
          load_tile<kChunks>(ring_tile(m.key, key), &p.key, full, key_row + n * kTileN, head,
                             batch);
        }
        ++key;
      }
      if (n + 1 < end) {
        const barrier full = ring_full(m.value, value);
        const uint32_t to = ring_tile(m.value, value);
        const int row = (n + 1) * kTileN;
        const bool overrun = p.clear_value && row + kTileN > keys;
        ring_wait_empty(m.value, value);
        if (leader) {
          const barrier report = overrun ? m.value_landed : full;
          barrier_expect(report, kValueBytes);
          load_tile<kChunksV>(to, &p.value, report, key_row + row, head, batch);
        }
        if (overrun) {
          __syncwarp();
          barrier_wait(m.value_landed, landed++);
          clear_rows<kChunksV, kTileN, kRowBytes>(to, keys - row);
          if (leader) barrier_arrive(full);
        }
        ++value;
      }
      __syncwarp();
    }
  }
}

__device__ __forceinline__ void load_queries(const fa3_forward_params &p, const layout &m) {
  const bool leader = elect_one();
  const int step = p.queries_per_warpgroup;
  for (uint32_t t = 0;; ++t) {
    wait_for_work(m, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int row = w.query_row + w.first, head = w.head, batch = w.batch;
    finish_work(m, t);
    for (int g = 0; g < kWarpgroups; ++g) {
      const auto query = ring_beside(m.query, g);
      const barrier full = ring_full(query, t);
      ring_wait_empty(query, t);
      if (leader) {
        barrier_expect(full, step * p.packed * kHeadDim * 2);
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          tma_load_5d(ring_tile(query, t) + c * kRows * kRowBytes, &p.query, full.address,
                      c * kChunk, 0, row + g * step, head, batch);
      }
      __syncwarp();
    }
  }
}

#endif
