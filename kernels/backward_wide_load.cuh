// The wide backward kernel's loading warps. Tiles of queries and of dO go to both blocks
// of the cluster at once: each block fetches every other chunk of columns for both.
#ifndef FA3_BACKWARD_WIDE_LOAD_CUH
#define FA3_BACKWARD_WIDE_LOAD_CUH

#include "backward_wide_work.cuh"

template <int kChunksOfTile>
__device__ __forceinline__ void load_tile(uint32_t to, const fa3_tensor_map *map, uint32_t full,
                                          int column, int row, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    tma_load_4d(to + c * kChunkBytes, map, full, column + c * kChunk, row, head, batch);
}

// This block's share of a tile for both. `turn` evens out an odd number of chunks.
template <int kChunksOfTile>
__device__ __forceinline__ void load_share(uint32_t to, const fa3_tensor_map *map, uint32_t full,
                                           int row, int head, int batch, uint32_t turn) {
#pragma unroll
  for (int c = 0; c < kChunksOfTile; ++c)
    if (((c ^ turn) & 1) == 0)
      tma_load_both_4d(to + c * kChunkBytes, map, full, c * kChunk, row, head, batch);
}

// Keys, and for every query head of the group tiles of queries with their statistics.
__device__ __forceinline__ void load_queries(const fa3_backward_params &p, uint32_t base) {
  const bool leader = elect_one();
  const int rank = cluster_rank();
  constexpr uint32_t kKeyBytes = (kChunks + kSplitChunks) * kChunkBytes;
  uint32_t query = 0, key = 0;  // buffers filled so far
  uint32_t query_landed = 0, key_landed = 0;
  for (uint32_t t = 0;; ++t) {
    forget(base);
    const work &w = wait_for_work(base, t);
    if (w.last) break;
    bool keys_wanted = true;
    int head = w.query_head, i = w.blocks.end - 1;
    for (int left = w.steps; left > 0; --left) {
      forget(base);
      const uint32_t stage = ring_stage<kQueryStages>(query);
      const uint32_t full = base + kQueryFull + 8 * stage;
      const uint32_t to = base + kQueryAt + stage * kChunks * kChunkBytes;
      // All that can be found out before the buffer is free.
      const int row = w.sequence.query_row + i * kRows, batch = w.sequence.query_batch;
      const float *rows =
          p.rows + ((int64_t)head * p.slots + w.sequence.slot + i) * (kRowsBytes / 4);
      const bool overrun = p.clear_query && (i + 1) * kRows > w.sequence.mask.queries;
      mbarrier_wait(base + kQueryEmpty + 8 * stage, ring_parity<kQueryStages>(query) ^ 1);
      if (leader) {
        const uint32_t report = overrun ? base + kQueryLanded : full;
        mbarrier_arrive_expect(report, kChunks * kChunkBytes + kRowsBytes);
        load_share<kChunks>(to, &p.query, report, row, head, batch, query ^ rank);
        bulk_load(base + kRowsAt + stage * kRowsBytes, rows, kRowsBytes, report);
      }
      if (overrun) {
        __syncwarp();
        mbarrier_wait(base + kQueryLanded, query_landed++ & 1);
        clear_rows<kChunks, kRows, kRowBytes>(to, max(w.sequence.mask.queries - i * kRows, 0));
        if (leader) mbarrier_arrive(full);
      }
      ++query;
      __syncwarp();
      if (keys_wanted) {
        keys_wanted = false;
        const int first = w.first, peer = first ^ kKeys, keys = w.sequence.mask.keys;
        const bool overrun = p.clear_key && max(first, peer) + kKeys > keys;
        const uint32_t report = base + (overrun ? kKeyLanded : kKeyFull);
        const int column = rank == 0 ? 0 : kSplit;
        mbarrier_wait(base + kKeyEmpty, (key & 1) ^ 1);
        if (leader) {
          const int chunks = rank == 0 ? kSplitChunks : kChunks - kSplitChunks;
          mbarrier_arrive_expect(report, kKeyBytes - (kSplitChunks - chunks) * kChunkBytes);
          load_tile<kChunks>(base + kKeyAt, &p.key, report, 0, w.sequence.key_row + first, w.head,
                             w.sequence.key_batch);
          for (int c = 0; c < chunks; ++c)
            tma_load_4d(base + kPeerKeyAt + c * kChunkBytes, &p.key, report, column + c * kChunk,
                        w.sequence.key_row + peer, w.head, w.sequence.key_batch);
        }
        if (overrun) {
          __syncwarp();
          mbarrier_wait(base + kKeyLanded, key_landed++ & 1);
          clear_rows<kChunks, kKeys, kRowBytes>(base + kKeyAt, max(keys - first, 0));
          clear_rows<kSplitChunks, kKeys, kRowBytes>(base + kPeerKeyAt, max(keys - peer, 0));
          if (leader) mbarrier_arrive(base + kKeyFull);
        }
        ++key;
        __syncwarp();
      }
      if (--i < w.blocks.begin) {
        i = w.blocks.end - 1;
        ++head;
      }
    }
    finish_work(base, t);
    if (leader) mbarrier_arrive(base + kWorkWanted);
    __syncwarp();
  }
}

// Values, and the tiles of dO that go with the queries.
__device__ __forceinline__ void load_do(const fa3_backward_params &p, uint32_t base) {
  const bool leader = elect_one();
  const int rank = cluster_rank();
  uint32_t grad = 0, value = 0, landed = 0;
  for (uint32_t t = 0;; ++t) {
    forget(base);
    const work &w = wait_for_work(base, t);
    if (w.last) break;
    if (w.steps > 0) {
      mbarrier_wait(base + kValueEmpty, (value & 1) ^ 1);
      if (leader) {
        mbarrier_arrive_expect(base + kValueFull, kChunksV * kChunkBytes);
        load_tile<kChunksV>(base + kValueAt, &p.value, base + kValueFull, 0,
                            w.sequence.key_row + w.first, w.head, w.sequence.key_batch);
      }
      ++value;
      __syncwarp();
    }
    int head = w.query_head, i = w.blocks.end - 1;
    for (int left = w.steps; left > 0; --left) {
      forget(base);
      const uint32_t stage = ring_stage<kDoStages>(grad);
      const uint32_t full = base + kDoFull + 8 * stage;
      const uint32_t to = base + kDoAt + stage * kChunksV * kChunkBytes;
      const int row = w.sequence.query_row + i * kRows, batch = w.sequence.query_batch;
      const bool overrun = p.clear_query && (i + 1) * kRows > w.sequence.mask.queries;
      mbarrier_wait(base + kDoEmpty + 8 * stage, ring_parity<kDoStages>(grad) ^ 1);
      if (leader) {
        const uint32_t report = overrun ? base + kDoLanded : full;
        mbarrier_arrive_expect(report, kChunksV * kChunkBytes);
        load_share<kChunksV>(to, &p.grad_output, report, row, head, batch, grad ^ rank);
      }
      if (overrun) {
        __syncwarp();
        mbarrier_wait(base + kDoLanded, landed++ & 1);
        clear_rows<kChunksV, kRows, kRowBytes>(to, max(w.sequence.mask.queries - i * kRows, 0));
        if (leader) mbarrier_arrive(full);
      }
      ++grad;
      __syncwarp();
      if (--i < w.blocks.begin) {
        i = w.blocks.end - 1;
        ++head;
      }
    }
    finish_work(base, t);
  }
}

#endif
