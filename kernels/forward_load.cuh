// The forward kernel's loading warps.
#ifndef FA3_FORWARD_LOAD_CUH
#define FA3_FORWARD_LOAD_CUH

#include "forward_work.cuh"

template <int kChunksOfTile>
__device__ __forceinline__ void load_tile(uint32_t to, const fa3_tensor_map *map, uint32_t full,
                                          int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    tma_load_4d(to + c * kTileN * kRowBytes, map, full, c * kChunk, row, head, batch);
}

__device__ __forceinline__ void load_keys_and_values(const fa3_forward_params &p, uint32_t base) {
  const bool leader = elect_one();
  uint32_t key = 0, value = 0, landed = 0;  // buffers filled so far
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int head = p.packed == 1 ? w.head / p.queries_per_key : w.head;
    const int keys = w.mask.keys, key_row = w.key_row, batch = w.key_batch;
    const int begin = w.tiles.begin, end = w.tiles.end;
    finish_work(base, t);
    // Values run one tile behind the keys, as the consumers use them.
    for (int n = end - 1; n >= begin - 1; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (n == min(begin, end - 1) && p.next_tile != nullptr && leader)
        mbarrier_arrive(base + kWorkWanted);
      if (n >= begin) {
        const uint32_t stage = ring_stage<kStages>(key);
        const uint32_t full = base + kKeyFull + 8 * stage;
        mbarrier_wait(base + kKeyEmpty + 8 * stage, ring_parity<kStages>(key) ^ 1);
        if (leader) {
          mbarrier_arrive_expect(full, kKeyBytes);
          load_tile<kChunks>(base + kKeyAt + stage * kKeyBytes, &p.key, full, key_row + n * kTileN,
                             head, batch);
        }
        ++key;
      }
      if (n + 1 < end) {
        const uint32_t stage = ring_stage<kStages>(value);
        const uint32_t full = base + kValueFull + 8 * stage;
        const uint32_t to = base + kValueAt + stage * kValueBytes;
        const int row = (n + 1) * kTileN;
        const bool overrun = p.clear_value && row + kTileN > keys;
        mbarrier_wait(base + kValueEmpty + 8 * stage, ring_parity<kStages>(value) ^ 1);
        if (leader) {
          const uint32_t report = overrun ? base + kValueLanded : full;
          mbarrier_arrive_expect(report, kValueBytes);
          load_tile<kChunksV>(to, &p.value, report, key_row + row, head, batch);
        }
        if (overrun) {
          __syncwarp();
          mbarrier_wait(base + kValueLanded, landed & 1);
          ++landed;
          clear_rows<kChunksV, kTileN, kRowBytes>(to, keys - row);
          if (leader) mbarrier_arrive(full);
        }
        ++value;
      }
      __syncwarp();
    }
  }
}

__device__ __forceinline__ void load_queries(const fa3_forward_params &p, uint32_t base) {
  const bool leader = elect_one();
  const int step = p.queries_per_warpgroup;
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int row = w.query_row + w.first, head = w.head, batch = w.batch;
    finish_work(base, t);
    for (int g = 0; g < kWarpgroups; ++g) {
      const int buffer = ring_stage<kQueryStages>(t) * kWarpgroups + g;
      const uint32_t full = base + kQueryFull + 8 * buffer;
      mbarrier_wait(base + kQueryEmpty + 8 * buffer, ring_parity<kQueryStages>(t) ^ 1);
      if (leader) {
        mbarrier_arrive_expect(full, step * p.packed * kHeadDim * 2);
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
          tma_load_5d(base + kQueryAt + buffer * kQueryBytes + c * kRows * kRowBytes, &p.query,
                      full, c * kChunk, 0, row + g * step, head, batch);
      }
      __syncwarp();
    }
  }
}

#endif
