// The backward kernel's loading warp.
#ifndef FA3_BACKWARD_LOAD_CUH
#define FA3_BACKWARD_LOAD_CUH

#include "backward_work.cuh"

// Fills the buffer `to`, which is free. `rows_left`: those from `row` on that are in the sequence;
// what follows is cleared. `extra_bytes` more will report to `full`.
template <int kTileRows>
__device__ __forceinline__ void load_tile(const layout &m, uint32_t to, const fa3_tensor_map &map,
                                          barrier full, int row, int head, int batch, int rows_left,
                                          bool clear, uint32_t extra_bytes, uint32_t &landed,
                                          bool leader) {
  const bool overrun = clear && rows_left < kTileRows;
  const barrier report = overrun ? m.landed : full;
  if (leader) {
    barrier_expect(report, kTileRows * kHeadDim * 2 + (overrun ? 0 : extra_bytes));
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      tma_load_4d(to + c * kTileRows * kRowBytes, &map, report.address, c * kChunk, row, head,
                  batch);
  }
  if (overrun) {
    __syncwarp();
    barrier_wait(m.landed, landed);
    clear_rows<kChunks, kTileRows, kRowBytes>(to, rows_left);
    // Every lane says so: gradients pass through the buffer of values later, and racecheck goes by
    // the thread that arrives.
    barrier_arrive(m.cleared);
    barrier_wait(m.cleared, landed);
    ++landed;
    if (leader) barrier_expect(full, extra_bytes);
  }
  __syncwarp();
}

// The keys of a tile, or the values.
__device__ __forceinline__ void load_keys(const fa3_backward_params &p, const layout &m,
                                          const work &w, const ring<kKeyStages, kKeyBytes> &to,
                                          const fa3_tensor_map &map, uint32_t tiles,
                                          uint32_t &landed, bool leader) {
  const int first = w.tile * kTileK;
  ring_claim(to, tiles);
  load_tile<kTileK>(m, ring_tile(to, tiles), map, ring_full(to, tiles), w.sequence.key_row + first,
                    w.head, w.sequence.key_batch, w.sequence.mask.keys - first, p.clear_key, 0,
                    landed, leader);
}

// A tile's keys and values, to the L2 cache: their buffers are in use until the tile before it has
// stored its gradients.
__device__ __forceinline__ void prefetch_keys(const fa3_backward_params &p, const work &w) {
  const int row = w.sequence.key_row + w.tile * kTileK;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    tma_prefetch_4d(&p.key, c * kChunk, row, w.head, w.sequence.key_batch);
    tma_prefetch_4d(&p.value, c * kChunk, row, w.head, w.sequence.key_batch);
  }
}

__device__ __forceinline__ void load(const fa3_backward_params &p, const layout &m) {
  const bool leader = elect_one();
  uint32_t use = 0, tiles = 0, landed = 0;  // buffers filled so far
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    if (kNoPause && w.steps > 0) {
      load_keys(p, m, w, m.k, p.key, tiles, landed, leader);
      load_keys(p, m, w, m.v, p.value, tiles, landed, leader);
    }
    if (!kNoPause && !kStagesApart && t > 0 && w.steps > 0 && leader) prefetch_keys(p, w);
    query_step step = first_step(w);
    for (int left = w.steps; left > 0; --left, ++use, next_step<kByHead>(w, step)) {
      // All that can be found out before the buffer is free.
      const int head = step.head, batch = w.sequence.query_batch;
      const int row = w.sequence.query_row + step.block * kTileQ,
                rows_left = w.sequence.mask.queries - step.block * kTileQ;
      const float *rows =
          p.rows + ((int64_t)head * p.slots + w.slot + step.block) * (kRowsBytes / 4);

      // The first step's may be large: they are not there yet.
      const bool large = kLoaderTells && (use == 0 || rows[2 * kTileQ] != 0.0f);
      ring_claim(m.q, use);
      if (leader) {
#pragma unroll
        for (int i = 0; kLoaderTells && i < kWarpgroups; ++i)
          whole_of(use)[i] = large ? fa3_range{0, 0} : w.whole[i];
        if (use > 0) bulk_load(rows_of_step(m, use), rows, kRowsBytes, ring_full(m.q, use).address);
      }
      load_tile<kTileQ>(m, ring_tile(m.q, use), p.query, ring_full(m.q, use), row, head, batch,
                        rows_left, p.clear_query, kRowsBytes, landed, leader);

      ring_claim(m.d_o, use);
      load_tile<kTileQ>(m, ring_tile(m.d_o, use), p.grad_output, ring_full(m.d_o, use), row, head,
                        batch, rows_left, p.clear_query, 0, landed, leader);

      if (left < w.steps) continue;
      if (!kNoPause) {
        load_keys(p, m, w, m.k, p.key, tiles, landed, leader);
        load_keys(p, m, w, m.v, p.value, tiles, landed, leader);
      }
      ++tiles;
      if (use > 0) continue;
      // All so far was the caller's; this is made by the kernel before.
      wait_for_prior_grids();
      if (leader) bulk_load(m.rows, rows, kRowsBytes, ring_full(m.q, 0).address);
    }
    finish_work(m, t);
    if (leader) barrier_arrive(m.work_wanted);
  }
}

#endif
