// Attention of few queries to many keys (flash decode): bound by the memory that holds the keys.
//
// A block has 8 or 16 rows (query heads of a key head, times queries) and a part of the sequence's
// keys, which its warps take 16 at a time in turns. Each warp streams its own keys and values
// through its own ring in shared memory and has its own softmax, so that nothing waits but for
// memory. At the end the warps of a block, and the blocks of a cluster, put their results together;
// where a sequence is cut into more parts than a cluster has blocks, combine.cu does the rest.
//
// Compile with -DFA3_BF16=1 or FA3_FP16=1, FA3_TILE_Q, FA3_HEAD_DIM and FA3_STAGES.
#include "decode_append.cuh"
#include "decode_load.cuh"
#include "decode_merge.cuh"

// Matrices are read several at a time, so that their latencies do not add up: as many as there are
// registers for.
constexpr int kTogether = kHeadDim > 128 ? 2 : 4;
// Likewise sums of products, which take turns.
constexpr int kSums = kHeadDim > 128 ? 1 : 2;
static_assert(kSums == 2 || kRows > 8, "even and odd steps have sums of their own");

__device__ __forceinline__ void read_queries(uint32_t (&query)[kQueryParts][4], uint32_t queries) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < kQueryParts; ++j)
    load_matrices<false>(
        query[j], kRowTiles == 2
                      ? queries + tile_offset(lane & 15, 2 * j + lane / 16)
                      : queries + tile_offset(lane & 7, 4 * j + lane / 16 + 2 * (lane / 8 & 1)));
}

// S = Q K^T of 16 keys.
__device__ __forceinline__ void multiply_keys(float (&s)[kRowTiles][4],
                                              const uint32_t (&query)[kQueryParts][4],
                                              uint32_t keys) {
  const int lane = threadIdx.x & 31, row = (lane & 7) + (lane & 16) / 2, unit = lane / 8 & 1;
  float sums[2][2][4] = {};  // of each 8 keys two, which take turns
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; k += kTogether) {
    uint32_t x[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      load_matrices<false>(x[i], keys + tile_offset(row, 2 * (k + i) + unit));
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma_16_8_16(sums[n][i % kSums], query[part_of_step(k + i)], x[i][2 * n], x[i][2 * n + 1]);
  }
  add_sums(sums, s);
}

__device__ __forceinline__ void store_columns(const attention &a, int t, int r, float factor,
                                              float *row) {
#pragma unroll
  for (int m = 0; m < kHeadDim / 16; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      row[16 * m + 8 * i + (threadIdx.x & 31) / 4] = a.output[t][m][r + 2 * i] * factor;
}

// O^T += V^T P^T of 16 keys.
__device__ __forceinline__ void multiply_values(attention &a,
                                                const uint32_t (&probabilities)[kRowTiles][2],
                                                uint32_t values) {
  const int lane = threadIdx.x & 31, row = (lane & 7) + (lane & 16) / 2, unit = lane / 8 & 1;
#pragma unroll
  for (int m = 0; m < kHeadDim / 16; m += kTogether) {
    uint32_t x[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      load_matrices<true>(x[i], values + tile_offset(row, 2 * (m + i) + unit));
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        mma_16_8_16(a.output[t][m + i], x[i], probabilities[t][0], probabilities[t][1]);
  }
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
  if (p.lengths_known) begin_grid(p);
  load_rows<1>(query, w.sequence.query_batch, p.head_dim, places, tile);
}

// This warp's keys of the block's range. Code that runs once or twice is read from far, so there is
// one copy of each part. `appends`: other warps do (decode_append.cuh), from key `first_new` on.
__device__ __forceinline__ void attend(const fa3_decode_params &p, const work &w, uint32_t ring,
                                       bool appends, int first_new, attention &a) {
  const int steps = appends ? max(count_steps(w), 1) : count_steps(w);
  int key = w.units.begin * kUnitKeys + threadIdx.x / 32 * kStepKeys;  // of the next load

  // The queries pass through what is the last stage, if they have no place of their own. Those that
  // another kernel turns just now come when keys are under way.
  const uint32_t queries = appends ? (uint32_t)__cvta_generic_to_shared(shared + kTurnedAt)
                                   : ring + (kStages - 1) * kStageBytes;
  const bool late = !appends && kRegistersLeft && begins_early(p);
  if (late && p.lengths_known) begin_grid(p);
  if (!appends && !late) load_queries(p, w, queries);
  const int appended_at = appends ? step_of_new_keys(w, first_new) : 0;
  uint32_t query[kQueryParts][4];
  const fa3_range common = find_common_keys(p, w);
  const float scale = product_scale(p);
  uint32_t next = ring;  // to fill; the one behind it is next to compute with
#pragma unroll 1
  for (int i = 1 - kStages; i < steps; ++i) {
    if (late && i <= 0) {
      await_append(p, w, key);
      if (i == 0) {
        wait_for_prior_grids();
        load_queries(p, w, queries);
        copy_async_wait_all();
      }
    }
    if (appends && i == appended_at) {
      await_turned_rows();
      if (p.cluster > 1) cluster_announce();
    }
    if (i >= 0) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    if (i == 0) {
      read_queries(query, queries);
      __syncwarp();
    }
    if (i + kStages - 1 < steps) load_neighbours(p, w, key, next);
    key += kBlockKeys;
    copy_async_commit();
    next = next + kStageBytes == ring + kRingBytes ? ring : next + kStageBytes;
    if (i < 0) continue;

    const uint32_t stage = next;
    float s[kRowTiles][4];
    multiply_keys(s, query, stage);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = __fmul_rn(s[t][e], scale);
    adjust_scores(p, w, common, key - kStages * kBlockKeys, s);
    uint32_t probabilities[kRowTiles][2];
    const float of_value[1][4] = {};
    exponentiate(a, s, of_value, probabilities);
    multiply_values(a, probabilities, stage + kValuesAt);
  }
}

// One tile's keys, or a part of them; false if there are none, for this block.
__device__ __forceinline__ bool run_piece(const fa3_decode_params &p, const work &w, uint32_t base,
                                          bool dealt, bool appends, int first_new) {
  if (w.rows <= 0) return false;  // as all of the cluster
  if (!dealt) prefetch_keys(p, w);
  begin_block(p, w, base, appends);
  if (w.rank >= w.active) return false;
  attention a = no_attention();
  const work &kept = kKeptWork ? *(const work *)(shared + kWorkAt) : w;
  if (appends || w.units.begin < w.units.end)
    attend(p, kept, base + threadIdx.x / 32 * kWarpBytes, appends, first_new, a);
  finish_block(p, w, base, dealt, a);
  return true;
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    decode(const __grid_constant__ fa3_decode_params p) {
  prefetch_sequences(p);
  run_piece(p, find_work(p), (uint32_t)__cvta_generic_to_shared(shared), false, false, 0);
  wait_for_prior_grids();  // whoever waits for this kernel may count on what was before
}

// Of a cache that gets its new rows just now, by as many warps more.
extern "C" __global__ void __launch_bounds__(FA3_DECODE_APPEND_THREADS, 2)
    decode_append(const __grid_constant__ fa3_decode_append_params p) {
  if constexpr (kMayAppend) {  // else the plan never asks for it
    prefetch_sequences(p.decode);
    begin_append(p);
    int used;
    const work w = find_work(p.decode, p.append.sequences.used_k, used);
    const int first_new = first_new_key(p.append, w, used);
    if (threadIdx.x >= kThreads) {
      registers_give_back<kAppendRegisters>();
      append_rows(p, w, first_new);
    } else {
      registers_take<kAttendRegisters>();
      run_piece(p.decode, w, (uint32_t)__cvta_generic_to_shared(shared), false, true, first_new);
    }
    wait_for_prior_grids();
  }
}

// With keys dealt out. A function of its own, for which all that follows from the block's index is
// not the same in all threads as far as the compiler knows.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    decode_dealt(const __grid_constant__ fa3_decode_params p) {
  if constexpr (kRegistersLeft) {  // else the plan never asks for it
    prefetch_sequences(p);
    begin_deal<kWarps>(p, deal_of_block());
    while (run_piece(p, take_piece(p, deal_of_block()), (uint32_t)__cvta_generic_to_shared(shared),
                     true, false, 0) &&
           !deal_ends(deal_of_block()))
      __syncthreads();  // others still read what the next tile takes the place of
    wait_for_prior_grids();
  }
}
