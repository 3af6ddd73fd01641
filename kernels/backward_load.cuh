// The backward kernel's loading warp.
#ifndef FA3_BACKWARD_LOAD_CUH
#define FA3_BACKWARD_LOAD_CUH

#include "backward_work.cuh"

// Fills the buffer `to`, which is free. `rows_left`: those from `row` on that are in the sequence;
// what follows is cleared. `extra_bytes` more will report to `full`.
template <int kTileRows>
__device__ __forceinline__ void load_tile(uint32_t base, uint32_t to, const fa3_tensor_map &map,
                                          uint32_t full, int row, int head, int batch,
                                          int rows_left, bool clear, uint32_t extra_bytes,
                                          uint32_t &landed, bool leader) {
  const bool overrun = clear && rows_left < kTileRows;
  const uint32_t report = overrun ? base + kLanded : full;
  if (leader) {
    mbarrier_arrive_expect(report, kTileRows * kHeadDim * 2 + (overrun ? 0 : extra_bytes));
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      tma_load_4d(to + c * kTileRows * kRowBytes, &map, report, c * kChunk, row, head, batch);
  }
  if (overrun) {
    __syncwarp();
    mbarrier_wait(base + kLanded, landed & 1);
    ++landed;
    clear_rows<kChunks, kTileRows, kRowBytes>(to, rows_left);
    if (leader) mbarrier_arrive_expect(full, extra_bytes);
  }
  __syncwarp();
}

__device__ __forceinline__ void load(const fa3_backward_params &p, uint32_t base) {
  const bool leader = elect_one();
  uint32_t use = 0, keys = 0, landed = 0;  // buffers filled so far
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int first = w.tile * kTileN;
    for (int m = w.start, left = w.blocks.end - w.blocks.begin; left > 0; m += w.step, --left) {
      for (int g = 0; g < w.heads; ++g, ++use) {
        // All that can be found out before the buffer is free.
        const int head = w.query_head + g, batch = w.sequence.query_batch;
        const int row = w.sequence.query_row + m * kTileM,
                  rows_left = w.sequence.mask.queries - m * kTileM;
        const float *rows = p.rows + ((int64_t)head * p.slots + w.sequence.slot + m) * 2 * kTileM;
        const uint32_t stage = ring_stage<kStages>(use), parity = ring_parity<kStages>(use) ^ 1;
        const uint32_t full = base + kQueryFull + 8 * stage;

        mbarrier_wait(base + kQueryEmpty + 8 * stage, parity);
        if (leader && use > 0)
          bulk_load(base + kRowsAt + stage * kRowsBytes, rows, kRowsBytes, full);
        load_tile<kTileM>(base, base + kQueryAt + stage * kQueryBytes, p.query, full, row, head,
                          batch, rows_left, p.clear_query, kRowsBytes, landed, leader);

        mbarrier_wait(base + kDoEmpty + 8 * stage, parity);
        load_tile<kTileM>(base, base + kDoAt + stage * kQueryBytes, p.grad_output,
                          base + kDoFull + 8 * stage, row, head, batch, rows_left, p.clear_query, 0,
                          landed, leader);

        if (g > 0 || m != w.start) continue;
        mbarrier_wait(base + kKeyEmpty, (keys & 1) ^ 1);
        load_tile<kTileN>(base, base + kKeyAt, p.key, base + kKeyFull, w.sequence.key_row + first,
                          w.head, w.sequence.key_batch, w.sequence.mask.keys - first, p.clear_key,
                          0, landed, leader);
        mbarrier_wait(base + kValueEmpty, (keys & 1) ^ 1);
        load_tile<kTileN>(base, base + kValueAt, p.value, base + kValueFull,
                          w.sequence.key_row + first, w.head, w.sequence.key_batch,
                          w.sequence.mask.keys - first, p.clear_key, 0, landed, leader);
        ++keys;
        if (use > 0) continue;
        // All so far was the caller's; this is made by the kernel before.
        wait_for_prior_grids();
        if (leader) bulk_load(base + kRowsAt, rows, kRowsBytes, full);
      }
    }
    finish_work(base, t);
    if (leader) mbarrier_arrive(base + kWorkWanted);
  }
}

#endif
