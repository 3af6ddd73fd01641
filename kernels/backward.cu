// The backward pass on Hopper for head dims up to 128: dQ, dK and dV, tile by tile.
//
// A block computes dK and dV of 128 keys of one head, which stay in registers, 64 keys a warpgroup,
// while it steps through the blocks of queries that see them, of all query heads that share the
// keys. Scores are computed with keys as rows, so that P^T and dS^T are in registers as their
// products need them. One step:
//
//   issue S^T = K Q^T; issue dP^T = V dO^T
//   wait S; P = exp2(S - lse)
//   wait dP; dS = P (dP - D), also to shared memory
//   issue dV += P^T dO; issue dQ = dS K of the step before; wait for both
//   issue dK += dS^T Q; meanwhile dQ joins what other tiles of keys added (backward_params.h)
//   wait dK
//
// dQ needs the dS of both warpgroups. It comes a step late so that neither waits for the other, and
// one computes exponentials while the other's products run. An instruction whose operand is in
// registers waits until the matrix unit takes it, so dQ leaves between the parts of such a product.
//
// Query blocks are visited from the last to the first: under a causal mask the tiles of one head
// then all begin at the same block, and each follows the one before it by a step or two. Some go
// the other way, and without a mask they may begin at different blocks (backward_order.h). Beside
// the two consumer warpgroups there is one whose warps load, plan, and keep the order in which dQ
// is summed.
//
// Compile with what variants.def says; see backward_params.h for what the host prepares.
#include "backward_differences.cuh"
#include "backward_finish.cuh"
#include "backward_load.cuh"
#include "backward_parts.cuh"
#include "backward_products.cuh"
#include "backward_queries.cuh"
#include "backward_store.cuh"
#include "backward_work.cuh"

// With steps of 64 or 80 queries the warpgroups take turns at the first two products, so that one's
// exponentials fall in the time of the other's products; dV is issued while dS is on its way, and
// the next step's queries are waited for while dK runs. With 128 none of this pays. Measured:
// docs/notes/hopper-backward.md.
constexpr bool kShortStep = kTileQ < 128;

__device__ __forceinline__ void take_turn(int warpgroup) {
  if (kShortStep) named_barrier_sync(kBarrierTurn + warpgroup, 128 * kWarpgroups);
}

__device__ __forceinline__ void pass_turn(int warpgroup) {
  if (kShortStep) named_barrier_arrive(kBarrierTurn + 1 - warpgroup, 128 * kWarpgroups);
}

// A tile whose keys no query sees.
__device__ __forceinline__ void skip_tile(const fa3_backward_params &p, const work &w,
                                          int warpgroup) {
  const int first_key = w.tile * kTileK + warpgroup * kKeys, thread = thread_again() & 127;
  const int keys = w.sequence.mask.keys - first_key, key_row = w.sequence.key_row + first_key;
  store_zeros(p.grad_key, w.sequence.key_batch, key_row, keys, w.head, thread);
  store_zeros(p.grad_value, w.sequence.key_batch, key_row, keys, w.head, thread);
}

static_assert(kConsumerWarps == FA3_BACKWARD_PART_WARPS, "warps of a part");

// Adds up what the parts of a tile have of dK and dV: whether this warp then has it all.
__device__ __forceinline__ bool join_parts(const fa3_backward_params &p, const work &w, int warp,
                                           float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2]) {
  constexpr int kApart = kTileK * kHeadDim / 4;  // vectors from dV to dK
  const parts_of_tile parts = find_parts(p, w, kTileQ, kTileK);
  if (parts.count == 1) return true;
  int *arrivals = p.arrivals + parts.slot * FA3_BACKWARD_PART_WARPS + warp;
#pragma unroll 1
  for (int level = 0; 1 << level < parts.count; ++level) {
    const fa3_pair pair = fa3_find_pair(parts.count, parts.number, level);
    if (pair.alone) continue;
    const int before = arrive(arrivals, pair);
    if (!(before & pair.arrived)) {
      float4 *to = find_place<kTileK, kHeadDim>(p, parts.slot, pair.mine, warp);
      store_part(dv, to);
      store_part(dk, to + kApart);
      set_bit(arrivals, pair.left);
      return false;
    }
    // Always so; but where the compiler knows that, it spills a register.
    if (before & pair.left)
      add_parts(dv, dk, find_place<kTileK, kHeadDim>(p, parts.slot, pair.other, warp), kApart);
  }
  return true;
}

// dK and dV of the warp's keys, by way of shared memory. Where that is V's buffer, all warps whose
// keys these are have read it for the last time.
__device__ __forceinline__ void store_gradients(const fa3_backward_params &p, const layout &m,
                                                const work &w, int warpgroup, uint32_t keys_use,
                                                float (&dk)[kHeadDim / 2],
                                                float (&dv)[kHeadDim / 2]) {
  const int warp = warpgroup * 4 + (thread_again() & 127) / 32;
  if (fa3_key_tile_parts(&p.tiles) > 1 && !join_parts(p, w, warp, dk, dv)) return;
  const int first_key = w.tile * kTileK + warp * 16;
  const int keys = w.sequence.mask.keys - first_key, key_row = w.sequence.key_row + first_key;
  const uint32_t staging =
      (kStagesApart ? m.staging : ring_tile(m.v, keys_use)) + warp * (32 * kHeadDim);
  store_warp_rows<kHeadDim, kHeadDim>(p.grad_value, dv, 1.0f, w.sequence.key_batch, key_row, keys,
                                      w.head, staging);
  store_warp_rows<kHeadDim, kHeadDim>(p.grad_key, dk, p.scale, w.sequence.key_batch, key_row, keys,
                                      w.head, staging);
  fence_proxy_async();
  __syncwarp();
}

// Where a step's operands are: the warpgroup's keys, the queries, their lse and D.
struct score_operands {
  uint32_t own_keys, queries, lse, d;
};

// P from S, and dS from dP, once it is there. `hides`: the step has a mask, or lse that are large.
__device__ __forceinline__ void take_uncapped_differences(
    const fa3_backward_params &p, const layout &m, const score_operands &at, uint32_t use,
    const fa3_range (&seen)[2], int first_query, bool hides, float (&s)[kTileQ / 2],
    float (&dp)[kTileQ / 2], uint32_t (&weights)[kTileQ / 4], uint32_t (&ds)[kTileQ / 4]) {
  if (kShortStep && hides && has_large_lse<kTileQ>(at.lse))
    take_exponentials<true>(p, s, at.lse);
  else
    take_exponentials<false>(p, s, at.lse);
  // The assembler moves the next wait up above the exponentials, or them down below it, but not
  // across a branch that may change what they give. Where none is needed, this one is never taken,
  // which it cannot know.
  if (hides) {
    // The scores once more, and their P: a choice above would cost every step.
    if (!kShortStep && has_large_lse<kTileQ>(at.lse)) {
      wgmma_wait<0>();
      registers_touch(s);
      registers_touch(dp);
      wgmma_fence();
      issue_scores(s, at.own_keys, at.queries);
      wgmma_wait<0>();
      registers_touch(s);
      registers_touch(dp);
      take_exponentials<true>(p, s, at.lse);
    }
    hide(s, seen, first_query);
  } else if (kShortStep && isnan(p.scale)) {
#pragma unroll
    for (int i = 0; i < kTileQ / 2; ++i) s[i] = 0.0f;
  }
  registers_touch(s);
  ring_wait_empty(m.d_s, use);
  wgmma_wait<0>();
  registers_touch(s);
  registers_touch(dp);
  take_differences(weights, ds, s, dp, at.d);
}

// What is still to come of tile t, where no step follows: dQ of its last one, `last`, number
// use - 1, and its gradients where they are not stored yet.
__device__ __forceinline__ void finish_tile(const fa3_backward_params &p, const layout &m,
                                            const dq_share &share, int warpgroup, uint32_t t,
                                            uint32_t use, uint32_t keys_use, const query_step &last,
                                            float (&dk)[kHeadDim / 2], float (&dv)[kHeadDim / 2]) {
  const work &w = work_of(t);
  float dq[kQueryColumns / 2];
  ring_wait_full(m.d_s, use - 1);
  issue_query_step(m, share, use - 1, keys_use - 1, dq);
  wgmma_wait<0>();
  registers_touch(dq);
  ring_release(m.k, keys_use - 1);
  ring_release(m.d_s, use - 1);
  if (!kNoPause) {
    // Under a causal mask nobody waits for a tile's last step: its gradients go first.
    store_gradients(p, m, w, warpgroup, keys_use - 1, dk, dv);
    // Every thread has staged rows there.
    if (!kStagesApart) barrier_arrive(ring_empty(m.v, keys_use - 1));
  }
  float4 *partial;
  const int kind = wait_for_turn(m, share, use - 1, partial);
  query_sum sum;
  if (kSumAhead) load_sum(sum, kind > kTurnLast, partial);
  put_partials(share, dq, partial, fate_of_partial(kind), 0, kQueryColumns / 8);
  finish_query_step(p, m, w, share, use - 1, dq, last, kind, sum);
  finish_work(m, t);
}

__device__ __forceinline__ void differentiate(const fa3_backward_params &p, const layout &m,
                                              int warpgroup) {
  const dq_share share = find_share(m, warpgroup);
  const int lane = threadIdx.x & 31;
  const uint32_t own_ds = row_of_ds(m.d_s.data, warpgroup);

  if (warpgroup == 0) pass_turn(1);
  float dk[kHeadDim / 2], dv[kHeadDim / 2];
  uint32_t use = 0, keys_use = 0;  // steps begun, tiles of keys begun
  query_step before = {};
  bool pending = false;  // its dQ is still to come
  const auto finish = [&](uint32_t t) {
    finish_tile(p, m, share, warpgroup, t, use, keys_use, before, dk, dv);
    pending = false;
  };
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (uniform(w.last)) {
      if (kNoPause && pending) finish(t - 1);
      break;
    }
    const int steps = uniform(w.steps), heads = uniform(w.heads);
    if (steps == 0) {
      if (kNoPause && pending) finish(t - 1);
      skip_tile(p, w, warpgroup);
      finish_work(m, t);
      continue;
    }
    ring_wait_full(m.k, keys_use);
    const uint32_t own_keys = uniform(wgmma_descriptor_low(
        ring_tile(m.k, keys_use) + warpgroup * kKeys * kRowBytes, kTileK * kRowBytes));
    const uint32_t own_values = uniform(wgmma_descriptor_low(
        ring_tile(m.v, keys_use) + warpgroup * kKeys * kRowBytes, kTileK * kRowBytes));

    int block = uniform(w.start), group = 0;
    for (int step = 0; step < steps; ++step) {
      const uint32_t queries =
          uniform(wgmma_descriptor_low(ring_tile(m.q, use), kTileQ * kRowBytes));
      const uint32_t d_o = queries + ((m.d_o.data - m.q.data) >> 4);
      const uint32_t lse = rows_of_step(m, use) + 8 * (lane & 3);
      const uint32_t d = lse + 4 * kTileQ;

      float s[kTileQ / 2], dp[kTileQ / 2];
      if (!kShortStep || step == 0) ring_wait_full(m.q, use);
      take_turn(warpgroup);
      registers_touch(s);
      wgmma_fence();
      issue_scores(s, own_keys, queries);
      if (step == 0) ring_wait_full(m.v, keys_use);
      ring_wait_full(m.d_o, use);
      registers_touch(dp);
      wgmma_fence();
      issue_scores(dp, own_values, d_o);

      const fa3_range whole = kLoaderTells ? whole_of(use)[warpgroup] : w.whole[warpgroup];
      const bool masked = block < whole.begin || block >= whole.end ||
                          (!kLoaderTells && has_large_lse<kTileQ>(lse));
      fa3_range seen[2] = {{-FA3_UNBOUNDED, FA3_UNBOUNDED}, {-FA3_UNBOUNDED, FA3_UNBOUNDED}};
      if (masked) find_seeing(w, warpgroup, lane, seen);
      const int first_query = block * kTileQ + 2 * (lane & 3);
      const query_step now = {block, w.query_head + group};
      uint32_t weights[kTileQ / 4], ds[kTileQ / 4];
      wgmma_wait<1>();
      pass_turn(warpgroup);
      registers_touch(s);
      const auto finish_scores = [&](bool hides) {
        take_uncapped_differences(p, m, {own_keys, queries, lse, d}, use, seen, first_query, hides,
                                  s, dp, weights, ds);
      };
      if (FA3_SOFTCAP && p.softcap_log2 != 0.0f) {
        ring_wait_empty(m.d_s, use);
        wgmma_wait<0>();
        registers_touch(dp);
        take_capped_differences(weights, ds, s, dp, seen, first_query, lse, d, p);
      } else if (kShortStep && !masked) {
        finish_scores(false);  // without the mask's registers
      } else {
        finish_scores(masked);
      }
      store_ds(ds, own_ds + (use & 1) * kDsBytes);
      if (kShortStep) issue_gradient(dv, weights, d_o, step > 0, [](int) {});
      fence_proxy_async();
      __syncwarp();
      barrier_arrive_warp(ring_full(m.d_s, use));

      // Without a step before, dQ multiplies what is there, and nobody looks.
      float dq[kQueryColumns / 2];
      float4 *partial = nullptr;
      int kind = kTurnLast;
      if (pending) ring_wait_full(m.d_s, use - 1);
      issue_query_step(m, share, use - 1, step > 0 ? keys_use : keys_use - 1, dq);
      if (pending) kind = wait_for_turn(m, share, use - 1, partial);
      query_sum sum;
      if (kSumAhead) load_sum(sum, kind > kTurnLast, partial);
      wgmma_wait<0>();
      registers_touch(dq);
      if (pending) ring_release(m.d_s, use - 1);
      const bool follows = kNoPause && step == 0 && pending;  // another tile's last step
      if (follows) ring_release(m.k, keys_use - 1);
      constexpr int kProductParts = kTileQ / 16 * (kShortStep ? 1 : 2);
      auto put_share = [&](int part) {
        constexpr int kParts = kQueryColumns / 8;
        put_partials(share, dq, partial, fate_of_partial(kind), part * kParts / kProductParts,
                     (part + 1) * kParts / kProductParts);
      };
      if (!kShortStep) issue_gradient(dv, weights, d_o, step > 0, put_share);
      issue_gradient(dk, ds, queries, step > 0,
                     [&](int part) { put_share(part + kProductParts - kTileQ / 16); });
      if (pending)
        finish_query_step(p, m, follows ? work_of(t - 1) : w, share, use - 1, dq, before, kind,
                          sum);
      if (follows) finish_work(m, t - 1);
      if (kShortStep && step + 1 < steps) ring_wait_full(m.q, use + 1);
      wgmma_wait<0>();
      registers_touch(dk);
      registers_touch(dv);
      barrier_arrive(ring_empty(m.q, use));  // every thread has read statistics
      ring_release(m.d_o, use);
      before = now;
      pending = true;
      ++use;
      if (kByHead) {
        block += uniform(w.step);
        if (block < w.blocks.begin || block >= w.blocks.end) {
          block = uniform(w.start);
          ++group;
        }
      } else if (++group == heads) {
        group = 0;
        block += uniform(w.step);
      }
    }
    if (kNoPause) {
      named_barrier_sync(kBarrierOwn + warpgroup, 128);
      store_gradients(p, m, w, warpgroup, keys_use, dk, dv);
      barrier_arrive(ring_empty(m.v, keys_use));  // every thread has staged rows there
    }
    // Nothing passes through it: the next tile's values may come while this one's gradients leave.
    if (kStagesApart) ring_release(m.v, keys_use);
    ++keys_use;
    if (!kNoPause) finish(t);
  }
}

// Takes a slice of a block's sums of dQ, which backward leaves, and stores it.
template <bool kNarrow>
__device__ __forceinline__ void finish_slice(const fa3_backward_params &p) {
  constexpr int kVectors = FA3_BACKWARD_FINISH_VECTORS(kTileQ, kNarrow);
  constexpr int kSlices = FA3_BACKWARD_FINISH_SLICES(kHeadDim, kTileQ, kNarrow);
  constexpr int kSlicesOfShare = kSplitRows || kTransposed ? kSlices / 2 : kSlices;
  constexpr int kAtOnce = kVectors > 4 ? 2 : 16 / kVectors;  // as many as registers hold
  const finished_block at = find_finished_block(p, kSlices, kTileQ, kTileK);
  if (!at.seen) return;
  const int vector = kVectors * (at.slice % kSlicesOfShare);
  const int warpgroup = kSplitRows || kTransposed ? at.slice / kSlicesOfShare : vector >= 64 / 8;
  const dq_share share = find_share(lay_out(0), warpgroup);
  const int of_share = kSplitRows || kTransposed ? vector : vector - share.column / 8;
  const int *counters = p.counters + warpgroup % kShares * p.counters_apart;
  const uint32_t used = wait_for_sums(p, at, counters, 1, kTileQ, kTileK);
  float *sum = p.partial + at.slot * (kTileQ * kHeadDim);
  float dq[4 * kVectors];
  add_up_sums<kVectors, kAtOnce>(dq, partial_of(sum, share) + of_share * 128,
                                 p.sums_apart * (kTileQ * kHeadDim / 4), used);
  const fa3_sequence &s = at.sequence;
  const int row = at.block * kTileQ + (kSplitRows ? 64 * warpgroup : kTransposed ? 8 * vector : 0);
  const int first = s.query_row + row, rows = s.mask.queries - row;
  if (kTransposed)
    store_columns<8 * kVectors>(p.grad_query, dq, p.scale, s.query_batch, first, rows, at.head,
                                share.column);
  else
    store_rows<8 * kVectors>(p.grad_query, dq, p.scale, s.query_batch, first, rows, at.head,
                             8 * vector, 0);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    backward(const __grid_constant__ fa3_backward_params p) {
  // Opaque, so that the compiler keeps it in a register instead of finding out again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.query);
    tma_prefetch_map(&p.grad_output);
    tma_prefetch_map(&p.key);
    tma_prefetch_map(&p.value);
    init_barriers(lay_out(base));
  }
  // The planning warp waits when it has found the first tile.
  if (warp == 0) named_barrier_arrive(kBarrierMadeForPlan, 2 * 32);
  if (warp != 1) named_barrier_sync(kBarrierMade, kThreads - 32);

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 0)
      load(p, lay_out(base));
    else if (warp == 1)
      schedule(p, base);
    else if (warp == 2)
      grant_turns(p, lay_out(base));
    else
      pass_turns(p, lay_out(base));
  } else {
    registers_take<kConsumerRegisters>();
    differentiate(p, lay_out(base), warp / 4 - 1);
  }
}
