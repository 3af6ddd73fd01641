// The forward pass on Hopper from E4M3 codes: O = softmax(scale Q K^T) V, where a row of Q, K or V
// is codes times a scale.
//
// The structure is forward.cu's, which see first. What is different:
//   - A consumer waits for its scores at once, and the other consumers compute meanwhile. So P
//     takes the registers of S, and there are enough of them for longer tiles of keys, or for a
//     third consumer.
//   - P is multiplied with V in parts: each while the next is made.
//   - V is transposed on the way in (forward_fp8_load.cuh), as FP8 products take operands that run
//     along K only.
//   - P are codes too, of 2^7 times the probability: the greatest is exact, and what is 2^-13 of it
//     is still a normal number.
//   - The matrix unit's sums keep about 13 bits. So every kPeriod tiles O joins float32 sums, which
//     a thread keeps for itself in memory.
//   - The scales of a row of Q and of a tile of K join the softmax's scale. O is summed in units of
//     V's greatest scale so far, and P of a tile of smaller ones is multiplied.
#include "forward_fp8_load.cuh"
#include "forward_fp8_softmax.cuh"
#include "forward_fp8_store.cuh"
#include "wgmma_fp8.cuh"

constexpr float kLn2 = 0.69314718f;  // references are exponents of 2

constexpr int kPartKeys = 32;                     // whose P one product takes
constexpr int kTurnKey = kTileK - 2 * kPartKeys;  // a turn begins with this one's product

constexpr uint32_t kCodesHigh = wgmma_descriptor_high<kCodes>();
constexpr uint32_t kKeysHigh = wgmma_descriptor_high<kKeys>();

// What a consumer has in hand.
struct consumer {
  int warpgroup;
  bool hands_back;         // this lane, tiles of K
  float s[kTileK / 2];     // S, then P
  uint32_t p[kTileK / 8];  // P, as the second product takes it
  softmax_rows rows;
  results out;
  bool accumulate;    // O holds a product of this tile already
  bool kept;          // sums of this tile are kept in memory
  float scale[2];     // of the scores in hand
  float value_scale;  // of the tile in hand
  float unit;         // the greatest of V's scales so far
  uint32_t used;      // tiles of K and V taken
};

__device__ __forceinline__ void take_turn(int warpgroup) {
  named_barrier_sync(kBarrierTurn + warpgroup, 256);
}

__device__ __forceinline__ void pass_turn(int warpgroup) {
  named_barrier_arrive(kBarrierTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
}

// work_of, without a register for the address.
__device__ __forceinline__ const work &work_again(uint32_t t) {
  asm volatile("" : "+r"(t));
  return work_of(t);
}

// S = Q K^T, of codes.
__device__ __forceinline__ void issue_scores(consumer &c, uint32_t q_at, uint32_t k_at) {
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 32) {
    const int chunk = k / kCodes, inside = k % kCodes;
    wgmma_fp8_shared<kTileK>(c.s, q_at + ((chunk * kRows * kCodes + inside) >> 4),
                             k_at + ((chunk * kTileK * kCodes + inside) >> 4), kCodesHigh, k > 0);
  }
  wgmma_commit();
}

// O += P V, or O = P V, of a part of the tile's keys: kPartKeys from key `k` on.
__device__ __forceinline__ void issue_output(consumer &c, uint32_t v_at, int k) {
  const int chunk = k / kKeys, inside = k % kKeys;
  wgmma_fp8_registers<kHeadDimV>(c.out.o, c.p + k / 8,
                                 v_at + ((chunk * kHeadDimV * kKeys + inside) >> 4), kKeysHigh,
                                 k > 0 || c.accumulate);
  wgmma_commit();
}

// Where a thread keeps its sums: four in a row, and the other threads' between them. Loads and
// stores are volatile, or the compiler would fetch them all before it uses one.
struct kept_sums {
  uint32_t in_shared;
  float *in_global;
};

__device__ __forceinline__ kept_sums sums_of(const fa3_forward_fp8_params &fp8, const layout &m,
                                             int warpgroup) {
  const int at = warpgroup * kSumBytes + (thread_again() & 127) * 16;
  if (kSharedSums) return {m.sums + at, nullptr};
  return {0, fp8.sums + blockIdx.x * (kWarpgroups * kSumBytes / 4) + at / 4};
}

// And what they are counted in: the references of its rows, and V's unit.
__device__ __forceinline__ uint32_t units_of(const layout &m, int warpgroup) {
  return m.units + (warpgroup * 128 + (thread_again() & 127)) * 16;
}

// What sums in memory are to be multiplied by, to be of the units of those in hand.
__device__ __forceinline__ void find_kept_factor(const layout &m, const consumer &c,
                                                 float (&factor)[2]) {
  const float4 then = load_shared_floats(units_of(m, c.warpgroup));
  const float units = then.z == c.unit ? 1.0f : then.z * reciprocal_unit(c.unit);
  factor[0] = exp2_unit(then.x - c.rows.reference[0]) * units;
  factor[1] = exp2_unit(then.y - c.rows.reference[1]) * units;
}

// What is in memory, multiplied by `factor`, joins O.
__device__ __forceinline__ void add_kept(const kept_sums &sums, int i, const float (&factor)[2],
                                         float (&o)[kHeadDimV / 2]) {
  const float4 x = kSharedSums ? load_shared_floats(sums.in_shared + i * 2048)
                               : load_global_floats(sums.in_global + i * 512);
  o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
  o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
  o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
  o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
}

// O moves to memory, and the next product begins anew.
__device__ __forceinline__ void keep_output(const fa3_forward_fp8_params &fp8, const layout &m,
                                            consumer &c) {
  const kept_sums sums = sums_of(fp8, m, c.warpgroup);
  if (c.kept) {
    float factor[2];
    find_kept_factor(m, c, factor);
#pragma unroll
    for (int i = 0; i < kHeadDimV / 8; ++i) {
      if (i % 8 == 0) __syncwarp();  // or more would be fetched at once than there is room for
      add_kept(sums, i, factor, c.out.o);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadDimV / 8; ++i) {
    if (kSharedSums)
      store_shared_floats(sums.in_shared + i * 2048, c.out.o + 4 * i);
    else
      store_global_floats(sums.in_global + i * 512, c.out.o + 4 * i);
  }
  const float units[4] = {c.rows.reference[0], c.rows.reference[1], c.unit, 0.0f};
  store_shared_floats(units_of(m, c.warpgroup), units);
  c.kept = true;
  c.accumulate = false;
}

// A tile has seen its last product.
__device__ __forceinline__ void store_codes_tile(const fa3_forward_fp8_params &fp8, const layout &m,
                                                 uint32_t t, consumer &c) {
  const work &w = work_again(t);
  if (c.kept) {
    float factor[2];
    find_kept_factor(m, c, factor);
    const kept_sums sums = sums_of(fp8, m, c.warpgroup);
#pragma unroll
    for (int i = 0; i < kHeadDimV / 8; ++i) {
      if (i % 2 == 0)
        __syncwarp();  // or more would be fetched at once than there are registers for
      add_kept(sums, i, factor, c.out.o);
    }
  }
  finish_rows(fp8.forward, w, c.warpgroup, c.rows, kLn2, c.out, thread_again());
  c.out.average[0] *= c.unit;
  c.out.average[1] *= c.unit;
  if (fp8.output == FA3_OUTPUT_FP32)
    store_output_floats(fp8.forward, w, c.warpgroup, c.out, thread_again());
  else if (fp8.output == FA3_OUTPUT_BF16)
    store_output<true>(fp8.forward, m, w, c.warpgroup, c.out, thread_again());
  else
    store_output<false>(fp8.forward, m, w, c.warpgroup, c.out, thread_again());
  store_lse(fp8.forward, w, c.warpgroup, c.out, thread_again());
  finish_work(m, t);
}

// Of the tile in hand, in shared memory.
__device__ __forceinline__ uint32_t scales_at(const layout &m, const consumer &c) {
  return m.scales + c.used % kScaleSlots * kScaleBytes;
}

// Where a thread keeps the scales of its rows, that scores are multiplied by beside the keys'.
__device__ __forceinline__ uint32_t row_scales_at(const layout &m, int warpgroup) {
  return m.row_scales + (warpgroup * 128 + (thread_again() & 127)) * 8;
}

// The scales of the tile in hand, while its scores are computed. One lane reads them for its warp,
// the one that hands the tile back.
__device__ __forceinline__ void find_scales(const layout &m, consumer &c) {
  const float2 scales = load_shared_pair_if((thread_again() & 31) == 0, scales_at(m, c));
  const float key_scale = __shfl_sync(0xffffffff, scales.x, 0);
  c.value_scale = __shfl_sync(0xffffffff, scales.y, 0);
  const float2 row_scale = load_shared_pair(row_scales_at(m, c.warpgroup));
  // A scale of 0 would make a masked score NaN.
  c.scale[0] = max_nan(row_scale.x * key_scale, 1e-37f);
  c.scale[1] = max_nan(row_scale.y * key_scale, 1e-37f);
}

// Multiplies scores or probabilities by each key's of the two mixed scales.
__device__ __forceinline__ void apply_mixed_scales(consumer &c, uint32_t scales) {
#pragma unroll
  for (int i = 0; i < kTileK / 2; ++i)
    c.s[i] *= load_shared_float(scales + 8 * (i / 4 * 8 + 2 * (thread_again() & 3) + i % 2));
}

// Scales of single keys, cap and mask, where they are needed.
__device__ __forceinline__ void adjust_scores(const fa3_forward_fp8_params &fp8, const layout &m,
                                              const work &w, consumer &c, int n) {
  const fa3_forward_params &params = fp8.forward;
  if (mixed_scales(fp8, w)) apply_mixed_scales(c, scales_at(m, c) + 8);
  if (params.softcap_log2 != 0.0f) {
    const float inverse = reciprocal_unit(params.scale.log2);
    // In parts, each behind a question (always no) that the compiler can't answer: it would take
    // registers for all at once.
    constexpr int kPart = kTileK / 8;
#pragma unroll
    for (int i = 0; i < kTileK / 2; i += kPart) {
      if (thread_again() < 128) continue;
#pragma unroll
      for (int j = i; j < i + kPart; ++j) c.s[j] *= c.scale[j / 2 % 2] * inverse;
      cap_scores(reinterpret_cast<float(&)[kPart]>(c.s[i]), params.softcap_log2);
    }
    c.scale[0] = c.scale[1] = params.scale.log2;
  }
  const fa3_range whole = w.warpgroup[c.warpgroup].whole;
  if (n >= whole.begin && n < whole.end) return;
  fa3_range seen[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    seen[r] = fa3_visible_keys(&w.sequence.mask,
                               find_row(params, w, c.warpgroup, r, thread_again()).query);
  mask_scores(c.s, seen, n * kTileK + 2 * (thread_again() & 3));
}

// A tile of K has been read for the last time, its scales, and the mixed ones of the tile before
// it: those by all lanes, and then each of them says so.
__device__ __forceinline__ void release_keys(const layout &m, const consumer &c) {
  if (c.hands_back) barrier_arrive(ring_empty(m.k, c.used));
}

// A tile of keys that only other consumers' rows see: hand it back, and keep the turns in step.
__device__ __forceinline__ void pass_over(const layout &m, consumer &c) {
  ring_wait_full(m.k, c.used);
  release_keys(m, c);
  ring_wait_full(m.v_transposed, c.used);
  ring_release(m.v_transposed, c.used);
  ++c.used;
  take_turn(c.warpgroup);
  pass_turn(c.warpgroup);
}

__device__ __forceinline__ void find_row_scales(const fa3_forward_fp8_params &fp8, const layout &m,
                                                const work &w, int warpgroup) {
  const int *starts = fp8.forward.sequences.cu_seqlens_q;
  float scale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const output_row row = find_row(fp8.forward, w, warpgroup, r, thread_again());
    scale[r] = fp8.forward.scale.log2;
    if (row.stored) scale[r] *= scale_of(fp8.query_scale, w.batch, row.head, row.query, starts);
  }
  store_shared_pair(row_scales_at(m, warpgroup), scale[0], scale[1]);
}

// What V's scale in the tile in hand is of O's unit, as an exponent of 2: no more than 0.
__device__ __forceinline__ float value_exponent(const consumer &c) {
  const float share = c.value_scale == c.unit ? 1.0f : c.value_scale * reciprocal_unit(c.unit);
  return max_nan(log2_unit(share), -60.0f);
}

// For scores beyond a bound, or a greater scale of V: references and units follow, and O with them.
__device__ __forceinline__ void follow(consumer &c, float (&top)[2], float (&shift)[2]) {
  float factor[2];
  correct_maxima(c.s, top);
  bool grown = softmax_follow_codes(top, c.rows, c.scale, factor);
  if (!(c.value_scale <= c.unit)) {
    const float shrink = c.unit * reciprocal_unit(c.value_scale);
    factor[0] *= shrink;
    factor[1] *= shrink;
    c.unit = c.value_scale;
    grown = true;
  }
  if (grown && c.accumulate) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] *= factor[i / 2 % 2];
  }
  shift[0] = c.rows.reference[0];
  shift[1] = c.rows.reference[1];
  softmax_subtract_large_codes(c.s, c.rows, c.scale, shift);
}

// The scores of tile n of keys, P from them, and its product with the values: of a part of the keys
// while P of the next is made. A turn begins with the last but one of these products, and ends when
// the next scores are issued.
template <bool kAdjust>
__device__ __forceinline__ void step(const fa3_forward_fp8_params &fp8, const layout &m,
                                     consumer &c, uint32_t t, int n) {
  asm volatile("" : "+r"(c.used));
  if (n % kPeriod == kPeriod - 1 && c.accumulate) keep_output(fp8, m, c);
  const auto q = ring_beside(m.q, c.warpgroup);
  const uint32_t q_at = uniform(wgmma_descriptor_low(ring_tile(q, 0), 0));
  const uint32_t k_at = uniform(wgmma_descriptor_low(ring_tile(m.k, c.used), 0));
  ring_wait_full(m.k, c.used);
  registers_touch(c.s);
  wgmma_fence();
  issue_scores(c, q_at, k_at);
  pass_turn(c.warpgroup);
  if (!kAdjust) softmax_set_code_bounds(c.rows);
  find_scales(m, c);
  float exponent = 0.0f;
  if (!kAdjust) exponent = value_exponent(c);
  wgmma_wait<0>();
  registers_touch(c.s);
  release_keys(m, c);
  if (n == uniform(work_again(t).warpgroup[c.warpgroup].tiles.begin)) ring_release(q, t);
  if (kAdjust) {
    adjust_scores(fp8, m, work_again(t), c, n);
    softmax_set_code_bounds(c.rows);
    exponent = value_exponent(c);
  }

  float top[2], shift[2] = {c.rows.reference[0], c.rows.reference[1]};
  thread_maxima_by_integers(c.s, top);
  if (softmax_outgrown_codes(top, c.rows, c.scale) || !(c.value_scale <= c.unit)) {
    follow(c, top, shift);
    exponent = value_exponent(c);
  }
  shift[0] -= exponent;
  shift[1] -= exponent;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  softmax_exponents_of_codes(c.s, shift, c.scale);
  if (kAdjust) {
    const bool mixed = mixed_scales(fp8, work_again(t));
    softmax_probabilities(c.s, sum);
    registers_touch(sum);
    registers_touch(c.s);
    c.used = uniform(c.used);  // what follows from it is found anew, not kept in registers
    if (mixed) apply_mixed_scales(c, scales_at(m, c) + 12);
    pack_probabilities(c.s, c.p);
  }
  const uint32_t v_at = uniform(wgmma_descriptor_low(ring_tile(m.v_transposed, c.used), 0));
#pragma unroll
  for (int k = 0; k < kTileK; k += kPartKeys) {
    if (!kAdjust)
      softmax_codes(reinterpret_cast<float(&)[kPartKeys / 2]>(c.s[k / 2]),
                    reinterpret_cast<uint32_t(&)[kPartKeys / 8]>(c.p[k / 8]), sum);
    if (k == 0) {
      ring_wait_full(m.v_transposed, c.used);
      registers_touch(c.out.o);
    }
    if (k == kTurnKey) take_turn(c.warpgroup);
    wgmma_fence();
    issue_output(c, v_at, k);
  }
  const float inverse = exp2_unit(-exponent);
  c.rows.sum[0] = fmaf(sum[0] + sum[2], inverse, c.rows.sum[0]);
  c.rows.sum[1] = fmaf(sum[1] + sum[3], inverse, c.rows.sum[1]);
  c.accumulate = true;
  wgmma_wait<0>();
  registers_touch(c.out.o);
  ring_release(m.v_transposed, c.used);
  ++c.used;
}

// A tile whose rows see no key.
__device__ __forceinline__ void skip_tile(const layout &m, consumer &c, uint32_t t) {
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] = 0.0f;
  ring_release(ring_beside(m.q, c.warpgroup), t);
}

__device__ __forceinline__ void attend(const fa3_forward_fp8_params &fp8, const layout &m,
                                       int warpgroup) {
  consumer c;
  c.warpgroup = warpgroup;
  c.hands_back = (threadIdx.x & 31) == 0 || any_mixed_scales(fp8);
  c.used = 0;
  if (warpgroup == 0) named_barrier_arrive(kBarrierTurn, 256);

  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (uniform(w.last)) break;
    int n = uniform(w.tiles.end) - 1;
    const auto q = ring_beside(m.q, warpgroup);
    c.accumulate = false;
    c.kept = false;
    c.unit = 1e-37f;
    c.rows = {{FA3_NO_REFERENCE, FA3_NO_REFERENCE}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    find_row_scales(fp8, m, w, warpgroup);
    ring_wait_full(q, t);
    const int end = uniform(w.warpgroup[warpgroup].tiles.end);
    const bool empty = uniform(w.warpgroup[warpgroup].tiles.begin) >= end;
    const int stop = max(end, uniform(w.tiles.begin));
    for (; n >= stop; --n) pass_over(m, c);
    if (empty) skip_tile(m, c, t);
    // Most tiles need neither mask nor cap: a loop of their own, without the question.
    take_turn(warpgroup);
    while (!empty && n >= uniform(work_again(t).warpgroup[warpgroup].tiles.begin)) {
      const fa3_range whole = work_again(t).warpgroup[warpgroup].whole;
      const bool asks = fp8.forward.softcap_log2 != 0.0f || mixed_scales(fp8, work_again(t));
      if (!asks && n >= whole.begin && n < whole.end)
        for (const int begin = whole.begin; n >= begin; --n) step<false>(fp8, m, c, t, n);
      else
        step<true>(fp8, m, c, t, n--);
    }
    pass_turn(warpgroup);
    for (; n >= uniform(work_again(t).tiles.begin); --n) pass_over(m, c);
    store_codes_tile(fp8, m, t, c);
  }
  tma_store_wait_read<0>();  // shared memory lives as long as the block
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    forward_fp8(const __grid_constant__ fa3_forward_fp8_params params) {
  // Opaque, so that the compiler keeps it in a register instead of finding out
  // again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const layout m = lay_out(base);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&params.forward.query);
    tma_prefetch_map(&params.forward.key);
    tma_prefetch_map(&params.forward.value);
    if (params.output != FA3_OUTPUT_FP32) tma_prefetch_map(&params.forward.output);
    init_barriers(params, m);
  }
  __syncthreads();
  // And never tells the next to begin early: it may use the same counter of tiles.
  wait_for_prior_grids();

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 0)
      load(params, m);
    else if (warp == 1)
      schedule(params.forward, m);
    else
      transpose_values(m, warp - 2);
  } else {
    registers_take<kConsumerRegisters>();
    attend(params, m, warp / 4 - 1);
  }
}
