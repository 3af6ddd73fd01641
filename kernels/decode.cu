// Attention of few queries to many keys (flash decode): bound by the memory that holds the keys.
//
// A block has 16 rows (query heads of a key head, times queries) and a part of the sequence's keys,
// which its warps take 16 at a time in turns. Each warp streams its own keys and values through its
// own ring in shared memory and has its own softmax, so that nothing waits but for memory. At the
// end the warps of a block, and the blocks of a cluster, put their results together; where a
// sequence is cut into more parts than a cluster has blocks, combine.cu does the rest.
//
// Compile with -DFA3_BF16=0|1, FA3_HEAD_DIM and FA3_STAGES.
#include "cluster.cuh"
#include "decode_load.cuh"
#include "mbarrier.cuh"
#include "softmax.cuh"

// What a warp keeps of its rows: lane l has rows l / 4 and l / 4 + 8, and of eight columns the two
// from 2 (l % 4) on.
struct attention {
  float output[kHeadDim / 8][4];
  float top[2];  // the rows' maxima, as powers of 2
  float sum[2];  // of this lane's columns
};

// Matrices are read several at a time, so that their latencies do not add up.
constexpr int kTogether = 4;

// S = Q K^T of 16 rows and 16 keys.
__device__ __forceinline__ void multiply_keys(float (&s)[2][4],
                                              const uint32_t (&query)[kHeadDim / 16][4],
                                              uint32_t keys) {
  const int lane = threadIdx.x & 31, row = (lane & 7) + (lane & 16) / 2, unit = lane / 8 & 1;
  float second[2][4];  // sums that take turns with the first
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = second[n][e] = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; k += kTogether) {
    uint32_t x[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      load_matrices<false>(x[i], keys + tile_offset(row, 2 * (k + i) + unit));
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      mma_16_8_16(i % 2 ? second[0] : s[0], query[k + i], x[i][0], x[i][1]);
      mma_16_8_16(i % 2 ? second[1] : s[1], query[k + i], x[i][2], x[i][3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] += second[n][e];
}

// O += P V of 16 rows and 16 keys.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDim / 8][4],
                                                const uint32_t (&probabilities)[4],
                                                uint32_t values) {
  const int lane = threadIdx.x & 31, row = lane & 15, unit = lane / 16;
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; n += kTogether) {
    uint32_t x[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      load_matrices<true>(x[i], values + tile_offset(row, 2 * (n + i) + unit));
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      mma_16_8_16(o[2 * (n + i)], probabilities, x[i][0], x[i][1]);
      mma_16_8_16(o[2 * (n + i) + 1], probabilities, x[i][2], x[i][3]);
    }
  }
}

// Products become exponents of 2, or -inf where the row does not see the key.
__device__ __forceinline__ void adjust_scores(const fa3_decode_params &p, const work &w,
                                              const fa3_range (&seen)[2], int key,
                                              float (&s)[2][4]) {
  const int first = key + 2 * (threadIdx.x & 3);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = s[n][e];
      if (p.softcap_log2 != 0.0f)
        x = 1.0f - 2.0f * reciprocal_unit(1.0f + exp2_unit(x * p.softcap_log2));
      x *= p.scale_log2;
      const int k = first + 8 * n + (e & 1);
      s[n][e] = k >= seen[e / 2].begin && k < seen[e / 2].end ? x : -INFINITY;
    }
}

// The online softmax: scores become probabilities, packed as the next product takes them.
__device__ __forceinline__ void exponentiate(attention &a, float (&s)[2][4],
                                             uint32_t (&probabilities)[4]) {
  float factor[2];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float here = row_maximum(
        max_nan(max_nan(s[0][2 * r], s[0][2 * r + 1]), max_nan(s[1][2 * r], s[1][2 * r + 1])));
    const float top = max_nan(a.top[r], here);
    grown |= !(top == a.top[r]);
    factor[r] = exp2_unit(a.top[r] - top);
    a.top[r] = top;
    a.sum[r] *= factor[r];
  }
  if (__any_sync(0xffffffff, grown))
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) a.output[n][e] *= factor[e / 2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = exp2_unit(s[n][e] - a.top[e / 2]);
      a.sum[e / 2] += s[n][e];
    }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    probabilities[i] = pack_pair(s[i / 2][2 * (i & 1)], s[i / 2][2 * (i & 1) + 1]);
}

// This warp's keys of the block's range. Code that runs once or twice is read from far, so there is
// one copy of each part.
__device__ __forceinline__ void attend(const fa3_decode_params &p, const work &w, uint32_t ring,
                                       attention &a) {
  const int lane = threadIdx.x & 31;
  const int units = w.units.end - w.units.begin;
  int now = w.units.begin * kUnitKeys + threadIdx.x / 32 * kStepKeys;
  int key = now;  // of the next load

  // The queries pass through what is the last stage.
  const uint32_t queries = ring + (kStages - 1) * kStageBytes;
  load_queries(p, w, queries);
  uint32_t query[kHeadDim / 16][4];
  fa3_range seen[2];
  uint32_t stage = ring, next = ring;  // to compute with, and to fill
#pragma unroll 1
  for (int i = 1 - kStages; i < units; ++i) {
    if (i >= 0) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    if (i == 0) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k)
        load_matrices<false>(query[k], queries + tile_offset(lane & 15, 2 * k + lane / 16));
#pragma unroll
      for (int r = 0; r < 2; ++r)
        seen[r] =
            fa3_visible_keys(&w.sequence.mask, divide(w.first_row + lane / 4 + 8 * r, p.group));
      __syncwarp();
    }
    if (i + kStages - 1 < units) {
      load_step(p, w, find_cache_rows(p, w, key), next);
      key += kUnitKeys;
    }
    copy_async_commit();
    next = next + kStageBytes == ring + kWarpBytes ? ring : next + kStageBytes;
    if (i < 0) continue;

    float s[2][4];
    uint32_t probabilities[4];
    multiply_keys(s, query, stage);
    adjust_scores(p, w, seen, now, s);
    exponentiate(a, s, probabilities);
    multiply_values(a.output, probabilities, stage + kTileBytes);
    stage = stage + kStageBytes == ring + kWarpBytes ? ring : stage + kStageBytes;
    now += kUnitKeys;
  }
}

// The warps' results become the block's: its output (times the sum) is in the first warp's place,
// its rows' maxima and sums at kResultAt.
__device__ __forceinline__ void merge_warps(const work &w, attention &a) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  float *const tops = (float *)(shared + kTopAt), *const sums = (float *)(shared + kSumAt);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    a.sum[r] += __shfl_xor_sync(0xffffffff, a.sum[r], 1);
    a.sum[r] += __shfl_xor_sync(0xffffffff, a.sum[r], 2);
    if ((lane & 3) == 0) {
      tops[warp * kRows + lane / 4 + 8 * r] = a.top[r];
      sums[warp * kRows + lane / 4 + 8 * r] = a.sum[r];
    }
  }
  __syncthreads();  // and nobody uses a ring any more
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    float top = tops[row], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) top = max_nan(top, tops[i * kRows + row]);
#pragma unroll
    for (int i = 0; i < kWarps; ++i)
      sum += sums[i * kRows + row] * exp2_unit(tops[i * kRows + row] - top);
    factor[r] = exp2_unit(a.top[r] - top);
    if (warp == 0 && (lane & 3) == 0) {
      float *const result = (float *)(shared + kResultAt) + 2 * row;
      result[0] = top;
      result[1] = sum;
    }
  }
  float *const output = (float *)(shared + warp * kWarpBytes);
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      if (row < w.rows)
        *(float2 *)(output + row * kPitch + 8 * n + 2 * (lane & 3)) =
            make_float2(a.output[n][2 * r] * factor[r], a.output[n][2 * r + 1] * factor[r]);
    }
  __syncthreads();
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

// Four columns of a row leave, `top` and `sum` being the row's.
__device__ __forceinline__ void store_result(const fa3_decode_params &p, const work &w, int row,
                                             int column, float4 x, float top, float sum) {
  const row_place place = place_of_row(p, w, row);
  float logit = top * 0.69314718f;
  if (p.sink != nullptr && p.partial == nullptr) {
    const float sink = p.sink[place.head];
    if (sum == 0.0f) logit = -INFINITY;
    const float higher = max_nan(max_nan(logit, sink), -FLT_MAX);
    const float shift = exp2_unit((logit - higher) * 1.44269504f);
    sum = sum * shift + exp2_unit((sink - higher) * 1.44269504f);
    logit = higher;
    x.x *= shift, x.y *= shift, x.z *= shift, x.w *= shift;
  }
  const float factor = sum == 0.0f ? 0.0f : reciprocal_unit(sum);
  const float lse = sum == 0.0f ? -INFINITY : fmaf(log2_unit(sum), 0.69314718f, logit);
  x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
  if (p.partial != nullptr) {
    const int64_t row_at =
        ((int64_t)w.cluster * p.batch + w.batch) * p.sequences.seqlen_q + place.query;
    const int64_t at = row_at * (int)(p.heads_k.divisor * p.group.divisor) + place.head;
    if (column == 0) p.partial_lse[at] = lse;
    if (column < p.head_dim_v && sum != 0.0f)
      *(float4 *)(p.partial + at * p.head_dim_v + column) = x;
    return;
  }
  if (column == 0 && p.lse != nullptr)
    p.lse[w.sequence.query_batch * p.lse_stride_batch + place.head * p.lse_stride_head +
          (w.sequence.query_row + place.query) * p.lse_stride_row] = lse;
  if (column >= p.head_dim_v) return;
  const int64_t at = w.sequence.query_batch * p.output_stride_batch +
                     (w.sequence.query_row + place.query) * p.output_stride_row +
                     place.head * p.output_stride_head + column;
  if (p.output_is_float) {
    float *const to = (float *)p.output + at;
    if (((uintptr_t)to & 15) == 0)
      *(float4 *)to = x;
    else
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    return;
  }
  const uint2 packed = make_uint2(pack_pair(x.x, x.y), pack_pair(x.z, x.w));
  uint16_t *const to = (uint16_t *)p.output + at;
  if (((uintptr_t)to & 7) == 0) {
    *(uint2 *)to = packed;
  } else {
    to[0] = (uint16_t)packed.x, to[1] = (uint16_t)(packed.x >> 16);
    to[2] = (uint16_t)packed.y, to[3] = (uint16_t)(packed.y >> 16);
  }
}

// Quads of columns that each block of a cluster puts together.
__device__ __forceinline__ int quads_of_block(const work &w) {
  return (w.rows * kQuads + w.active - 1) / w.active;
}

// Before others send: the barrier that counts what will come.
__device__ __forceinline__ void expect_results(const work &w, uint32_t base) {
  mbarrier_init(base + kReceived, 1);
  mbarrier_init_fence();
  const int share = quads_of_block(w), first = w.rank * share;
  const int mine = max(min(share, w.rows * kQuads - first), 0);
  mbarrier_arrive_expect(base + kReceived, w.active * (mine * 16 + w.rows * 8));
}

// Each block of the cluster gets its part of this block's result.
__device__ __forceinline__ void send_results(const work &w, uint32_t base) {
  const int share = quads_of_block(w);
#pragma unroll 1
  for (int i = threadIdx.x; i < w.rows * kQuads; i += FA3_DECODE_THREADS) {
    const int to = i / share;
    cluster_store(cluster_map(base + kReceivedAt + (w.rank * share + i - to * share) * 16, to),
                  sum_of_warps(i / kQuads, i % kQuads * 4), cluster_map(base + kReceived, to));
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < w.active * kRows; i += FA3_DECODE_THREADS) {
    const int to = i / kRows, row = i % kRows;
    if (row < w.rows)
      cluster_store(cluster_map(base + kReceivedResultsAt + (w.rank * kRows + row) * 8, to),
                    *(const float2 *)(shared + kResultAt + row * 8),
                    cluster_map(base + kReceived, to));
  }
}

// This block's part of the cluster's results becomes one, and leaves.
__device__ __forceinline__ void store_results(const fa3_decode_params &p, const work &w) {
  const int share = quads_of_block(w), first = w.rank * share;
  const int end = min(w.rows * kQuads, first + share);
#pragma unroll 1
  for (int i = first + threadIdx.x; i < end; i += FA3_DECODE_THREADS) {
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
        const float4 y = quads[b * share];
        const float factor = exp2_unit(results[b * kRows].x - top);
        total.y += results[b * kRows].y * factor;
        x.x += y.x * factor, x.y += y.y * factor, x.z += y.z * factor, x.w += y.w * factor;
      }
    }
    store_result(p, w, row, column, x, total.x, total.y);
  }
}

extern "C" __global__ void __launch_bounds__(FA3_DECODE_THREADS, 2)
    decode(const __grid_constant__ fa3_decode_params p) {
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  const work w = find_work(p);
  if (w.rows <= 0) return;  // as all of the cluster
  if (p.cluster > 1) {
    if (w.active > 1 && w.rank < w.active && threadIdx.x == 0) expect_results(w, base);
    __syncwarp();
    cluster_announce();
  }
  if (w.rank >= w.active) return;
  attention a;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) a.output[n][e] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    a.top[r] = FA3_NO_REFERENCE;
    a.sum[r] = 0.0f;
  }
  if (w.units.begin < w.units.end) attend(p, w, base + threadIdx.x / 32 * kWarpBytes, a);
  let_next_grid_launch();
  merge_warps(w, a);
  if (p.cluster > 1) cluster_wait_announced();
  if (w.active > 1) {
    send_results(w, base);
    mbarrier_wait(base + kReceived, 0);
  }
  store_results(p, w);
}
