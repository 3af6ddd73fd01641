// Partial results of attention become one: output = sum of output_i * exp(lse_i - lse), where lse
// is the logarithm of the sum of exp(lse_i). A warp has a row, or all of a block's have one: then
// each takes every so many of its parts, and what they have is put together again. combine_rows is
// for many rows of few parts: there a thread has four columns. combine_tiles is for tiles whose
// keys are dealt out, of the forward kernel or of speculative_fp8.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "combine_params.h"
#include "registers.cuh"

// Parts that are read at once, so that their latencies do not add up.
constexpr int kTogether = 8;
constexpr int kColumns = 128;  // at a time, 32 apart in a lane

__device__ __forceinline__ void store(const fa3_combine_params &p, int64_t at, float x) {
  if (p.kind == FA3_COMBINE_FLOAT32)
    ((float *)p.output)[at] = x;
  else if (p.kind == FA3_COMBINE_FLOAT16)
    ((__half *)p.output)[at] = __float2half_rn(x);
  else
    ((__nv_bfloat16 *)p.output)[at] = __float2bfloat16_rn(x);
}

// What a part counts for, against the greatest.
__device__ __forceinline__ float weight_of(float lse, float top) {
  return lse == -INFINITY ? 0.0f : exp2_unit((lse - top) * 1.44269504f);
}

// Where the parts of a row are.
struct parts {
  int64_t at, lse_at;          // of the first
  int64_t stride, lse_stride;  // from one to the next
  int64_t jump, lse_jump;      // and what the first is ahead of them
  int count;
};

// `early`: what was queued before is awaited here, when only loads are left.
__device__ __forceinline__ parts find_parts(const fa3_combine_params &p, int batch, int query,
                                            int head, bool early) {
  parts x;
  if (p.parts == nullptr) {
    auto offset = [&](const fa3_combine_strides &strides) {
      return batch * strides.batch + (int64_t)query * strides.row + head * strides.head;
    };
    x.at = offset(p.partial_strides);
    x.lse_at = offset(p.partial_lse_strides);
    x.stride = p.partial_strides.split;
    x.lse_stride = p.partial_lse_strides.split;
    x.jump = x.lse_jump = 0;
    x.count = p.splits;
    if (early) wait_for_prior_grids();
    return x;
  }
  const int group_head = head / p.group, row = query * p.group + head - group_head * p.group;
  const int tile = row / p.tile_rows;
  const int64_t heads_k = p.heads / p.group;
  if (early) wait_for_prior_grids();
  const fa3_combine_parts found = p.parts[(batch * heads_k + group_head) * p.row_tiles + tile];
  x.lse_at = 2 * (int64_t)found.block * p.tile_rows + row - tile * p.tile_rows;
  x.lse_stride = 2 * heads_k * p.tile_rows;
  x.lse_jump = p.tile_rows;
  x.at = x.lse_at * p.head_dim;
  x.stride = x.lse_stride * p.head_dim;
  x.jump = x.lse_jump * p.head_dim;
  x.count = found.count;
  return x;
}

// What some parts come to: an average times its sum, of the lane's columns.
struct merged {
  float top, sum;
  float x[4];
};

__device__ __forceinline__ void merge_parts(const fa3_combine_params &p, const parts &of, int first,
                                            int step, int column, merged &m) {
  const int lane = threadIdx.x & 31;
  m.top = -INFINITY;
  m.sum = m.x[0] = m.x[1] = m.x[2] = m.x[3] = 0.0f;
  for (int begin = first; begin < of.count; begin += kTogether * step) {
    const int mine = begin + lane % kTogether * step;
    float lse = -INFINITY, x[kTogether][4];
    if (mine < of.count)
      lse = p.partial_lse[of.lse_at + mine * of.lse_stride + (mine == 0 ? of.lse_jump : 0)];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int s = begin + i * step;
      const float *const from = p.partial + of.at + s * of.stride + (s == 0 ? of.jump : 0) + column;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        x[i][c] = s < of.count && column + 32 * c < p.head_dim ? from[32 * c] : 0.0f;
    }
    float top = max_nan(lse, m.top);
#pragma unroll
    for (int i = kTogether / 2; i > 0; i /= 2)
      top = max_nan(top, __shfl_xor_sync(0xffffffff, top, i));
    const float weight = weight_of(lse, top), before = weight_of(m.top, top);
    m.top = top;
    m.sum *= before;
#pragma unroll
    for (int c = 0; c < 4; ++c) m.x[c] *= before;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float w = __shfl_sync(0xffffffff, weight, i);
      m.sum += w;
      // A part without keys may hold anything.
#pragma unroll
      for (int c = 0; c < 4; ++c) m.x[c] += w != 0.0f ? w * x[i][c] : 0.0f;
    }
  }
}

// The warps' of one row become one, in all of them.
__device__ __forceinline__ void merge_warps(merged &m) {
  __shared__ float tops[FA3_COMBINE_WARPS], sums[FA3_COMBINE_WARPS];
  __shared__ float columns[FA3_COMBINE_WARPS][kColumns];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  __syncthreads();  // what was there before has been read
  if (lane == 0) {
    tops[warp] = m.top;
    sums[warp] = m.sum;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) columns[warp][lane + 32 * c] = m.x[c];
  __syncthreads();
  m.top = -INFINITY;
#pragma unroll
  for (int i = 0; i < FA3_COMBINE_WARPS; ++i) m.top = max_nan(m.top, tops[i]);
  m.sum = m.x[0] = m.x[1] = m.x[2] = m.x[3] = 0.0f;
#pragma unroll
  for (int i = 0; i < FA3_COMBINE_WARPS; ++i) {
    const float weight = weight_of(tops[i], m.top);
    m.sum += weight * sums[i];
#pragma unroll
    for (int c = 0; c < 4; ++c) m.x[c] += weight * columns[i][lane + 32 * c];
  }
}

// Where a sequence is, in output and lse.
struct rows_of_sequence {
  int first, queries;
};

__device__ __forceinline__ rows_of_sequence find_rows(const fa3_combine_params &p, int batch) {
  rows_of_sequence rows;
  rows.first = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
  rows.queries = p.used_q         ? p.used_q[batch]
                 : p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - rows.first
                                  : p.seqlen_q;
  rows.queries = min(rows.queries, p.seqlen_q);
  return rows;
}

extern "C" __global__ void __launch_bounds__(FA3_COMBINE_THREADS, 3)
    combine(const __grid_constant__ fa3_combine_params p) {
  const int lane = threadIdx.x & 31, batch = blockIdx.y;
  const int own = uniform((int)threadIdx.x / 32), warp = p.warps == 1 ? 0 : own;  // of the row's
  const int64_t index = p.warps == 1 ? (int64_t)blockIdx.x * FA3_COMBINE_WARPS + own : blockIdx.x;
  const int query = (int)(index / p.heads), head = (int)(index % p.heads);
  let_next_grid_launch();
  const bool known = p.cu_seqlens_q == nullptr && p.used_q == nullptr;
  if (!known) wait_for_prior_grids();
  const rows_of_sequence rows = find_rows(p, batch);
  if (query >= rows.queries) return;
  auto offset = [&](const fa3_combine_strides &strides) {
    return batch * strides.batch + (int64_t)(rows.first + query) * strides.row +
           head * strides.head;
  };
  const int64_t output = offset(p.output_strides);
  const parts of = find_parts(p, batch, query, head, known);
  if (p.parts != nullptr && of.count == 0) return;  // the result is whole
  const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
  for (int first = 0; first < p.head_dim; first += kColumns) {
    const int column = first + lane;
    merged m;
    merge_parts(p, of, warp, p.warps, column, m);
    if (p.warps > 1) merge_warps(m);
    if (sink != -INFINITY) {
      const float top = max_nan(m.top, sink), weight = weight_of(m.top, top);
      m.top = top;
      m.sum = m.sum * weight + weight_of(sink, top);
#pragma unroll
      for (int c = 0; c < 4; ++c) m.x[c] *= weight;
    }
    if (warp > 0) continue;
    const float factor = m.sum == 0.0f ? 0.0f : 1.0f / m.sum;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (column + 32 * c < p.head_dim) store(p, output + column + 32 * c, m.x[c] * factor);
    if (column == 0 && p.lse != nullptr)
      p.lse[offset(p.lse_strides)] =
          m.sum == 0.0f ? -INFINITY : fmaf(log2_unit(m.sum), 0.69314718f, m.top);
  }
}

// Parts that a thread of combine_rows reads at once.
constexpr int kAtOnce = 4;

// Four neighbouring columns of a result, in 16 bits.
__device__ __forceinline__ void store_columns(const fa3_combine_params &p, int64_t at,
                                              const float (&x)[4]) {
  uint32_t pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (p.kind == FA3_COMBINE_FLOAT16)
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    else
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
  }
  *(uint2 *)((uint16_t *)p.output + at) = make_uint2(pair[0], pair[1]);
}

// One row of the output: so many threads have four columns each, of up to 4 * threads at a time.
template <typename Store>
__device__ __forceinline__ void combine_columns(const fa3_combine_params &p, const parts &of,
                                                int batch, int row, int head, int threads,
                                                const Store &store_four) {
  auto offset = [&](const fa3_combine_strides &strides) {
    return batch * strides.batch + (int64_t)row * strides.row + head * strides.head;
  };
  const float *const partial = p.partial + of.at, *const partial_lse = p.partial_lse + of.lse_at;
  const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
  for (int column = threadIdx.x % threads * 4; column < p.head_dim; column += 4 * threads) {
    float top = sink, sum = sink == -INFINITY ? 0.0f : 1.0f, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int begin = 0; begin < of.count; begin += kAtOnce) {
      float lse[kAtOnce], next = top;
      float4 part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int s = begin + i;
        const int64_t ahead = s == 0 ? of.jump : 0, lse_ahead = s == 0 ? of.lse_jump : 0;
        lse[i] = s < of.count ? partial_lse[s * of.lse_stride + lse_ahead] : -INFINITY;
        if (s < of.count) part[i] = *(const float4 *)(partial + s * of.stride + ahead + column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) next = max_nan(next, lse[i]);
      const float before = weight_of(top, next);
      top = next;
      sum *= before;
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] *= before;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weight_of(lse[i], top);
        if (weight == 0.0f) continue;  // a part without keys may hold anything
        sum += weight;
        x[0] = fmaf(weight, part[i].x, x[0]);
        x[1] = fmaf(weight, part[i].y, x[1]);
        x[2] = fmaf(weight, part[i].z, x[2]);
        x[3] = fmaf(weight, part[i].w, x[3]);
      }
    }
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] *= factor;
    store_four(offset(p.output_strides) + column, x);
    if (column == 0 && p.lse != nullptr)
      p.lse[offset(p.lse_strides)] =
          sum == 0.0f ? -INFINITY : fmaf(log2_unit(sum), 0.69314718f, top);
  }
}

// As combine, without p.parts, where four columns lie at a multiple of 16 bytes, in the output
// of 8.
extern "C" __global__ void __launch_bounds__(FA3_COMBINE_THREADS, 4)
    combine_rows(const __grid_constant__ fa3_combine_params p) {
  const int threads = FA3_COMBINE_ROW_THREADS(p.head_dim), batch = blockIdx.y;
  const int index = (blockIdx.x * FA3_COMBINE_THREADS + threadIdx.x) / threads;
  const int query = index / p.heads, head = index - query * p.heads;
  let_next_grid_launch();
  const bool known = p.cu_seqlens_q == nullptr && p.used_q == nullptr;
  if (!known) wait_for_prior_grids();
  const rows_of_sequence rows = find_rows(p, batch);
  if (query >= rows.queries) return;
  auto offset = [&](const fa3_combine_strides &strides) {
    return batch * strides.batch + (int64_t)query * strides.row + head * strides.head;
  };
  const parts of = {offset(p.partial_strides),
                    offset(p.partial_lse_strides),
                    p.partial_strides.split,
                    p.partial_lse_strides.split,
                    0,
                    0,
                    p.splits};
  if (known) wait_for_prior_grids();
  combine_columns(p, of, batch, rows.first + query, head, threads,
                  [&](int64_t at, const float(&x)[4]) { store_columns(p, at, x); });
}

// Of keys that are dealt out: a share's tile, or a block's of speculative_fp8.
extern "C" __global__ void __launch_bounds__(FA3_COMBINE_THREADS, 4)
    combine_tiles(const __grid_constant__ fa3_combine_params p) {
  const int threads = FA3_COMBINE_ROW_THREADS(p.head_dim);
  const int place = (blockIdx.x * FA3_COMBINE_THREADS + threadIdx.x) / threads;
  const int in_group = place / p.group;
  let_next_grid_launch();
  wait_for_prior_grids();
  const fa3_combine_tile tile = p.tiles[blockIdx.y];
  if (place >= p.tile_rows || tile.count == 0) return;
  const int query = tile.query + in_group, head = tile.head * p.group + place - in_group * p.group;
  const rows_of_sequence rows = find_rows(p, tile.batch);
  if (query >= rows.queries) return;
  const int64_t first = 2 * (int64_t)blockIdx.y * p.tile_rows + place;
  const int64_t stride = 2 * (int64_t)p.team * p.tile_rows;
  const parts of = {
      first * p.head_dim, first,     stride * p.head_dim, stride, (int64_t)p.tile_rows * p.head_dim,
      p.tile_rows,        tile.count};
  combine_columns(p, of, tile.batch, rows.first + query, head, threads,
                  [&](int64_t at, const float(&x)[4]) {
                    if (p.by_four)
                      store_columns(p, at, x);
                    else
                      for (int c = 0; c < 4; ++c) store(p, at + c, x[c]);
                  });
}
