// A block's end in the decode kernels: the results of its warps, then those of a cluster's blocks,
// become one and leave.
#ifndef FA3_DECODE_MERGE_CUH
#define FA3_DECODE_MERGE_CUH

#include "cluster.cuh"
#include "decode_layout.cuh"
#include "decode_softmax.cuh"
#include "decode_store.cuh"
#include "mbarrier.cuh"
#include "registers.cuh"

__device__ __forceinline__ deal *deal_of_block(void) {
  return (deal *)(shared + kDealAt);
}

// Of the warps that attend: others may append meanwhile, or have done so (decode_append.cuh).
__device__ __forceinline__ void sync_attending(void) {
  named_barrier_sync(1, kThreads);
}

// The lane's columns of row number r of its two of 8t to 8t + 7, times `factor`, go to their places
// in a row of floats. Each kernel has its own: columns are dealt out as its products take them.
__device__ __forceinline__ void store_columns(const attention &a, int t, int r, float factor,
                                              float *row);

// The warps' results become the block's: its output (times the sum) is in the first warp's place,
// its rows' maxima and sums at kResultAt.
__device__ __forceinline__ void merge_warps(const work &w, attention &a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  float *const tops = (float *)(shared + kTopAt), *const sums = (float *)(shared + kSumAt);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    a.sum[t] += __shfl_xor_sync(0xffffffff, a.sum[t], 1);
    a.sum[t] += __shfl_xor_sync(0xffffffff, a.sum[t], 2);
    if ((lane & 3) == 0) {
      tops[warp * kRows + lane / 4 + 8 * t] = a.top[t];
      sums[warp * kRows + lane / 4 + 8 * t] = a.sum[t];
    }
  }
  sync_attending();  // and nobody uses a ring any more
  float *const output = (float *)(shared + warp * kWarpBytes);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int row = lane / 4 + 8 * t;
    float top = tops[row], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) top = max_nan(top, tops[i * kRows + row]);
#pragma unroll
    for (int i = 0; i < kWarps; ++i)
      sum += sums[i * kRows + row] * exp2_unit(exponent_of(tops[i * kRows + row] - top));
    if (warp == 0 && (lane & 3) == 0) {
      const int of_block = row_of_tile(w, t, lane / 4);
      float *const result = (float *)(shared + kResultAt) + 2 * of_block;
      if (kHeads == 1 || of_block < kRows) {
        result[0] = top;
        result[1] = sum;
      }
    }
    const float factor =
        exp2_unit(exponent_of(a.top[t] - top) + (kScaledValues ? a.unit[t] : 0.0f));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int output_row = row_of_tile(w, t, 2 * (lane & 3) + r);
      const float of_row = of_output_row(factor, r);
      if (output_row < w.rows) store_columns(a, t, r, of_row, output + output_row * kPitch);
    }
  }
  sync_attending();
}

// Four neighbouring columns of a row.
__device__ __forceinline__ float4 sum_of_warps(int row, int column) {
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float4 y = *(const float4 *)(shared + i * kWarpBytes + (row * kPitch + column) * 4);
    x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
  }
  return x;
}

// Before others send: the barrier that counts what will come.
__device__ __forceinline__ void expect_results(const work &w, uint32_t base) {
  mbarrier_init(base + kReceived, 1);
  mbarrier_init_fence();
  const int first = w.rank * w.share;
  const int mine = max(min(w.share, w.rows * kQuads - first), 0);
  mbarrier_arrive_expect(base + kReceived, w.active * (mine * 16 + w.rows * 8));
}

// Each block of the cluster gets its part of this block's result.
__device__ __forceinline__ void send_results(const work &w, uint32_t base) {
#pragma unroll 1
  for (int i = threadIdx.x; i < w.rows * kQuads; i += kThreads) {
    const int to = owner_of(w, i);
    cluster_store(cluster_map(base + kReceivedAt + (w.rank * w.share + i - to * w.share) * 16, to),
                  sum_of_warps(i / kQuads, i % kQuads * 4), cluster_map(base + kReceived, to));
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < w.active * kRows; i += kThreads) {
    const int to = i / kRows, row = i % kRows;
    if (row < w.rows)
      cluster_store(cluster_map(base + kReceivedResultsAt + (w.rank * kRows + row) * 8, to),
                    *(const float2 *)(shared + kResultAt + row * 8),
                    cluster_map(base + kReceived, to));
  }
}

// This block's part of the cluster's results becomes one, and leaves.
__device__ __forceinline__ void store_results(const fa3_decode_params &p, const work &w) {
  const int first = w.rank * w.share, end = min(w.rows * kQuads, first + w.share);
#pragma unroll 1
  for (int i = first + threadIdx.x; i < end; i += kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    const float2 *results = (const float2 *)(shared + kResultAt) + row;
    float2 total = results[0];
    float4 x;
    if (w.active == 1) {
      x = sum_of_warps(row, column);
    } else {
      const float4 *const quads = (const float4 *)(shared + kReceivedAt) + i - first;
      results = (const float2 *)(shared + kReceivedResultsAt) + row;
      float top = FA3_NO_REFERENCE;
#pragma unroll 4
      for (int b = 0; b < w.active; ++b) top = max_nan(top, results[b * kRows].x);
      total = make_float2(top, 0.0f);
      x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int b = 0; b < w.active; ++b) {
        const float4 y = quads[b * w.share];
        const float factor = exp2_unit(exponent_of(results[b * kRows].x - top));
        total.y += results[b * kRows].y * factor;
        x.x += y.x * factor, x.y += y.y * factor, x.z += y.z * factor, x.w += y.w * factor;
      }
    }
    store_result(p, w, row, column, x, total.x, total.y);
  }
}

// Before a block attends: what it does may be left in shared memory, for its end or for all. Blocks
// of a cluster must be there when results are sent; one that appends says so when it has its
// queries.
__device__ __forceinline__ void begin_block(const fa3_decode_params &p, const work &w,
                                            uint32_t base, bool appends) {
  if (kSharedWork && threadIdx.x == 0) *(work *)(shared + kWorkAt) = w;
  if (kKeptWork) sync_attending();
  if (p.cluster == 1) return;
  if (w.active > 1 && w.rank < w.active && threadIdx.x == 0) expect_results(w, base);
  __syncwarp();
  if (!appends || w.rank >= w.active) cluster_announce();
}

// When its warps have attended. `dealt`: more may follow.
__device__ __forceinline__ void finish_block(const fa3_decode_params &p, const work &begun,
                                             uint32_t base, bool dealt, attention &a) {
  wait_for_prior_grids();  // if there was nothing to attend to, only now
  if (!dealt) let_next_grid_launch();
  merge_warps(kSharedWork ? *(const work *)(shared + kWorkAt) : begun, a);
  const work w = kSharedWork ? *(const work *)(shared + kWorkAt) : begun;
  if (dealt && deal_ends(deal_of_block())) let_next_grid_launch();
  if (p.cluster > 1) cluster_wait_announced();
  if (w.active > 1) {
    send_results(w, base);
    mbarrier_wait(base + kReceived, 0);
  }
  store_results(p, w);
}

#endif
