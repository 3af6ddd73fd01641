// The consumers' loop of the FP8 forward kernel where the keys of a head have one scale, and its
// values: FlashAttention-3's (section 3.2). The scores of a tile are computed together with the
// product of P and V of the tile before. Scales then cost nothing: they are part of the softmax's,
// and of the factor that makes O the average.
//
// A step asks for the maxima of its scores where a mask, a cap or a row's first keys need it. The
// others compute P with the references as they are. Their sums, which are found anyway, say whether
// any P may be too large for a code: where all are no more than 448, so is each summand. Else the
// references follow, and P is multiplied where it stands.
#ifndef FA3_FORWARD_FP8_HEADS_CUH
#define FA3_FORWARD_FP8_HEADS_CUH

#include "forward_fp8_consumer.cuh"

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLargestCode = 448.0f;
constexpr float kTopProbability = 1 << (int)kTop;
constexpr float kTopSum = 8.0f;  // as an exponent of 2: what is left of a sum that was too large
constexpr int kFewKeys = 1024;   // of a tile of queries (largest_sum)

// As ring_release, without a register for the thread's number.
template <int kDepth, int kBytes>
__device__ __forceinline__ void release(const ring<kDepth, kBytes> &r, uint32_t use) {
  __syncwarp();
  if ((thread_again() & 31) == 0) barrier_arrive(ring_empty(r, use));
}

// Of two warpgroups at head dim 128, those two warps that share a quarter of the multiprocessor
// take turns at their exponentials: else they meet there, and wait for each other's products at the
// same time. Of three they do not meet as often, and at head dim 256 turns gain nothing.
constexpr bool kTurns = kWarpgroups == 2 && kHeadDim == 128;
constexpr int kPassTurn = kTileK / 2 * 5 / 8;  // exponential

// The barrier of a consumer warp's turn.
__device__ __forceinline__ int turn_of(uint32_t warp) {
  return kBarrierWarp + (int)warp - 4;
}

__device__ __forceinline__ void take_turn(void) {
  if constexpr (kTurns) {
    // The assembler would move exponentials above a barrier, but not above a branch (never taken).
    do named_barrier_sync(turn_of(thread_again() / 32), 64);
    while (uniform(thread_again() >= kThreads));
  }
}

// After exponentials whose sum is `sum`, so that the assembler does not move it above them.
__device__ __forceinline__ void pass_turn(float sum) {
  if constexpr (kTurns) {
    const uint32_t warp = thread_again() / 32;
    if (!(sum < 0.0f)) named_barrier_arrive(turn_of(warp < 8 ? warp + 4 : warp - 4), 64);
  }
}

// A tile of keys that only other consumers' rows see.
__device__ __forceinline__ void pass_over(const layout &m, consumer &c) {
  ring_wait_full(m.k, c.used);
  release(m.k, c.used);
  ring_wait_full(m.v_transposed, c.used);
  release(m.v_transposed, c.used);
  ++c.used;
  take_turn();
  pass_turn(0.0f);
}

// O += P V of the tile before, or O = P V.
__device__ __forceinline__ void issue_whole_output(const layout &m, consumer &c) {
  const uint32_t v_at = uniform(descriptor_of(m.v_transposed, c.used - 1));
#pragma unroll
  for (int k = 0; k < kTileK; k += kPartKeys) issue_output(c, v_at, k);
  wgmma_commit();
}

__device__ __forceinline__ void finish_output(const layout &m, consumer &c) {
  wgmma_wait<0>();
  registers_touch(c.out.o);
  release(m.v_transposed, c.used - 1);
}

// The greatest sum of a thread's P that references need not follow: 448, or -1 where a reference is
// too large for one fma. A P of more than 2^kTop may be most of what a row has, and has to be exact
// then: so where the thread has not summed as much before, they follow. Of few keys half as much
// will do (consumer.share): sums of the second and third tile are often greater than the first's,
// and no later tiles profit from greater references.
__device__ __forceinline__ void set_largest_sum(consumer &c) {
  const bool large = !(fabsf(c.rows.reference[0]) <= kLargestExponent &&
                       fabsf(c.rows.reference[1]) <= kLargestExponent);
  c.largest_sum = large ? -1.0f : kLargestCode;
}

__device__ __forceinline__ float largest_sum(float before, float share, float largest) {
  return fminf(fmaxf(share * before, kTopProbability), largest);
}

// The product of a row of Q and one of K, of codes. A matrix product would take all of a
// warpgroup's warps.
__device__ __forceinline__ float find_score(uint32_t query, uint32_t key) {
  float score = 0.0f;
#pragma unroll 1
  for (int d = 0; d < kHeadDim; d += 4) {
    const int chunk = d / kCodes, inside = d % kCodes;
    uint32_t q[2], k[2];
    unpack_codes(__float_as_uint(load_shared_float((query ^ inside) + chunk * kRows * kCodes)),
                 q[0], q[1]);
    unpack_codes(__float_as_uint(load_shared_float((key ^ inside) + chunk * kTileK * kCodes)), k[0],
                 k[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = unpack_fp16(q[i]), y = unpack_fp16(k[i]);
      score = fmaf(x.x, y.x, fmaf(x.y, y.y, score));
    }
  }
  return score;
}

// Rows with a sum that has no room in a float, or a reference too large for one fma: their scores
// once more, and P and its sum from these. `factor` is what was summed before is to be multiplied
// by.
__device__ __forceinline__ void start_again(const layout &m, consumer &c, const bool (&again)[2],
                                            float (&sum)[2], float (&factor)[2]) {
  const float2 scales = load_shared_pair(row_scales_at(m));
  asm volatile("" : "+r"(c.used));
  const uint32_t lane = thread_again() & 31, warp = thread_again() / 32 & 3;
  const uint32_t query =
      ring_tile(ring_beside(m.q, c.warpgroup), 0) + swizzled_row<kCodes>(16 * warp + lane / 4);
  const uint32_t keys = ring_tile(m.k, c.used);
#pragma unroll 1
  for (int i = 0; i < kTileK / 2; ++i) {
    const int r = i / 2 % 2, key = i / 4 * 8 + 2 * (lane & 3) + i % 2;
    if (!(r == 0 ? again[0] : again[1])) continue;
    const float score = find_score(query + r * 8 * kCodes, keys + swizzled_row<kCodes>(key)) *
                        (r == 0 ? scales.x : scales.y);
#pragma unroll
    for (int j = 0; j < kTileK / 2; ++j)
      if (j == i) c.s[j] = score;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = c.s[2 * r];
#pragma unroll
    for (int i = 0; i < kTileK / 2; ++i)
      if (i / 2 % 2 == r) top = max_nan(top, c.s[i]);
    top = row_maximum(top) - kTop;
    if (!again[r]) continue;
    const float before = c.rows.reference[r];
    if (top > before) c.rows.reference[r] = top;
    factor[r] = exp2_unit(before - c.rows.reference[r]);
    sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < kTileK / 2; ++i) {
      if (i / 2 % 2 != r) continue;
      c.s[i] = exp2_unit(c.s[i] - kTop - c.rows.reference[r] + kTop);
      sum[r] += c.s[i];
    }
  }
}

// References follow the greatest P of rows where a sum is too large, and P, its sum and all that
// was summed before with them. Where no P is large but their sum is, as in a row of like scores,
// they follow the sum, or each tile would come here. What becomes of a row depends on that row
// alone: those beyond a tile's heads hold anything.
__device__ __forceinline__ void follow(const layout &m, consumer &c, float (&sum)[2]) {
  float top[2], factor[2] = {1.0f, 1.0f};
  bool again[2];
  thread_maxima_by_integers(c.s, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool large = !(fabsf(c.rows.reference[r]) <= kLargestExponent);
    const bool follows =
        any_of_quad(large || !(sum[r] <= largest_sum(c.rows.sum[r], c.share, kLargestCode)));
    const float greatest = row_maximum(top[r]), greatest_sum = row_maximum(sum[r]);
    again[r] = follows && (large || greatest_sum == kInfinity);
    const float up = fmaxf(log2_unit(greatest) - kTop, log2_unit(greatest_sum) - kTopSum);
    if (!follows || again[r] || !(up > 0.0f)) continue;
    const float before = c.rows.reference[r];
    c.rows.reference[r] += up;
    factor[r] = exp2_unit(before - c.rows.reference[r]);
    sum[r] *= factor[r];
  }
#pragma unroll
  for (int i = 0; i < kTileK / 2; ++i) c.s[i] *= factor[i / 2 % 2];
  if (__any_sync(0xffffffff, again[0] || again[1])) start_again(m, c, again, sum, factor);
#pragma unroll
  for (int r = 0; r < 2; ++r) c.rows.sum[r] *= factor[r];
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] *= factor[i / 2 % 2];
  set_largest_sum(c);
}

// The scores of tile n of keys and, behind the first, O of the tile before. Then P of this one, and
// its sums. Says whether the references have to follow (then the tile of K is yet to be released).
// With a smaller kCount no row sees more of the tile's keys than those.
template <bool kFirst, bool kAsk, int kCount = kTileK>
__device__ __forceinline__ bool begin_step(const fa3_forward_fp8_params &fp8, const layout &m,
                                           consumer &c, uint32_t t, int n, float (&sum)[2]) {
  float(&s)[kCount / 2] = scores_of<kCount>(c);
  asm volatile("" : "+r"(c.used));
  const uint32_t q_at = descriptor_of(ring_beside(m.q, c.warpgroup), 0);
  const uint32_t k_at = uniform(descriptor_of(m.k, c.used));
  ring_wait_full(m.k, c.used);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) asm volatile("" : "=f"(s[i]));  // what was there is dead
  if (!kFirst) registers_touch(c.out.o);
  wgmma_fence();
  issue_scores<kCount>(c, q_at, k_at);
  if (!kFirst) {  // the scores need not wait for V
    ring_wait_full(m.v_transposed, c.used - 1);
    wgmma_fence();
    issue_whole_output(m, c);
  }
  float largest[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (!kAsk) largest[r] = largest_sum(c.rows.sum[r], c.share, c.largest_sum);
  const float2 of_rows = load_shared_pair(row_scales_at(m));  // while the products run
  // At head dim 256 there are no registers for a mask beside two products.
  constexpr bool kBeside = !kFirst && !(kAsk && kHeadDim > 128);
  wgmma_wait<kBeside ? 1 : 0>();
  registers_touch(s);
  if (!kFirst && !kBeside) finish_output(m, c);

  float scale[2] = {of_rows.x, of_rows.y};
  float shift[2] = {c.rows.reference[0], c.rows.reference[1]}, factor[2];
  bool grown = false;
  if (kAsk) {
    release(m.k, c.used);
    cap_and_mask<kCount>(fp8.forward, work_again(t), c, n, scale);
    float top[2];
    softmax_set_code_bounds(c.rows);
    thread_maxima_by_integers(s, top);
    if (softmax_outgrown_codes(top, c.rows, scale)) {
      correct_maxima(s, top);
      grown = softmax_follow_codes(top, c.rows, scale, factor);
      shift[0] = c.rows.reference[0];
      shift[1] = c.rows.reference[1];
      softmax_subtract_large_codes(s, c.rows, scale, shift);
    }
  }
  take_turn();
  softmax_exponents_of_codes(s, shift, scale);
  sum[0] = sum[1] = -0.0f;  // adding to 0 would be an instruction
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    s[i] = exp2_unit(s[i]);
    sum[i / 2 % 2] += s[i];
    if (i == kPassTurn * kCount / kTileK) pass_turn(sum[0] + sum[1]);
  }
#pragma unroll
  for (int i = kCount / 2; i < kTileK / 2; ++i) c.s[i] = 0.0f;
  if (!kAsk) grown = __any_sync(0xffffffff, !(sum[0] <= largest[0]) | !(sum[1] <= largest[1]));
  if (!kAsk && !grown) release(m.k, c.used);
  if (kBeside) {
    // As in forward.cu: without a branch, whose wait is over, the assembler would move the next one
    // above the exponentials, which are to run beside the product.
    registers_touch(sum);
    registers_touch(s);
    if (grown) ring_wait_full(m.v_transposed, c.used - 1);
    finish_output(m, c);
  }
  if (!kFirst && kAsk && grown) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] *= factor[i / 2 % 2];
  }
  if (kAsk) set_largest_sum(c);
  return !kAsk && grown;
}

// Whether no row of a warpgroup sees more than kNarrow keys of its last tile.
__device__ __forceinline__ bool sees_few_keys(const fa3_forward_fp8_params &fp8, const work &w,
                                              int warpgroup) {
  const fa3_mask *mask = &w.sequence.mask;
  const int step = fp8.forward.queries_per_warpgroup;
  const int last = min(w.first + (warpgroup + 1) * step, mask->queries) - 1;
  const int end = fa3_visible_keys(mask, last).end;
  return uniform((end - 1) % kTileK < kNarrow);
}

// P's codes take the place of those of the tile before.
__device__ __forceinline__ void finish_step(consumer &c, const float (&sum)[2]) {
  c.rows.sum[0] += sum[0];
  c.rows.sum[1] += sum[1];
  pack_probabilities(c.s, c.p);
  ++c.used;
}

// Whether a step has to ask for maxima and masks: this warp `asks`, or one of its rows has a
// reference that is too large for one fma. The warpgroup's four warps come here, and go the same
// way.
__device__ __forceinline__ bool any_asks(const consumer &c, bool asks) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    asks |=
        fabsf(c.rows.reference[r]) > kLargestExponent && c.rows.reference[r] != FA3_NO_REFERENCE;
  return named_barrier_any(kBarrierTurn + c.warpgroup, 128, asks);
}

// Q's first columns, as the first operand of a product (wgmma_fp8_registers).
__device__ __forceinline__ void read_queries(const layout &m, consumer &c) {
  const uint32_t lane = thread_again() & 31, row = thread_again() / 32 % 4 * 16 + (lane & 15);
  const uint32_t tile = ring_tile(ring_beside(m.q, c.warpgroup), 0) + swizzled_row<kCodes>(row);
#pragma unroll
  for (int i = 0; i < kQInRegisters / 32; ++i)
    load_matrices<false>(reinterpret_cast<uint32_t(&)[4]>(c.q[4 * i]),
                         tile ^ (2 * i + lane / 16) * 16);
}

__device__ __forceinline__ void clear_output(consumer &c) {
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] = 0.0f;
}

__device__ __forceinline__ void attend(const fa3_forward_fp8_params &fp8, const layout &m,
                                       int warpgroup) {
  consumer c;
  c.warpgroup = warpgroup;
  c.used = 0;
  if (kTurns && warpgroup == 0) named_barrier_arrive(turn_of(thread_again() / 32), 64);
  c.accumulate = true;  // O begins as zeros: the loop then has no question
  for (uint32_t t = 0;; ++t) {
    wait_for_scales(m, t);
    const work &w = work_of(t);
    if (uniform(w.last)) break;
    int n = uniform(w.tiles.end) - 1;
    c.rows = {{FA3_NO_REFERENCE, FA3_NO_REFERENCE}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    find_row_scales(fp8, m, w, warpgroup);
    forget_kept(m, w.scales.value);
    c.share = uniform(w.tiles.end - w.tiles.begin) <= kFewKeys / kTileK ? 2.0f : 1.0f;
    ring_wait_full(ring_beside(m.q, warpgroup), t);
    if constexpr (kQInRegisters > 0) read_queries(m, c);
    const int end = uniform(w.warpgroup[warpgroup].tiles.end);
    const bool narrow = kNarrows && sees_few_keys(fp8, w, warpgroup);
    const bool empty = uniform(w.warpgroup[warpgroup].tiles.begin) >= end;
    const int stop = max(end, uniform(w.tiles.begin));
    for (; n >= stop; --n) pass_over(m, c);
    if (empty) {
      skip_tile(m, c, t);
    } else {
      float sum[2];
      if (narrow) {  // each way packs P by itself, as below
        begin_step<true, true, kNarrow>(fp8, m, c, t, n, sum);
        finish_step(c, sum);
      } else {
        begin_step<true, true>(fp8, m, c, t, n, sum);
        finish_step(c, sum);
      }
      clear_output(c);
      --n;
      while (!kOneStep && n >= uniform(work_again(t).warpgroup[warpgroup].tiles.begin)) {
        if (n % kPeriod == kPeriod - 1 &&
            n != uniform(work_again(t).warpgroup[warpgroup].tiles.end) - 2) {
          keep_output(fp8, m, c);
          clear_output(c);
        }
        const int whole_begin = uniform(work_again(t).warpgroup[warpgroup].whole.begin);
        const int begin = max(whole_begin, n - n % kPeriod);
        if (fp8.forward.softcap_log2 != 0.0f ||
            any_asks(c, n < begin || n >= work_again(t).warpgroup[warpgroup].plain_end)) {
          begin_step<false, true>(fp8, m, c, t, n, sum);
          finish_step(c, sum);
          --n;
          continue;
        }
        // Most tiles: nothing else stands between the instructions of the inner loop.
        // Each way packs P by itself: of registers that two ways have written, the assembler packs
        // pairs of codes and joins these, which is an instruction more for each four.
        for (; n >= begin; --n) {
          while (!begin_step<false, false>(fp8, m, c, t, n, sum)) {
            finish_step(c, sum);
            if (--n < begin) break;
          }
          if (n < begin) break;
          follow(m, c, sum);
          release(m.k, c.used);
          finish_step(c, sum);
        }
      }
      release(ring_beside(m.q, warpgroup), t);
      ring_wait_full(m.v_transposed, c.used - 1);
      registers_touch(c.out.o);
      wgmma_fence();
      issue_whole_output(m, c);
      finish_output(m, c);
    }
    for (; n >= uniform(work_again(t).tiles.begin); --n) pass_over(m, c);
    store_codes_tile(fp8, m, t, c);
  }
  tma_store_wait_read<0>();  // shared memory lives as long as the block
}

#endif
