// The wide backward kernel's loading warps. Tiles of queries and of dO go to both blocks
// of the cluster at once: each block fetches every other chunk of columns for both.
#ifndef FA3_BACKWARD_WIDE_LOAD_CUH
#define FA3_BACKWARD_WIDE_LOAD_CUH

#include "backward_wide_work.cuh"

template <int kChunksOfTile>
__device__ __forceinline__ void load_tile(uint32_t to, const fa3_tensor_map *map, barrier full,
                                          int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    tma_load_4d(to + c * kChunkBytes, map, full.address, c * kChunk, row, head, batch);
}

// This block's share of a tile for both. `turn` evens out an odd number of chunks.
template <int kChunksOfTile>
__device__ __forceinline__ void load_share(uint32_t to, const fa3_tensor_map *map, barrier full,
                                           int row, int head, int batch, uint32_t turn) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    if (((c ^ turn) & 1) == 0)
      tma_load_both_4d(to + c * kChunkBytes, map, full.address, c * kChunk, row, head, batch);
}

// This block's keys, and those of the other in the columns of dQ that are ours.
__device__ __forceinline__ void load_keys(const fa3_backward_params &p, const layout &m,
                                          const work &w, uint32_t use, uint32_t &landed,
                                          bool leader) {
  const int first = w.first, peer = first ^ kKeys, keys = w.sequence.mask.keys;
  const bool overrun = p.clear_key && max(first, peer) + kKeys > keys;
  const barrier report = overrun ? m.k_landed : ring_full(m.k, use);
  const int rank = cluster_rank(), column = rank == 0 ? 0 : kSplit;
  ring_claim(m.k, use);
  if (leader) {
    const int chunks = rank == 0 ? kSplitChunks : kChunks - kSplitChunks;
    barrier_expect(report, (kChunks + chunks) * kChunkBytes);
    load_tile<kChunks>(m.k.data, &p.key, report, w.sequence.key_row + first, w.head,
                       w.sequence.key_batch);
    for (int c = 0; c < chunks; ++c)
      tma_load_4d(m.k_of_peer + c * kChunkBytes, &p.key, report.address, column + c * kChunk,
                  w.sequence.key_row + peer, w.head, w.sequence.key_batch);
  }
  if (overrun) {
    __syncwarp();
    barrier_wait(m.k_landed, landed++);
    clear_rows<kChunks, kKeys, kRowBytes>(m.k.data, max(keys - first, 0));
    clear_rows<kSplitChunks, kKeys, kRowBytes>(m.k_of_peer, max(keys - peer, 0));
    if (leader) barrier_arrive(ring_full(m.k, use));
  }
  __syncwarp();
}

// Keys, and for every query head of the group tiles of Q with their rows' statistics.
__device__ __forceinline__ void load_queries(const fa3_backward_params &p, uint32_t base) {
  const bool leader = elect_one();
  const int rank = cluster_rank();
  uint32_t use = 0, keys_use = 0;        // buffers filled so far
  uint32_t landed = 0, keys_landed = 0;  // the phase of each buffer, a bit; tiles of keys cleared
  for (uint32_t t = 0;; ++t) {
    forget(base);
    const work &w = wait_for_work(lay_out(base), t);
    if (w.last) break;
    query_step step = first_step(w);
    for (int left = w.steps; left > 0; --left, ++use) {
      forget(base);
      const layout m = lay_out(base);
      const barrier full = ring_full(m.q, use);
      const uint32_t to = ring_tile(m.q, use);
      // All that can be found out before the buffer is free.
      const int row = w.sequence.query_row + step.block * kTileQ, batch = w.sequence.query_batch;
      const int rows_left = w.sequence.mask.queries - step.block * kTileQ;
      const float *rows =
          p.rows + ((int64_t)step.head * p.slots + w.slot + step.block) * (kRowsBytes / 4);
      const bool overrun = p.clear_query && rows_left < kTileQ;
      const uint32_t buffer = use % kQStages;
      const barrier q_landed = landed_in(m.q_landed, buffer);
      ring_claim(m.q, use);
      if (leader) {
        const barrier report = overrun ? q_landed : full;
        barrier_expect(report, kQBytes + kRowsBytes);
        load_share<kChunks>(to, &p.query, report, row, step.head, batch, use ^ rank);
        bulk_load(rows_of_step(m, use), rows, kRowsBytes, report.address);
      }
      if (overrun) {
        __syncwarp();
        barrier_wait(q_landed, landed >> buffer);
        landed ^= 1u << buffer;
        clear_rows<kChunks, kTileQ, kRowBytes>(to, max(rows_left, 0));
        if (leader) barrier_arrive(full);
      }
      __syncwarp();
      if (left == w.steps) load_keys(p, m, w, keys_use++, keys_landed, leader);
      next_step<kByHead>(w, step);
    }
    finish_work(lay_out(base), t);
    if (leader) barrier_arrive(lay_out(base).work_wanted);
    __syncwarp();
  }
}

// Values, and the tiles of dO that go with those of Q.
__device__ __forceinline__ void load_do(const fa3_backward_params &p, uint32_t base) {
  const bool leader = elect_one();
  const int rank = cluster_rank();
  uint32_t use = 0, values_use = 0, landed = 0;
  for (uint32_t t = 0;; ++t) {
    forget(base);
    const work &w = wait_for_work(lay_out(base), t);
    if (w.last) break;
    if (w.steps > 0) {
      const layout m = lay_out(base);
      ring_claim(m.v, values_use);
      if (leader) {
        barrier_expect(ring_full(m.v, values_use), kDoBytes);
        load_tile<kChunksV>(m.v.data, &p.value, ring_full(m.v, values_use),
                            w.sequence.key_row + w.first, w.head, w.sequence.key_batch);
      }
      ++values_use;
      __syncwarp();
    }
    query_step step = first_step(w);
    for (int left = w.steps; left > 0; --left, ++use) {
      forget(base);
      const layout m = lay_out(base);
      const barrier full = ring_full(m.d_o, use);
      const uint32_t to = ring_tile(m.d_o, use);
      const int row = w.sequence.query_row + step.block * kTileQ, batch = w.sequence.query_batch;
      const int rows_left = w.sequence.mask.queries - step.block * kTileQ;
      const bool overrun = p.clear_query && rows_left < kTileQ;
      const uint32_t buffer = use % kDoStages;
      const barrier do_landed = landed_in(m.do_landed, buffer);
      ring_claim(m.d_o, use);
      if (leader) {
        const barrier report = overrun ? do_landed : full;
        barrier_expect(report, kDoBytes);
        load_share<kChunksV>(to, &p.grad_output, report, row, step.head, batch, use ^ rank);
      }
      if (overrun) {
        __syncwarp();
        barrier_wait(do_landed, landed >> buffer);
        landed ^= 1u << buffer;
        clear_rows<kChunksV, kTileQ, kRowBytes>(to, max(rows_left, 0));
        if (leader) barrier_arrive(full);
      }
      __syncwarp();
      next_step<kByHead>(w, step);
    }
    finish_work(lay_out(base), t);
  }
}

#endif
