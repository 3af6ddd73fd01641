// The consumers' loop of the FP8 forward kernel for scales of any rows.
//   - A consumer waits for its scores at once, and the other consumers compute meanwhile. So P
//     takes the registers of S, and there are enough of them for longer tiles of keys.
//   - P is multiplied with V in parts: each while the next is made. Consumers take turns at this.
//   - The scales of a row of Q and of a tile of K join the softmax's scale. O is summed in units of
//     V's greatest scale so far, and P of a tile of smaller ones is multiplied.
#ifndef FA3_FORWARD_FP8_TURNS_CUH
#define FA3_FORWARD_FP8_TURNS_CUH

#include "forward_fp8_consumer.cuh"

constexpr int kTurnKey = kTileK - 2 * kPartKeys;  // a turn begins with this part's product

__device__ __forceinline__ void take_turn(int warpgroup) {
  named_barrier_sync(kBarrierTurn + warpgroup, 256);
}

__device__ __forceinline__ void pass_turn(int warpgroup) {
  named_barrier_arrive(kBarrierTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
}

// Of the tile in hand, in shared memory.
__device__ __forceinline__ uint32_t scales_at(const layout &m, const consumer &c) {
  return m.scales + c.used % kScaleSlots * kScaleBytes;
}

// The scales of the tile in hand, while its scores are computed. One lane reads them for its warp,
// the one that hands the tile back.
__device__ __forceinline__ void find_scales(const layout &m, consumer &c) {
  const float2 scales = load_shared_pair_if((thread_again() & 31) == 0, scales_at(m, c));
  const float key_scale = __shfl_sync(0xffffffff, scales.x, 0);
  c.value_scale = __shfl_sync(0xffffffff, scales.y, 0);
  const float2 row_scale = load_shared_pair(row_scales_at(m));
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
  if (mixed_scales(fp8, w)) apply_mixed_scales(c, scales_at(m, c) + 8);
  cap_and_mask(fp8.forward, w, c, n, c.scale);
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
  if (n % kPeriod == kPeriod - 1 && c.accumulate) {
    keep_output(fp8, m, c);
    c.accumulate = false;
  }
  const uint32_t q_at = descriptor_of(ring_beside(m.q, c.warpgroup), 0);
  const uint32_t k_at = uniform(descriptor_of(m.k, c.used));
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
  const uint32_t v_at = uniform(descriptor_of(m.v_transposed, c.used));
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
    wgmma_commit();
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

__device__ __forceinline__ void attend(const fa3_forward_fp8_params &fp8, const layout &m,
                                       int warpgroup) {
  consumer c;
  c.warpgroup = warpgroup;
  c.hands_back = (threadIdx.x & 31) == 0 || any_mixed_scales(fp8);
  c.used = 0;
  if (warpgroup == 0) named_barrier_arrive(kBarrierTurn, 256);

  for (uint32_t t = 0;; ++t) {
    wait_for_scales(m, t);
    const work &w = work_of(t);
    if (uniform(w.last)) break;
    int n = uniform(w.tiles.end) - 1;
    const auto q = ring_beside(m.q, warpgroup);
    c.accumulate = false;
    forget_kept(m, 1.0f);
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
      const int whole_begin = uniform(work_again(t).warpgroup[warpgroup].whole.begin);
      const int whole_end = uniform(work_again(t).warpgroup[warpgroup].whole.end);
      const bool asks =
          uniform(fp8.forward.softcap_log2 != 0.0f || mixed_scales(fp8, work_again(t)));
      if (!asks && n >= whole_begin && n < whole_end)
        for (; n >= whole_begin; --n) step<false>(fp8, m, c, t, n);
      else
        step<true>(fp8, m, c, t, n--);
    }
    if (!empty) ring_release(q, t);
    pass_turn(warpgroup);
    for (; n >= uniform(work_again(t).tiles.begin); --n) pass_over(m, c);
    store_codes_tile(fp8, m, t, c);
  }
  tma_store_wait_read<0>();  // shared memory lives as long as the block
}

#endif
