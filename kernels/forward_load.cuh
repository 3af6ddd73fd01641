// The forward kernel's loading warps.
#ifndef FA3_FORWARD_LOAD_CUH
#define FA3_FORWARD_LOAD_CUH

#include "forward_work.cuh"

#include "forward_queries.cuh"

template <bool kValues>
__device__ __forceinline__ auto key_ring(const layout &m) {
  if constexpr (kValues)
    return m.v;
  else
    return m.k;
}

template <int kChunksOfTile>
__device__ __forceinline__ void load_tile(uint32_t to, const fa3_tensor_map &map, barrier full,
                                          int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    tma_load_4d(to + c * kTileK * kRowBytes, &map, full.address, c * kChunk, row, head, batch);
}

// The scales of a tile's keys and values.
__device__ __forceinline__ void load_scales(const fa3_forward_params &params, const layout &m,
                                            int batch, int head, int tile, uint32_t use,
                                            barrier full) {
  const int rows = params.unpacked.rows;
  const float *const from = params.unpacked.of_rows +
                            (int64_t)(batch * params.unpacked.heads_k + head) * 2 * rows +
                            tile * kTileK;
  const uint32_t to = m.scales + use % kScaleTiles * kScalesOfTile;
  bulk_load(to, from, kScaleBytes, full.address);
  bulk_load(to + kScaleBytes, from + rows, kScaleBytes, full.address);
}

// Tiles of V run one behind those of K, as the consumers use them.
__device__ __forceinline__ void load_keys_and_values(const fa3_forward_params &params,
                                                     const layout &m) {
  const bool leader = elect_one();
  uint32_t use_k = 0, use_v = 0, landed = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int head = w.key_head;
    const int keys = w.sequence.mask.keys, first_row = w.sequence.key_row;
    const int batch = w.sequence.key_batch, begin = w.tiles.begin, end = w.tiles.end;
    finish_work(m, t);
    for (int n = end - 1; n >= begin - 1; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (n == min(begin, end - 1) && params.next_tile != nullptr && leader)
        barrier_arrive(m.work_wanted);
      if (n >= begin) {
        const barrier full = ring_full(m.k, use_k);
        ring_claim(m.k, use_k);
        if (leader) {
          barrier_expect(full, kKBytes + kScalesOfTile);
          load_tile<kChunks>(ring_tile(m.k, use_k), params.key, full, first_row + n * kTileK, head,
                             batch);
          if (kRowScales) load_scales(params, m, batch, head, n, use_k, full);
        }
        ++use_k;
      }
      if (n + 1 < end) {
        const barrier full = ring_full(m.v, use_v);
        const uint32_t to = ring_tile(m.v, use_v);
        const int row = (n + 1) * kTileK;
        const bool overrun = params.clear_value && row + kTileK > keys;
        ring_claim(m.v, use_v);
        if (leader) {
          const barrier landing = overrun ? m.v_landed : full;
          barrier_expect(landing, kVBytes);
          load_tile<kChunksV>(to, params.value, landing, first_row + row, head, batch);
        }
        if (overrun) {
          __syncwarp();
          barrier_wait(m.v_landed, landed++);
          clear_rows<kChunksV, kTileK, kRowBytes>(to, keys - row);
          if (leader) barrier_arrive(full);
        }
        ++use_v;
      }
      __syncwarp();
    }
  }
}

// Of tile t, a buffer for each consumer.
__device__ __forceinline__ void load_queries_of(const fa3_forward_params &params, const layout &m,
                                                const work &w, uint32_t t, bool leader) {
  if (t == 0) clear_spare_queries<kChunks, kRowBytes>(params, m);
  const int step = params.queries_per_warpgroup, row = w.sequence.query_row + w.first;
  const int head = w.head, batch = w.sequence.query_batch;
  for (int i = 0; i < kWarpgroups; ++i) {
    const auto q = ring_beside(m.q, i);
    const barrier full = ring_full(q, t);
    ring_claim(q, t);
    if (leader) {
      barrier_expect(full, step * params.tile_heads * kHeadDim * 2);
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        tma_load_5d(ring_tile(q, t) + c * kRows * kRowBytes, &params.query, full.address,
                    c * kChunk, 0, row + i * step, head, batch);
    }
    __syncwarp();
  }
}

__device__ __forceinline__ void load_queries(const fa3_forward_params &params, const layout &m) {
  const bool leader = elect_one();
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    load_queries_of(params, m, w, t, leader);
    finish_work(m, t);
  }
}

#endif
