// Attention of few queries, but more than a block of decode_fp8.cu has rows for, to a cache of E4M3
// codes: what speculative decoding asks for.
//
// A block has up to 32 rows (queries times query heads of a key head) and a part of the sequence's
// keys. Each of its warpgroups takes tiles of 64 keys in turn, which its warps bring to rings of
// their own, as decode_fp8.cu has them. Keys, or columns of V, are the 64 rows of a product, and
// the few rows of queries its 32 columns:
//
//   S^T = K Q^T: codes of K become float16 on their way to registers, 16 keys of a warp; Q is in
//                shared memory, its columns in the order in which K's are read
//   P^T to shared memory
//   O^T += V^T P^T: of V a warp has 16 columns of each 64, and reads them in all warps' rings
//
// So no code is written to shared memory as float16, as chunk_fp8.cu does, whose stores and
// products take longer there than memory takes to deliver codes.
//
// Queries, scales and the units of rows are as in chunk_fp8.cu, but tops lag where scales of keys
// differ too: some of the 32 rows has a greater score in most tiles, and the warpgroup would
// rescale O in all of these. The tops and units of a row are the same in all threads of a
// warpgroup. Where lengths may be far apart all sequences' keys are dealt out to the blocks
// (speculative_fp8_dealt).
//
// Compile with -DFA3_E4M3=1, FA3_TILE_Q, FA3_TILE_K, FA3_HEAD_DIM and FA3_STAGES.
#include "chunk_queries.cuh"
#include "decode_store.cuh"
#include "speculative_softmax.cuh"
#include "tma.cuh"

// A warp's 16 rows of queries become float16, in shared memory, and their factors. Their columns
// are in another order, that of K's codes: lane c of four reads the 16 neighbouring codes from 16c
// on, and product s of four takes of them the four from 4s on, as its columns 2c, 2c + 1, 2c + 8
// and 2c + 9.
__device__ __forceinline__ void fit_queries(const fa3_decode_fp8_params &p, const block_work &w,
                                            const layout &m) {
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + lane / 2;
  const int first = (lane & 1) * (kHeadDim / 2);
  const half_row half = fit_half_row(p, w, row, first);
#pragma unroll
  for (int i = 0; i < kVectorsOfLane; ++i) {
    const int column = first + 8 * i, c = column / 16 % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int unit = column / 64 * 8 + (column / 4 % 4 + j / 2) * 2 + j % 2;
      store_shared_word(m.q + place_in_tile<kRows>(row, unit) + 4 * c, half.pairs[i][j]);
    }
  }
  if ((lane & 1) == 0) {
    const float whole = __fmul_rn(half.factor, scale_of_head(p.decode, p.key_scale, w));
    store_shared_float(m.factors + row * 4, half.factor);
    store_shared_float(m.whole_factors + row * 4, whole);
    store_shared_float(m.rooms + row * 4, room_of_products(whole));
  }
  fence_proxy_async();
}

// S^T of the warp's codes of K, which become the first operand: 64 columns at a time, as registers
// are few.
__device__ __forceinline__ void multiply_keys(consumer &c, uint32_t keys, uint32_t q_at) {
  const int lane = thread_again() & 31;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) asm volatile("" : "=f"(c.s[i]));  // what was there is dead
#pragma unroll
  for (int chunk = 0; chunk < kHeadDim / 64; ++chunk) {
    uint32_t k[4][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 x =
          load_shared_vector(keys + tile_offset(8 * r + lane / 4, 4 * chunk + (lane & 3)));
      unpack_codes(x.x, k[0][r], k[0][r + 2]);
      unpack_codes(x.y, k[1][r], k[1][r + 2]);
      unpack_codes(x.z, k[2][r], k[2][r + 2]);
      unpack_codes(x.w, k[3][r], k[3][r + 2]);
    }
    if (chunk > 0) registers_touch(c.s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      wgmma_registers<kRows, false>(c.s, k[i], q_at + ((chunk * kRows * kBlockBytes + i * 32) >> 4),
                                    kDescriptorHigh, chunk + i > 0);
    wgmma_commit();
    wgmma_wait<0>();
  }
  registers_touch(c.s);
}

// The warp's columns of V, of all of the tile's keys. Codes are transposed in pairs of columns: of
// 16 those that the product has as its first eight rows are the even ones.
struct value_codes {
  uint32_t x[kUnitKeys / 16][kBlocks][4];
};

__device__ __forceinline__ void read_values(value_codes &v, uint32_t of_warp) {
  const int lane = thread_again() & 31, warp = thread_again() / 32 % kGroupWarps;
  const uint32_t values = of_warp - warp * kRingBytes;  // of the warpgroup's first warp
  // A load brings two warps' keys at head dim 64, else two blocks of columns.
  constexpr int kOfKeys = kBlocks == 1 ? 1 : kBlocks / 2;
#pragma unroll
  for (int i = 0; i < kUnitKeys / 16 * kBlocks / 2; ++i) {
    const int keys = kBlocks == 1 ? 2 * i : i / kOfKeys, block = i % kOfKeys * 2;
    const int second = lane / 16;
    const int from = kBlocks == 1 ? keys + second : keys;
    const int unit = kBlocks == 1 ? warp : 4 * (block + second) + warp;
    uint32_t x[4];
    load_matrices<true>(x, values + from * kRingBytes + tile_offset(lane & 15, unit));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t(&to)[4] = kBlocks == 1 ? v.x[keys + n][0] : v.x[keys][block + n];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd)
        unpack_codes(__byte_perm(x[2 * n], x[2 * n + 1], odd ? 0x7531 : 0x6420), to[odd],
                     to[odd + 2]);
    }
  }
}

__device__ __forceinline__ void multiply_values(consumer &c, const value_codes &v, uint32_t p_at) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) registers_touch(c.o[b]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kUnitKeys / 16; ++k)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      wgmma_registers<kRows, false>(c.o[b], v.x[k][b], p_at + (k * 32 >> 4), kDescriptorHigh, 1);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) registers_touch(c.o[b]);
}

// What a warp has of its rows goes to shared memory: its columns of O, times `factor`, the top, and
// the sum of its keys.
__device__ __forceinline__ void keep_rows(int group, const float (&factor)[kOwnRows], consumer &c) {
  const int lane = thread_again() & 31, warp = thread_again() / 32 % kGroupWarps;
  float *const output = (float *)shared + group * (kRows * kPitch);
  float2 *const results = (float2 *)(shared + lay_out(0).results) + thread_again() / 32 * kRows;
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2)
      c.sum[n] += __shfl_xor_sync(0xffffffff, c.sum[n], apart);
    if (lane < 4) results[own_row(n)] = make_float2(c.top[n], c.sum[n]);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      *(float2 *)(output + own_row(n) * kPitch + 64 * b + 16 * warp + 2 * (lane / 4)) = make_float2(
          c.o[b][n / 2 * 4 + n % 2] * factor[n], c.o[b][n / 2 * 4 + 2 + n % 2] * factor[n]);
  }
}

// The top and sum of a warpgroup's row. Where it saw none of the keys the sum is 0, and there is no
// top.
__device__ __forceinline__ float2 result_of_row(int group, int row) {
  const float2 *const results =
      (const float2 *)(shared + lay_out(0).results) + group * (kGroupWarps * kRows) + row;
  float2 result = results[0];
#pragma unroll
  for (int i = 1; i < kGroupWarps; ++i) result.y += results[i * kRows].y;
  return result;
}

// The block's rows leave.
__device__ __forceinline__ void store_rows(const fa3_decode_params &p, const block_work &w) {
#pragma unroll 1
  for (int i = threadIdx.x; i < w.rows * kQuads; i += kThreads) {
    const int row = i / kQuads, column = i % kQuads * 4;
    float2 results[kGroups];
    float top = FA3_NO_REFERENCE, sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      results[g] = result_of_row(g, row);
      if (results[g].y != 0.0f) top = max_nan(top, results[g].x);
    }
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (results[g].y == 0.0f) continue;
      const float factor = exp2_unit(exponent_of(results[g].x - top));
      const float4 y =
          *(const float4 *)((const float *)shared + (g * kRows + row) * kPitch + column);
      sum += results[g].y * factor;
      x.x += y.x * factor, x.y += y.y * factor, x.z += y.z * factor, x.w += y.w * factor;
    }
    store_result(p, w, row, column, x, top, sum);
  }
}

// The warp's 16 keys of a tile, if there is one, on their way to a stage of its ring.
template <bool kAlike>
__device__ __forceinline__ void load_tile(const fa3_decode_params &p, const block_work &w, int tile,
                                          uint32_t stage) {
  if (tile < w.units.end - w.units.begin) {
    const int key =
        (w.units.begin + tile) * kUnitKeys + (int)thread_again() / 32 % kGroupWarps * kLoadKeys;
    const place at = load_neighbours(p, w, key, stage);
    const int lane = thread_again() & 31;
    if (!kAlike)
      load_scale(((const lane_scales *)(shared + lay_out(0).scales))[lane / 16], at, stage, lane);
  }
  copy_async_commit();
}

// Tiles of a warpgroup: each kGroups behind the one before it.
template <bool kAlike, bool kDealt>
__device__ __forceinline__ void attend_tiles(const fa3_decode_params &p, const block_work &w,
                                             const layout &m, int group, consumer &c) {
  const uint32_t q_at = uniform(wgmma_descriptor_low(m.q, 0));
  const uint32_t p_tile = m.p + group * kPBytes;
  const uint32_t p_at = uniform(wgmma_descriptor_low(p_tile, 0));
  uint32_t codes = ring_of_warp(m);  // the stage in hand
#pragma unroll 1
  for (int tile = group;
       uniform(tile < work_again<kDealt>(w, m).units.end - work_again<kDealt>(w, m).units.begin);
       tile += kGroups) {
    copy_async_wait<kStages - 1>();
    __syncwarp();
    multiply_keys(c, codes, q_at);
    float of_key[2], of_value[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t at = codes + kScalesAt + ((thread_again() & 31) / 4 + 8 * r) * 4;
      of_key[r] = kAlike ? 1.0f : load_shared_float(at);
      of_value[r] = kAlike ? 1.0f : load_shared_float(at + kLoadKeys * 4);
    }
    adjust_scores<kAlike>(p, work_again<kDealt>(w, m), tile, m.factors, of_key, c);
    // Behind this barrier all warps' codes are there, and nobody reads the probabilities of the
    // tile before.
    if (named_barrier_any(kBarrierGroup + group, 128, exceeds_room<kAlike>(c, m)))
      follow_maxima<kAlike>(m, group, c);
    exponentiate<kAlike>(m, group, of_value, c);
    store_probabilities(c, p_tile);
    value_codes v;
    read_values(v, codes + kValuesAt);
    named_barrier_sync(kBarrierGroup + group, 128);
    multiply_values(c, v, p_at);
    // All warps had read this stage before they met.
    load_tile<kAlike>(p, work_again<kDealt>(w, m), tile + kStages * kGroups, codes);
    codes += kStageBytes;
    if (codes == ring_of_warp(m) + kRingBytes) codes -= kRingBytes;
  }
}

// A tile of rows. With kDealt all have met once for it before, time 0, and meet once more behind
// it.
template <bool kDealt>
__device__ __forceinline__ void attend(const fa3_decode_fp8_params &fp8, const block_work &w,
                                       const layout &m, int group) {
  if (threadIdx.x < 32 && threadIdx.x % 16 == 0)
    ((lane_scales *)(shared + lay_out(0).scales))[threadIdx.x / 16] = find_scales(fp8, w);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kStages; ++i)
    load_tile<false>(fp8.decode, w, group + i * kGroups, ring_of_warp(m) + i * kStageBytes);
  let_next_grid_launch();
  if (threadIdx.x < 2 * kRows) fit_queries(fp8, w, m);
  __syncthreads();
  consumer c;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) c.o[b][i] = 0.0f;
  const float of_keys = scale_of_head(fp8.decode, fp8.key_scale, w);
  const float of_values = scale_of_head(fp8.decode, fp8.value_scale, w);
  // A factor that is not positive would turn the order of scores round, or make NaN of -inf.
  bool differ = fp8.decode.softcap_log2 != 0.0f || !(of_keys > 0.0f) ||
                !(of_values >= 0.0f && of_values <= FLT_MAX);
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) {
    c.top[n] = FA3_NO_REFERENCE;
    c.sum[n] = 0.0f;
    c.unit[n] = kNoUnit;
    differ |= !(load_shared_float(m.whole_factors + own_row(n) * 4) > 0.0f);
  }
  float factor[kOwnRows];  // of O
  // Where results will lie each thread has a place meanwhile, for what there is no register for.
  store_shared_float(m.results + 8 * thread_again(), of_values);
  if (!named_barrier_any(kBarrierGroup + group, 128, differ)) {
    attend_tiles<true, kDealt>(fp8.decode, w, m, group, c);
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
      c.top[n] = __fmul_rn(c.top[n], load_shared_float(m.whole_factors + own_row(n) * 4));
      factor[n] = load_shared_float(m.results + 8 * thread_again());
    }
  } else {
    attend_tiles<false, kDealt>(fp8.decode, w, m, group, c);
#pragma unroll
    for (int n = 0; n < kOwnRows; ++n) {
      factor[n] = exp2_unit(c.unit[n]);
      c.sum[n] *= factor[n];
    }
  }
  copy_async_wait_all();
  meet(m, kDealt);  // nobody reads codes any more
  keep_rows(group, factor, c);
  meet(m, kDealt + 1);
  store_rows(fp8.decode, work_again<kDealt>(w, m));
}

extern "C" __global__ void __launch_bounds__(kThreads, FA3_SPECULATIVE_FP8_BLOCKS)
    speculative_fp8(const __grid_constant__ fa3_decode_fp8_params p) {
  // Opaque, so that the compiler keeps it in a register instead of finding out again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const layout m = lay_out(base);
  block_work &w = *(block_work *)(shared + lay_out(0).work);
  if (threadIdx.x == 0) {
    static_cast<work &>(w) = find_work(p.decode);  // where lengths are known, before the wait
    w.common = find_common_keys(p.decode, w);
    if (w.sequence.mask.queries <= p.few_queries) w.rows = 0;
    barrier_init(m.met, kThreads);
  }
  wait_for_prior_grids();
  __syncthreads();
  if (w.rows <= 0) return;
  attend<false>(p, w, m, uniform(threadIdx.x / 128));
}

// With keys dealt out. Where things are is found out anew for each tile: there are no registers to
// keep it in.
extern "C" __global__ void __launch_bounds__(kThreads, FA3_SPECULATIVE_FP8_BLOCKS)
    speculative_fp8_dealt(const __grid_constant__ fa3_decode_fp8_params p) {
  const layout at_begin = lay_out((uint32_t)__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) barrier_init(at_begin.met, kThreads);
  begin_deal<kThreads / 32>(p.decode, (deal *)(shared + lay_out(0).deal));
#pragma unroll 1
  for (;;) {
    uint32_t base;
    asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
    const layout m = lay_out(base);
    block_work &w = at_shared<block_work>(m.work);
    if (thread_again() == 0) {
      take_piece(p.decode, at_shared<deal>(m.deal), w);
      w.common = find_common_keys(p.decode, w);
    }
    meet(m, 0);
    if (uniform(w.rows <= 0)) return;
    attend<true>(p, w, m, uniform(thread_again() / 128));
    meet(m, 3);  // others still read what the next tile takes the place of
  }
}
