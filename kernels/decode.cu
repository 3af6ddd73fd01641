// Attention of few queries to many keys (flash decode): bound by the memory that holds the keys.
//
// A block has 16 rows (query heads of a key head, times queries) and a part of the sequence's keys,
// which its warps take 16 at a time in turns. Each warp streams its own keys and values through its
// own ring in shared memory and has its own softmax, so that nothing waits but for memory. At the
// end the warps of a block, and the blocks of a cluster, put their results together; where a
// sequence is cut into more parts than a cluster has blocks, combine.cu does the rest.
//
// Compile with -DFA3_BF16=0|1, FA3_HEAD_DIM and FA3_STAGES.
#include "decode_load.cuh"
#include "decode_merge.cuh"

// Matrices are read several at a time, so that their latencies do not add up: as many as there are
// registers for.
constexpr int kTogether = kHeadDim > 128 ? 2 : 4;

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

__device__ __forceinline__ void store_columns(const attention &a, int r, float factor, float *row) {
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
    *(float2 *)(row + 8 * n + 2 * (threadIdx.x & 3)) =
        make_float2(a.output[n][2 * r] * factor, a.output[n][2 * r + 1] * factor);
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

__device__ __forceinline__ void load_queries(const fa3_decode_params &p, const work &w,
                                             uint32_t tile) {
  lane_rows places;
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
    const int row = (threadIdx.x & 31) / kLanesOfRow + kRowsAtOnce * j;
    const row_place place = place_of_row(p, w, row);
    places.rows[j] = {row < w.rows ? place.head : -1, w.sequence.query_row + place.query};
  }
  // A head in the place of a page.
  fa3_decode_input query = p.query;
  query.stride_batch = p.query.stride_head;
  query.stride_head = p.query.stride_batch;
  load_rows(query, w.sequence.query_batch, p.head_dim, places, tile);
}

// This warp's keys of the block's range. Code that runs once or twice is read from far, so there is
// one copy of each part.
__device__ __forceinline__ void attend(const fa3_decode_params &p, const work &w, uint32_t ring,
                                       attention &a) {
  const int lane = threadIdx.x & 31;
  const int units = w.units.end - w.units.begin;
  int key = w.units.begin * kUnitKeys + threadIdx.x / 32 * kStepKeys;  // of the next load

  // The queries pass through what is the last stage.
  const uint32_t queries = ring + (kStages - 1) * kStageBytes;
  load_queries(p, w, queries);
  uint32_t query[kHeadDim / 16][4];
  fa3_range seen[2];
  uint32_t next = ring;  // to fill; the one behind it is next to compute with
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
    if (i + kStages - 1 < units) load_step(p, w, key, next);
    key += kUnitKeys;
    copy_async_commit();
    next = next + kStageBytes == ring + kRingBytes ? ring : next + kStageBytes;
    if (i < 0) continue;

    const uint32_t stage = next;
    float s[2][4];
    uint32_t probabilities[4];
    multiply_keys(s, query, stage);
    adjust_scores(p, w, seen, key - kStages * kUnitKeys, s);
    exponentiate(a, s, probabilities);
    multiply_values(a.output, probabilities, stage + kTileBytes);
  }
}

extern "C" __global__ void __launch_bounds__(FA3_DECODE_THREADS, 2)
    decode(const __grid_constant__ fa3_decode_params p) {
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  const work w = find_work(p);
  if (w.rows <= 0) return;  // as all of the cluster
  begin_block(p, w, base);
  if (w.rank >= w.active) return;
  attention a = no_attention();
  if (w.units.begin < w.units.end) attend(p, w, base + threadIdx.x / 32 * kWarpBytes, a);
  finish_block(p, w, base, a);
}
