// Attention of many queries to a cache of E4M3 codes: a chunk of a prompt, or more queries than a
// block of decode_fp8.cu has rows.
//
// A block has 128 rows (queries times query heads of a key head) and a part of the sequence's keys.
// Four or eight warps load codes and make float16 of them (chunk_fp8_load.cuh); two consumer
// warpgroups of 64 rows each multiply them (WGMMA). While one has its softmax, the other's products
// run. Where there are no more than 64 rows both have these, and take tiles of keys in turns.
// Queries become float16 as in decode_fp8.cu: bfloat16's are multiplied by a power of 2 of their
// row's own. Scales of keys multiply scores, those of values probabilities, one for each row
// whatever they are shared by.
//
// Probabilities times scales of values are float16 too: a row has them, and O and its sum, in units
// of its own, which follow where they are beyond kMostUnits. Where all keys and values of a head
// have one scale they cost nothing: the keys' is part of the rows', the values' of O's unit.
//
// Compile with -DFA3_E4M3=1, FA3_TILE_Q, FA3_TILE_K, FA3_HEAD_DIM and FA3_STAGES.
#include "chunk_fp8_load.cuh"
#include "chunk_queries.cuh"
#include "chunk_units.cuh"
#include "decode_store.cuh"

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kBlockBytes>();

// What a consumer has in hand. Its thread has rows 16 warp + lane / 4 and the one 8 on, of 64.
struct consumer {
  uint32_t q[kQInRegisters ? kHeadDim / 4 : 1];  // Q, as the first product takes it
  uint32_t q_at;                                 // or its descriptor
  float s[kUnitKeys / 2];                        // S, then P
  uint32_t p[kUnitKeys / 4];                     // P, as the second product takes it
  float o[kHeadDim / 2];
  // Of a row: its top, a logit, or (keys alike) a product; the sum of P of this
  // thread's keys; the unit of P, O and that sum, as an exponent of 2; the factor that makes logits
  // of products.
  float top[2], sum[2], unit[2], factor[2];
  float room[2];  // where keys are alike: how far products may exceed the top
};

__device__ __forceinline__ int consumer_warp(void) {
  return threadIdx.x / 32 % 4;
}

// A warp's 16 rows of queries become float16, in shared memory, and their factors.
__device__ __forceinline__ void fit_queries(const fa3_decode_fp8_params &p, const block_work &w,
                                            int warpgroup, uint32_t tile, consumer &c) {
  const int lane = threadIdx.x & 31, row = consumer_warp() * kWarpRows + lane / 2;
  const int first = (lane & 1) * (kHeadDim / 2);
  const half_row half = fit_half_row(p, w, first_row_of(w, warpgroup) + row, first);
#pragma unroll
  for (int i = 0; i < kVectorsOfLane; ++i)
    store_shared_vector(tile + place_in_tile<kGroupRows>(row, first / 8 + i), half.pairs[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    c.factor[r] = __shfl_sync(0xffffffff, half.factor, 2 * (lane / 4 + 8 * r));
}

__device__ __forceinline__ void take_queries(const layout &m, uint32_t tile, int warpgroup,
                                             consumer &c) {
  if constexpr (kQInRegisters) {
    __syncwarp();
    const int lane = threadIdx.x & 31, row = consumer_warp() * kWarpRows + (lane & 15);
#pragma unroll
    for (int k = 0; k < kHeadDim; k += 16)
      load_matrices<false>(*(uint32_t(*)[4])(c.q + k / 4),
                           tile + place_in_tile<kGroupRows>(row, k / 8 + lane / 16));
    barrier_arrive(m.queries_taken);
  } else {
    c.q_at = uniform(wgmma_descriptor_low(tile, 0));
    fence_proxy_async();
    named_barrier_sync(kBarrierGroup + warpgroup, 128);
  }
}

// S = Q K^T.
__device__ __forceinline__ void issue_scores(consumer &c, uint32_t keys) {
  const uint32_t k_at = uniform(wgmma_descriptor_low(keys, 0));
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    const int block = k / kBlockColumns, inside = k % kBlockColumns * 2;
    const uint32_t from = k_at + ((block * kUnitKeys * kBlockBytes + inside) >> 4);
    if constexpr (kQInRegisters)
      wgmma_registers<kUnitKeys, false>(c.s, c.q + k / 4, from, kDescriptorHigh, k > 0);
    else
      wgmma_shared<kUnitKeys>(c.s, c.q_at + ((block * kGroupRows * kBlockBytes + inside) >> 4),
                              from, kDescriptorHigh, k > 0);
  }
  wgmma_commit();
}

// O += P V.
__device__ __forceinline__ void issue_output(consumer &c, uint32_t values) {
  const uint32_t v_at = uniform(wgmma_descriptor_low(values, kUnitKeys * kBlockBytes));
#pragma unroll
  for (int k = 0; k < kUnitKeys; k += 16)
    wgmma_registers<kHeadDim>(c.o, c.p + k / 4, v_at + ((k * kBlockBytes) >> 4), kDescriptorHigh,
                              1);
  wgmma_commit();
}

// Products become logits: the scales, the cap. Where keys have one scale and there is no cap they
// stay as they are. And -inf where a row does not see the key.
template <bool kAlike>
__device__ __forceinline__ void adjust_scores(const fa3_decode_params &p, const block_work &w,
                                              uint32_t t, uint32_t scales, consumer &c) {
  const int first = 2 * (thread_again() & 3);
  if (!kAlike) {
#pragma unroll
    for (int i = 0; i < kUnitKeys / 2; i += 4) {
      const float2 of_key = load_shared_pair(scales + (2 * i + first) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        c.s[i + 2 * r] = __fmul_rn(c.s[i + 2 * r], __fmul_rn(c.factor[r], of_key.x));
        c.s[i + 2 * r + 1] = __fmul_rn(c.s[i + 2 * r + 1], __fmul_rn(c.factor[r], of_key.y));
      }
    }
    if (p.softcap_log2 != 0.0f)
#pragma unroll
      for (int i = 0; i < kUnitKeys / 2; ++i) c.s[i] = cap_score(p, c.s[i]);
  }
  const int key = (w.units.begin + (int)t) * kUnitKeys;
  if (key >= w.common.begin && key + kUnitKeys <= w.common.end) return;
  const int thread = thread_again() - 32 * kLoaders;
  const int row = first_row_of(w, thread / 128) + thread / 32 % 4 * kWarpRows + (thread & 31) / 4;
  fa3_range seen[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    seen[r] = fa3_visible_keys(&w.sequence.mask, divide(w.first_row + row + 8 * r, p.group));
#pragma unroll
  for (int i = 0; i < kUnitKeys / 2; ++i) {
    const int k = key + i / 4 * 8 + first + i % 2;
    if (k < seen[i / 2 % 2].begin || k >= seen[i / 2 % 2].end) c.s[i] = -INFINITY;
  }
}

// What makes exponents of 2 of differences of a row's scores.
template <bool kAlike>
__device__ __forceinline__ float exponent_factor(const consumer &c, int r) {
  return kAlike ? c.factor[r] * kLog2e : kLog2e;
}

__device__ __forceinline__ void rescale_output(consumer &c, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) c.o[i] *= factor[i / 2 % 2];
}

// A row's top stays while no score exceeds this. Where keys differ room for more gains nothing.
template <bool kAlike>
__device__ __forceinline__ float limit_of_top(const consumer &c, int r) {
  return kAlike ? c.top[r] + c.room[r] : c.top[r];
}

// The top of a row follows scores beyond its limit.
template <bool kAlike>
__device__ __forceinline__ void follow_maxima(consumer &c, const float (&greatest)[2]) {
  float factor[2] = {1.0f, 1.0f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = row_maximum(greatest[r]);
    if (top <= limit_of_top<kAlike>(c, r)) continue;  // not of NaN
    const float exponents = exponent_factor<kAlike>(c, r);
    factor[r] = raise_top<kAlike>(top, exponents, c.top[r], c.unit[r], c.sum[r]);
  }
  if (kAlike || __any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f))
    rescale_output(c, factor);
}

// Units follow what multiplies values.
__device__ __forceinline__ void follow_units(consumer &c, const float (&most)[2]) {
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) factor[r] = follow_unit(row_maximum(most[r]), c.unit[r], c.sum[r]);
  rescale_output(c, factor);
#pragma unroll
  for (int i = 0; i < kUnitKeys / 2; ++i) c.s[i] *= factor[i / 2 % 2];
}

// Scores become what multiplies values.
template <bool kAlike>
__device__ __forceinline__ void exponentiate(uint32_t scales, consumer &c) {
  float greatest[2];
  thread_maxima_by_integers(c.s, greatest);
  correct_maxima(c.s, greatest);
  bool beyond = false;
#pragma unroll
  for (int r = 0; r < 2; ++r)  // also for NaN
    beyond |= !(greatest[r] <= limit_of_top<kAlike>(c, r));
  if (__any_sync(0xffffffff, beyond)) follow_maxima<kAlike>(c, greatest);
  if (kAlike) {
    const float factor[2] = {exponent_factor<true>(c, 0), exponent_factor<true>(c, 1)};
#pragma unroll
    for (int i = 0; i < kUnitKeys / 2; ++i) {
      const int r = i / 2 % 2;
      c.s[i] = exp2_unit(__fmul_rn(c.s[i] - c.top[r], factor[r]));
      c.sum[r] += c.s[i];
    }
    return;
  }
  const int first = 2 * (thread_again() & 3);
#pragma unroll
  for (int i = 0; i < kUnitKeys / 2; i += 4) {
    const float2 of_value = load_shared_pair(scales + (2 * i + first) * 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = exp2_unit(fmaf(c.s[i + j] - c.top[j / 2], kLog2e, -c.unit[j / 2]));
      c.sum[j / 2] += x;
      c.s[i + j] = x * (j % 2 == 0 ? of_value.x : of_value.y);
    }
  }
  float most[2];  // none is negative
  thread_maxima_by_integers(c.s, most);
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) outgrown |= !(most[r] <= (c.unit[r] == kNoUnit ? 0.0f : kMostUnits));
  if (__any_sync(0xffffffff, outgrown)) follow_units(c, most);
}

// What a consumer warp has of its rows, of the tiles that it took, goes to shared memory.
__device__ __forceinline__ void keep_rows(const float (&factor)[2], consumer &c) {
  const int lane = thread_again() & 31;
  const int first = (thread_again() / 32 - kLoaders) * kWarpRows;
  float *const output = (float *)shared + first * kPitch;
  float2 *const results = (float2 *)(shared + lay_out(0).results) + first;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    c.sum[r] += __shfl_xor_sync(0xffffffff, c.sum[r], 1);
    c.sum[r] += __shfl_xor_sync(0xffffffff, c.sum[r], 2);
    if ((lane & 3) == 0) results[row] = make_float2(c.top[r], c.sum[r]);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j)
      *(float2 *)(output + row * kPitch + 8 * j + 2 * (lane & 3)) =
          make_float2(c.o[4 * j + 2 * r] * factor[r], c.o[4 * j + 2 * r + 1] * factor[r]);
  }
}

// Four columns of a row of one consumer, or what both have of them as one.
struct row_result {
  float4 x;
  float top, sum;
};

__device__ __forceinline__ row_result result_of_row(int row, int column) {
  const float2 result = ((const float2 *)(shared + lay_out(0).results))[row];
  return {*(const float4 *)((const float *)shared + row * kPitch + column), result.x, result.y};
}

// A consumer that saw none of a row's keys has a sum of 0, and no top.
__device__ __forceinline__ row_result merge_results(const row_result &a, const row_result &b) {
  if (a.sum == 0.0f) return b;
  if (b.sum == 0.0f) return a;
  const float top = max_nan(a.top, b.top);
  const float x = exp2_unit(exponent_of(a.top - top)), y = exp2_unit(exponent_of(b.top - top));
  return {make_float4(a.x.x * x + b.x.x * y, a.x.y * x + b.x.y * y, a.x.z * x + b.x.z * y,
                      a.x.w * x + b.x.w * y),
          top, a.sum * x + b.sum * y};
}

// The block's rows leave. Where consumers took turns, both have some of each.
__device__ __forceinline__ void store_rows(const fa3_decode_params &p, const block_work &w) {
#pragma unroll 1
  for (int i = thread_again() - 32 * kLoaders; i < w.rows * kQuads; i += 128 * kConsumers) {
    const int row = i / kQuads, column = i % kQuads * 4;
    row_result result = result_of_row(row, column);
    if (take_turns(w)) result = merge_results(result, result_of_row(row + kGroupRows, column));
    store_result(p, w, row, column, result.x, result.top, result.sum);
  }
}

// The scores of tile t of keys and, kBeside, O of the tile before. Then P of this one: the other
// consumer's products run meanwhile. To compute P beside the product of the tile before, as
// forward.cu does, is no faster here.
template <bool kAlike, bool kBeside>
__device__ __forceinline__ void step(const fa3_decode_params &p, const block_work &w,
                                     const layout &m, uint32_t t, consumer &c) {
  ring_wait_full(m.k, t);
  // What scores there were is dead.
#pragma unroll
  for (int i = 0; i < kUnitKeys / 2; ++i) asm volatile("" : "=f"(c.s[i]));
  if (kBeside) registers_touch(c.o);
  wgmma_fence();
  issue_scores(c, ring_tile(m.k, t));
  if (kBeside) issue_output(c, ring_tile(m.v, t - 1));
  wgmma_wait<0>();
  registers_touch(c.s);
  if (kBeside) {
    registers_touch(c.o);
    barrier_arrive(ring_empty(m.v, t - 1));
  }
  adjust_scores<kAlike>(p, again(w), t, m.key_scales + t % kTiles * kTileScaleBytes, c);
  barrier_arrive(ring_empty(m.k, t));
  ring_wait_full(m.v, t);
  exponentiate<kAlike>(m.value_scales + t % kTiles * kTileScaleBytes, c);
#pragma unroll
  for (int i = 0; i < kUnitKeys / 4; ++i) c.p[i] = pack_fp16(c.s[2 * i], c.s[2 * i + 1]);
}

// O += P V, by itself.
__device__ __forceinline__ void multiply_values(const layout &m, uint32_t t, consumer &c) {
  registers_touch(c.o);
  wgmma_fence();
  issue_output(c, ring_tile(m.v, t));
  wgmma_wait<0>();
  registers_touch(c.o);
}

// Tiles in turns are each done with at once: their values would else be in hand until the next
// keys, which are behind the other consumer's.
template <bool kAlike>
__device__ __forceinline__ void attend_tiles(const fa3_decode_params &p, const block_work &w,
                                             const layout &m, const tile_turns &turns,
                                             consumer &c) {
#pragma unroll 1
  for (uint32_t t = turns.first;; t += turns.step) {
    step<kAlike, false>(p, w, m, t, c);
    if (kTiles == 1 || turns.step == 1) break;
    multiply_values(m, t, c);
    barrier_arrive(ring_empty(m.v, t));
    if ((int)t + turns.step >= turns.end) return;
  }
#pragma unroll 1
  for (uint32_t t = 1; (int)t < turns.end; ++t) step<kAlike, true>(p, w, m, t, c);
  multiply_values(m, turns.end - 1, c);
}

__device__ __forceinline__ void attend(const fa3_decode_fp8_params &fp8, const block_work &w,
                                       const layout &m, int warpgroup) {
  consumer c;
  const uint32_t tile = m.q + warpgroup * kQBytes;
  fit_queries(fp8, w, warpgroup, tile, c);
  take_queries(m, tile, warpgroup, c);
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) c.o[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    c.top[r] = FA3_NO_REFERENCE;
    c.sum[r] = 0.0f;
    c.unit[r] = kNoUnit;
  }
  const float of_keys = scale_of_head(fp8.decode, fp8.key_scale, w);
  const float of_values = scale_of_head(fp8.decode, fp8.value_scale, w);
  // A factor that is not positive would turn the order of scores round, or make NaN of -inf.
  const bool alike =
      !named_barrier_any(kBarrierGroup + warpgroup, 128,
                         fp8.decode.softcap_log2 != 0.0f || !(of_keys > 0.0f) ||
                             !(of_values >= 0.0f && of_values <= FLT_MAX) ||
                             !(c.factor[0] * of_keys > 0.0f) || !(c.factor[1] * of_keys > 0.0f));
  const tile_turns turns = find_turns(w, warpgroup);
  float factor[2];  // of O
  if (turns.first < turns.end && alike) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      c.factor[r] = __fmul_rn(c.factor[r], of_keys);
      c.room[r] = room_of_products(c.factor[r]);
    }
    attend_tiles<true>(fp8.decode, w, m, turns, c);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      c.top[r] = __fmul_rn(c.top[r], c.factor[r]);
      factor[r] = scale_of_head(fp8.decode, fp8.value_scale, again(w));
    }
  } else if (turns.first < turns.end) {
    attend_tiles<false>(fp8.decode, w, m, turns, c);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2_unit(c.unit[r]);
      c.sum[r] *= factor[r];
    }
  } else {
    factor[0] = factor[1] = 1.0f;
  }
  named_barrier_sync(kBarrierConsumers, 128 * kConsumers);  // nobody reads a tile any more
  keep_rows(factor, c);
  named_barrier_sync(kBarrierConsumers, 128 * kConsumers);
  store_rows(fp8.decode, again(w));
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    chunk_fp8(const __grid_constant__ fa3_decode_fp8_params p) {
  // Opaque, so that the compiler keeps it in a register instead of finding out again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const layout m = lay_out(base);
  block_work &w = *(block_work *)(shared + lay_out(0).work);
  if (threadIdx.x == 0) {
    static_cast<work &>(w) = find_work(p.decode);  // where lengths are known, before the wait
    w.common = find_common_keys(p.decode, w);
    if (w.sequence.mask.queries <= p.few_queries) w.rows = 0;
    const int readers = take_turns(w) ? 128 : 128 * kConsumers;
    ring_init(m.k, 32 * kLoadersOfTile, readers);
    ring_init(m.v, 32 * kLoadersOfTile, readers);
    barrier_init(m.queries_taken, 128 * kConsumers);
  }
  wait_for_prior_grids();
  __syncthreads();
  if (w.rows <= 0) return;
  if (threadIdx.x < 32 * kLoaders) {
    registers_give_back<kProducerRegisters>();
    load(p, w, m);
    let_next_grid_launch();
  } else {
    registers_take<kConsumerRegisters>();
    attend(p, w, m, (threadIdx.x - 32 * kLoaders) / 128);
  }
}
