// Attention of few queries to a cache of E4M3 codes: decode.cu, with half the bytes to load.
//
// Codes stay codes in shared memory, and become float16, which holds each exactly, on their way to
// the products. So queries are float16 too: bfloat16's are multiplied by a power of 2 of their
// row's own, which leaves no more than float32 sums lose anyway, and codes are float16 as keys are.
// The scales of a step's keys and values come beside them, one for each row whatever they are
// shared by.
//
// Rows of codes are short, and memory gives more of longer pieces: so a block may have two heads of
// keys, which lie side by side, and a step both heads' rows of 16 keys.
//
// Compile with -DFA3_E4M3=1, FA3_TILE_Q, FA3_HEAD_DIM, FA3_STAGES, FA3_HEADS for two of them,
// FA3_LOADS for two of 16 keys in a step, and FA3_WARPS for other than FA3_DECODE_WARPS.
#include "codes.cuh"
#include "decode_load.cuh"
#include "decode_merge.cuh"
#include "decode_queries.cuh"
#include "decode_scales.cuh"

// What a lane's queries are: rows lane / 4 + 8t, of 64 columns the 16 from 16 (lane % 4) on. A
// product of 16 columns takes four of each lane's, those of key and query alike.
struct queries {
  // Of each head of keys, as products take them; or at `shared`.
  uint32_t x[kHeads][kQueryParts][4];
  uint32_t shared;
  float factor[kRowTiles];  // of the rows' scores
};

__device__ __forceinline__ uint32_t address_of_query(const queries &q, int part) {
  return q.shared + (part * 32 + (threadIdx.x & 31)) * 16;
}

// Of head n.
__device__ __forceinline__ void read_query(const queries &q, int n, int part, uint32_t (&x)[4]) {
  if (kSharedQueries) {
    const uint4 y = load_shared_vector(address_of_query(q, part));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = q.x[n][part][i];
  }
}

// A row of bfloat16 becomes float16, times a power of 2; its scores are to be multiplied by the
// inverse.
__device__ __forceinline__ float fit_row(queries &q, int t) {
  uint32_t top = 0;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      top = __vmaxu2(top, q.x[t % kHeads][part_of_step(k)][place_in_part(k, t, i)] & 0x7fff7fff);
  top = max(top & 0xffff, top >> 16);
  top = max(top, __shfl_xor_sync(0xffffffff, top, 1));
  top = max(top, __shfl_xor_sync(0xffffffff, top, 2));
  const int exponent = exponent_to_fit(top);
  const float up = power_of_2(exponent);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      q.x[t % kHeads][part_of_step(k)][place_in_part(k, t, i)] =
          fit_pair(q.x[t % kHeads][part_of_step(k)][place_in_part(k, t, i)], up);
  return power_of_2(-exponent);
}

// Where the four neighbours are that are number n of a lane's 16 columns of chunk c.
struct query_place {
  int part, at;
};

__device__ __forceinline__ query_place place_of_query(int c, int t, int n) {
  const int k = 4 * c + n / 4 * 2 + n % 2;
  return {part_of_step(k), place_in_part(k, t, n % 4 / 2)};
}

// The queries as they lie in memory, on their way; of codes the first half of the places.
__device__ __forceinline__ void fetch_queries(const fa3_decode_fp8_params &p, const work &w,
                                              queries &q) {
  const int lane = threadIdx.x & 31;
  const bool codes = p.query == FA3_QUERY_E4M3;
  row_place places[kRowTiles];
  const char *rows[kRowTiles];
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int row = row_of_tile(w, t, lane / 4);
    places[t] = place_of_row(p.decode, w, row < w.rows ? row : 0);
    rows[t] = address_of_query_row(p.decode, w, places[t]);
  }
  if (p.decode.lengths_known && !begins_early(p.decode)) begin_grid(p.decode);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const bool there = row_of_tile(w, t, lane / 4) < w.rows;
    const row_place place = places[t];
    const char *const from = rows[t];
#pragma unroll
    for (int c = 0; c < kHeadDim / 64; ++c) {
      const int column = 64 * c + 16 * (lane & 3);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (there && column + 8 * h < p.decode.head_dim && !(codes && h == 1))
          x = *(const uint4 *)(from + (codes ? column : 2 * (column + 8 * h)));
        const uint32_t y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const query_place at = place_of_query(c, t, 4 * h + i);
          q.x[t % kHeads][at.part][at.at] = y[i];
        }
      }
    }
    q.factor[t] = scale_of_query(p, w, place);
  }
}

// They become float16.
__device__ __forceinline__ void fit_queries(const fa3_decode_fp8_params &p, queries &q) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    uint32_t(&x)[kQueryParts][4] = q.x[t % kHeads];
    if (p.query == FA3_QUERY_E4M3)
#pragma unroll
      for (int c = 0; c < kHeadDim / 64; ++c)
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          const query_place from = place_of_query(c, t, i), low = place_of_query(c, t, 2 * i),
                            high = place_of_query(c, t, 2 * i + 1);
          unpack_codes(x[from.part][from.at], x[low.part][low.at], x[high.part][high.at]);
        }
    q.factor[t] *= product_scale(p.decode);
    if (p.query == FA3_QUERY_BF16) q.factor[t] *= fit_row(q, t);
  }
  if (kSharedQueries)
#pragma unroll
    for (int part = 0; part < kQueryParts; ++part)
      store_shared_vector(address_of_query(q, part), q.x[0][part]);
}

// Where this lane's scale is: those of a lane's keys are neighbours, and of its values. Number
// 8n + 2i + j is at 4i + 2n + j.
__device__ __forceinline__ int place_of_scale(void) {
  const int lane = threadIdx.x & 31;
  return (lane & 16) + 4 * (lane / 2 & 3) + 2 * (lane / 8 & 1) + (lane & 1);
}

// S = Q K^T of 16 keys of head n.
__device__ __forceinline__ void multiply_keys(float (&s)[kProductTiles][4], const queries &q, int n,
                                              uint32_t keys) {
  const int lane = threadIdx.x & 31;
  float sums[2][2][4] = {};  // of each 8 keys two, which take turns
#pragma unroll
  for (int c = 0; c < kHeadDim / 64; ++c) {
    uint4 x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      x[j] = load_shared_vector(keys + tile_offset(8 * j + lane / 4, 4 * c + (lane & 3)));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t key[2][2][2];  // of 8 keys: the first two of each four columns, the last two
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          unpack_codes(h == 0 ? (i == 0 ? x[j].x : x[j].y) : (i == 0 ? x[j].z : x[j].w),
                       key[j][0][i], key[j][1][i]);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t query[4];
        read_query(q, n, part_of_step(4 * c + 2 * h + odd), query);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          mma_16_8_16(sums[j][odd], query, key[j][odd][0], key[j][odd][1]);
      }
    }
  }
  add_sums(sums, s);
}

// O^T += V^T P^T of 16 keys, of the rows of head n. Codes are transposed in pairs of columns: of 16
// columns those that the product has as the first eight are the even ones.
__device__ __forceinline__ void multiply_values(
    attention &a, const uint32_t (&probabilities)[kRowTiles][kScores / 2], uint32_t values, int n,
    int load) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int u = 0; u < kRowUnits; u += 2) {
    uint32_t x[4];
    load_matrices<true>(x, values + tile_offset(lane & 15, u + lane / 16));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t value[4];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        unpack_codes(__byte_perm(x[2 * i], x[2 * i + 1], odd ? 0x7531 : 0x6420), value[odd],
                     value[odd + 2]);
#pragma unroll
      for (int t = n; t < kRowTiles; t += kHeads)
        mma_16_8_16(a.output[t][u + i], value, probabilities[t][2 * load],
                    probabilities[t][2 * load + 1]);
    }
  }
}

__device__ __forceinline__ void store_columns(const attention &a, int t, int r, float factor,
                                              float *row) {
#pragma unroll
  for (int u = 0; u < kRowUnits; ++u)
    *(float2 *)(row + 16 * u + 2 * ((threadIdx.x & 31) / 4)) =
        make_float2(a.output[t][u][r] * factor, a.output[t][u][r + 2] * factor);
}

// This warp's keys of the block's range.
__device__ __forceinline__ void attend(const fa3_decode_fp8_params &fp8, const work &w,
                                       uint32_t ring, attention &a) {
  const fa3_decode_params &p = fp8.decode;
  const int steps = count_steps(w);
  int key = w.units.begin * kUnitKeys + threadIdx.x / 32 * kStepKeys;  // of the next step

  if (p.lengths_known && begins_early(p)) begin_grid(p);
  const lane_scales scales = find_scales(fp8, w);
  queries q;
  q.shared = ring + kRingBytes;
  if (kSharedQueries) {
    wait_for_prior_grids();
    fetch_queries(fp8, w, q);
    fit_queries(fp8, q);
  } else if (!begins_early(p)) {
    fetch_queries(fp8, w, q);
  }
  const fa3_range common = find_common_keys(p, w);
  uint32_t next = ring;  // to fill; the one behind it is next to compute with
#pragma unroll 1
  for (int i = 1 - kStages; i < steps; ++i) {
    if (i >= 0) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    if (begins_early(p) && i < 0) {
      await_append(p, w, key);
      if (i == -1) {
        wait_for_prior_grids();
        if (!kSharedQueries) fetch_queries(fp8, w, q);
      }
    }
    if (i + kStages - 1 < steps) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const place at = load_neighbours(p, w, key + l * kLoadKeys, next + l * kLoadBytes);
        load_scale(scales, at, next + l * kLoadBytes, place_of_scale());
      }
    }
    key += kBlockKeys;
    copy_async_commit();
    next = next + kStageBytes == ring + kRingBytes ? ring : next + kStageBytes;
    if (i == -1 && !kSharedQueries) fit_queries(fp8, q);
    if (i < 0) continue;

    float s[kRowTiles][kScores], of_value[kHeads][kScores];
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
#pragma unroll
      for (int n = 0; n < kHeads; ++n) {
        const uint32_t load = next + l * kLoadBytes;
        float products[kProductTiles][4];
        multiply_keys(products, q, n, load + n * kTileBytes);
        const uint32_t scales = load + kScalesAt + n * kScaleBytes + (threadIdx.x & 3) * 16;
        const float4 keys = load_shared_floats(scales), values = load_shared_floats(scales + 64);
        const float of_key[4] = {keys.x, keys.y, keys.z, keys.w};
        of_value[n][4 * l] = log2_unit(values.x), of_value[n][4 * l + 1] = log2_unit(values.y);
        of_value[n][4 * l + 2] = log2_unit(values.z), of_value[n][4 * l + 3] = log2_unit(values.w);
#pragma unroll
        for (int t = n; t < kRowTiles; t += kHeads)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[t][4 * l + i] = __fmul_rn(products[t / kHeads][i], __fmul_rn(q.factor[t], of_key[i]));
      }
    adjust_scores(p, w, common, key - kStages * kBlockKeys, s);
    uint32_t probabilities[kRowTiles][kScores / 2];
    exponentiate(a, s, of_value, probabilities);
#pragma unroll
    for (int l = 0; l < kLoads; ++l)
#pragma unroll
      for (int n = 0; n < kHeads; ++n)
        multiply_values(a, probabilities, next + l * kLoadBytes + kValuesAt + n * kTileBytes, n, l);
  }
}

// One tile's keys, or a part of them; false if there are none, for this block.
__device__ __forceinline__ bool run_piece(const fa3_decode_fp8_params &p, const work &w,
                                          uint32_t base, bool dealt) {
  if (w.rows <= 0) return false;  // as all of the cluster
  if (!dealt) prefetch_keys(p.decode, w);
  begin_block(p.decode, w, base, false);
  if (w.rank >= w.active) return false;
  attention a = no_attention();
  if (w.units.begin < w.units.end) attend(p, w, base + threadIdx.x / 32 * kWarpBytes, a);
  finish_block(p.decode, w, base, dealt, a);
  return true;
}

constexpr int kBlocksAtOnce = kWarps > FA3_DECODE_WARPS ? 1 : kRows == 8 && kHeadDim <= 128 ? 3 : 2;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    decode_fp8(const __grid_constant__ fa3_decode_fp8_params p) {
  prefetch_sequences(p.decode);
  run_piece(p, find_work(p.decode), (uint32_t)__cvta_generic_to_shared(shared), false);
  wait_for_prior_grids();  // whoever waits for this kernel may count on what was before
}

// With keys dealt out. A function of its own, for which all that follows from the block's index is
// not the same in all threads as far as the compiler knows.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    decode_fp8_dealt(const __grid_constant__ fa3_decode_fp8_params p) {
  prefetch_sequences(p.decode);
  begin_deal<kWarps>(p.decode, deal_of_block());
  while (run_piece(p, take_piece(p.decode, deal_of_block()),
                   (uint32_t)__cvta_generic_to_shared(shared), true) &&
         !deal_ends(deal_of_block()))
    __syncthreads();  // others still read what the next tile takes the place of
  wait_for_prior_grids();
}
