// The forward pass on Hopper: O = softmax(scale Q K^T) V, tile by tile.
//
// A block computes tiles of Q, 64 rows for each of its consumer warpgroups. Of its first warpgroup
// one warp streams tiles of K and V into two rings of buffers (forward_load.cuh), one loads Q, and
// one decides which tile is next, ahead of the others (forward_tiles.cuh, forward_deal.cuh). A
// consumer keeps S, P and O in registers. Tiles of keys are visited from the last to the first:
// those that need a mask come early.
//
//               matrix unit                    the consumer meanwhile
//   begin_tile  S(n) = Q K(n)^T                stores O of the tile before; then P(n)
//   step        S(n-1), O = P(n) V(n)          P(n-1)
//   step        S(n-2), O += P(n-1) V(n-1)     P(n-2)
//   end_tile    O += P(n-2) V(n-2)             lse; looks up the next tile
//
// A step issues both products, and computes P from the first one's scores while the second runs.
// The consumers take turns at issuing (named barriers), so that one's softmax falls in the time of
// the other's products.
//
// Compile with what variants.def says; see forward_params.h for what the host prepares.
#include "forward_deal.cuh"
#include "forward_load.cuh"
#include "forward_pages.cuh"
#include "forward_work.cuh"

#include "forward_store.cuh"
#include "forward_unpacked.cuh"

// How many of a thread's scores become exponentials before the wait for the product
// that runs meanwhile.
constexpr int kAhead = kTileK / 8;

// Whether references move only if they have to. With three warpgroups the multiplications hide
// behind the other two.
constexpr bool kLazyRescale = kWarpgroups < 3;

// With three warpgroups references always follow in the first tiles of keys, so many of them; they
// rarely move behind these, and follow only if they have to, in a loop of its own. Kernels that can
// share keys out have no registers for that.
constexpr int kFollowing = 12;
constexpr bool kLazyLater = kWarpgroups == 3 && !FA3_SPLITS;

// Whether a consumer keeps its rows of Q in registers, where there is room: the first product then
// reads a third less of shared memory, and issues in half the instructions.
constexpr bool kQueriesInRegisters = kWarpgroups < 3 && kTileK == 128 && !kRowScales;

// How many keys of a sequence's last tile are computed. Where they are not all, the variant is for
// calls without a mask, all of whose sequences have as many keys: the last tile is the only one
// that has some to hide.
#if FA3_LAST_KEYS
constexpr int kLastKeys = FA3_LAST_KEYS;
#else
constexpr int kLastKeys = kTileK;
#endif
constexpr bool kShortTile = kLastKeys < kTileK;

#if FA3_BF16
constexpr bool kBf16 = true;
#else
constexpr bool kBf16 = false;
#endif

// Whether keys and values are unpacked codes (forward_unpacked.cuh).
#if FA3_UNPACKED
constexpr bool kUnpacked = true;
#else
constexpr bool kUnpacked = false;
#endif
constexpr bool kBf16Values = kBf16 && !kUnpacked;

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();

// What a consumer has in hand.
struct consumer {
  int warpgroup;
  ring<1, kQBytes> q;

  uint32_t queries[kQueriesInRegisters ? kHeadDim / 4 : 1];  // Q, as the first product takes it
  float s[kTileK / 2];                                       // S, then P
  uint32_t p[kTileK / 4];                                    // P, as the second product takes it
  softmax_rows rows;
  softmax_bases bases;      // where references always follow
  fa3_softmax_scale scale;  // of unpacked codes with scales of heads
  row_units units;          // and with scales of rows
  results out;
  bool accumulate;  // O holds a product of this tile already
  bool grown;       // O is to be multiplied by `factor` before the next product
  float factor[2];

  uint32_t used;            // tiles of K taken; V runs one behind: V of used - 1 is in use
  uint32_t q_at;            // descriptors: of Q,
  uint32_t next_k, next_v;  // of K of `used`, of V of used - 1
  fa3_range tiles;          // of keys, that its rows see
  bool pending;             // O of the tile before is to be stored
  bool product;             // after its last product, which runs
  int left_over;            // tiles of keys at its end that this consumer does not see
};

__device__ __forceinline__ const fa3_softmax_scale &scale_of(const fa3_forward_params &params,
                                                             const consumer &c) {
  return kUnpacked && !kRowScales ? c.scale : params.scale;
}

__device__ __forceinline__ void take_turn(int warpgroup) {
  if (FA3_PINGPONG) named_barrier_sync(kBarrierTurn + warpgroup, 256);
}

__device__ __forceinline__ void pass_turn(int warpgroup) {
  if (FA3_PINGPONG)
    named_barrier_arrive(kBarrierTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
}

// The scores of a tile's first keys.
template <int kKeys>
__device__ __forceinline__ float (&scores_of(consumer &c))[kKeys / 2] {
  return *(float(*)[kKeys / 2]) c.s;
}

// S = Q K^T, of so many keys of a tile.
template <int kKeys, bool kFromRegisters>
__device__ __forceinline__ void issue_scores(consumer &c, uint32_t k_at) {
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    const int chunk = k / kChunk, inside = k % kChunk * 2;
    const uint32_t from = k_at + ((chunk * kTileK * kRowBytes + inside) >> 4);
    if constexpr (kFromRegisters)
      wgmma_registers<kKeys, false>(scores_of<kKeys>(c), c.queries + k / 4, from, kDescriptorHigh,
                                    k > 0);
    else
      wgmma_shared<kKeys>(scores_of<kKeys>(c), c.q_at + ((chunk * kRows * kRowBytes + inside) >> 4),
                          from, kDescriptorHigh, k > 0);
  }
  wgmma_commit();
}

// Q comes to registers, and its buffer is free: not before these reads are over, which the copy
// engine's next writes would not wait for.
__device__ __forceinline__ void take_queries(consumer &c, uint32_t t) {
  const int thread = thread_again() & 127, row = thread / 32 * 16 + (thread & 15);
  const uint32_t tile = ring_tile(c.q, t);
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    const int chunk = k / kChunk, unit = k % kChunk / 8 + (thread & 31) / 16;
    load_matrices<false>(*(uint32_t(*)[4])(c.queries + k / 4),
                         tile + chunk * kRows * kRowBytes + swizzled(row, unit));
  }
  fence_proxy_async();
  __syncwarp();
  ring_release(c.q, t);
}

// O += P V, or O = P V, of so many keys of a tile. To be committed.
template <int kKeys>
__device__ __forceinline__ void issue_output(consumer &c, uint32_t v_at) {
#pragma unroll
  for (int k = 0; k < kKeys; k += 16)
    wgmma_registers<kHeadDimV>(c.out.o, c.p + k / 4, v_at + ((k * kRowBytes) >> 4), kDescriptorHigh,
                               k > 0 || c.accumulate);
}

// Two accumulators of the score layout, side by side in a row, make one operand
// pair of the layout that the second product takes.
template <int kKeys, bool kBegin = false>
__device__ __forceinline__ void pack_probabilities(const layout &m, consumer &c) {
  if constexpr (kRowScales) {
    const uint32_t scales = row_scales(m, c.used - 1) + kScaleBytes;
    follow_units<kBegin>(scales, c.units, c.s, c.rows, c.out.o);
    multiply_rows(c.s, scales);
  }
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i)
    c.p[i] = pack_pair_as<kBf16Values>(c.s[2 * i], c.s[2 * i + 1]);
}

__device__ __forceinline__ void rescale_output(consumer &c) {
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] *= c.factor[i / 2 % 2];
}

__device__ __forceinline__ void find_operands(const layout &m, consumer &c) {
  c.next_k = wgmma_descriptor_low(ring_tile(m.k, c.used), 0);
  c.next_v = wgmma_descriptor_low(ring_tile(m.v, c.used - 1), kTileK * kRowBytes);
}

// The scores of a tile of keys are issued.
__device__ __forceinline__ void count_step(const layout &m, consumer &c) {
  // Not known to the compiler, or it keeps what it could derive from it, and
  // spills; and then what it could derive in time, it derives too late.
  asm volatile("" : "+r"(c.used));
  ++c.used;
  find_operands(m, c);
  asm volatile("" : "+r"(c.next_k), "+r"(c.next_v));
}

// The scores of tile n are there.
__device__ __forceinline__ void take_scores(const layout &m, consumer &c, uint32_t t, int n) {
  pass_turn(c.warpgroup);
  registers_touch(c.s);
  ring_release(m.k, c.used - 1);
  if (!kQueriesInRegisters && n == c.tiles.begin) ring_release(c.q, t);
  if constexpr (kRowScales) multiply_rows(c.s, row_scales(m, c.used - 1));
}

// Cap and mask, where they are needed.
template <int kKeys>
__device__ __forceinline__ void adjust_scores(const fa3_forward_params &params, const work &w,
                                              consumer &c, int n) {
  if (FA3_SOFTCAP && params.softcap_log2 != 0.0f)
    cap_scores(scores_of<kKeys>(c), params.softcap_log2);
  const fa3_range whole = w.warpgroup[c.warpgroup].whole;
  if (n >= whole.begin && n < whole.end) return;
  fa3_range seen[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    seen[r] = fa3_visible_keys(&w.sequence.mask,
                               find_row(params, w, c.warpgroup, r, thread_again()).query);
  mask_scores(scores_of<kKeys>(c), seen, n * kTileK + 2 * (thread_again() & 3));
}

// The mask of the tile that the diagonal crosses: a row sees what the row before it sees and one
// key more.
__device__ __forceinline__ void mask_diagonal(const work &w, consumer &c) {
  const int thread = thread_again() & 127;
  const int row = thread / 32 * 16 + (thread & 31) / 4, column = 2 * (thread & 3);
  int before = 0;  // keys of the tile that the warpgroup's first row sees, less one
  if (kTileK > kRows) before = (w.first + c.warpgroup * kRows + w.sequence.mask.upper) % kTileK;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    hide_scores(c.s, r, bit_mask(0, scores_before(before + row + 8 * r + 1 - column)));
}

// A tile of keys that only other consumers' rows see: hand it back, and keep the turns in step.
__device__ __forceinline__ void pass_over(const layout &m, consumer &c) {
  ring_wait_full(m.k, c.used);
  ring_release(m.k, c.used);
  take_turn(c.warpgroup);
  pass_turn(c.warpgroup);
  ring_wait_full(m.v, c.used);
  ring_release(m.v, c.used);
  ++c.used;
}

// A tile has seen its last product: O leaves, and the log-sum-exp.
__device__ __forceinline__ void store_tile(const fa3_forward_params &params, const layout &m,
                                           uint32_t t, int warpgroup, const results &x) {
  const work &w = work_of(t);
  store_output<kBf16>(params, m, w, warpgroup, x, thread_again());
  store_lse(params, w, warpgroup, x, thread_again());
  finish_work(m, t);
}

// The scores of tile n of keys, the first, and P from them. O of the tile before leaves meanwhile;
// to pass the turn before that is no faster.
__device__ __forceinline__ void begin_tile(const fa3_forward_params &params, const layout &m,
                                           const work &w, consumer &c, uint32_t t, int n) {
  c.accumulate = false;
  c.grown = false;
  find_operands(m, c);
  ring_wait_full(m.k, c.used);
  take_turn(c.warpgroup);
  registers_touch(c.s);
  wgmma_fence();
  issue_scores<kLastKeys, false>(c, uniform(c.next_k));
  if (c.pending) store_tile(params, m, t - 1, c.warpgroup, c.out);
  count_step(m, c);
  wgmma_wait<0>();
  take_scores(m, c, t, n);
  if constexpr (kDiagonal)
    mask_diagonal(w, c);
  else
    adjust_scores<kLastKeys>(params, w, c, n);
  softmax_begin(scores_of<kLastKeys>(c), c.rows, scale_of(params, c));
  if (!kLazyRescale) softmax_take_bases(c.rows, c.bases, scale_of(params, c));
  pack_probabilities<kLastKeys, true>(m, c);
  if constexpr (kQueriesInRegisters) take_queries(c, t);
}

// What is subtracted from scores times the scale: of rows with units, for P in these.
__device__ __forceinline__ void set_shift(const consumer &c, const fa3_softmax_scale &scale,
                                          const bool (&large)[2], float (&shift)[2]) {
  softmax_set_shift(c.rows, scale.log2, large, shift);
  if (kRowScales)
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] += c.units.unit[r];
}

// P from the scores, while the product with the tile before runs. References follow rarely.
__device__ __forceinline__ void softmax_lazily(const layout &m, consumer &c,
                                               const fa3_softmax_scale &scale) {
  float top[2], shift[2];
  bool large[2] = {false, false};
  thread_maxima_by_integers(c.s, top);
  c.grown = false;
  set_shift(c, scale, large, shift);
  if (softmax_outgrown(top, c.rows)) {
    softmax_settle_unusual(c.s, top, c.rows, scale, large);
    c.grown = softmax_follow<true>(top, c.rows, scale.log2, c.factor);
    set_shift(c, scale, large, shift);
  }
  softmax_exponents(c.s, shift, scale.log2);
  softmax_exponentials<0, kAhead>(c.s, c.rows);
  // The compiler would put off what does not need the product, and the assembler moves the
  // wait up as far as it can, above the exponentials that are to run beside the product,
  // but not across a branch. What this one waits for is there already; the assembler does
  // not know, and cannot make it a predicate.
  registers_touch(c.rows.sum);
  registers_touch(c.s);
  if (c.grown) ring_wait_full(m.v, c.used - 2);
  wgmma_wait<0>();
  registers_touch(c.out.o);
  ring_release(m.v, c.used - 2);
  softmax_exponentials<kAhead, kTileK / 2>(c.s, c.rows);
}

// The same; references always follow, and O with them.
__device__ __forceinline__ void softmax_always(const layout &m, consumer &c,
                                               const fa3_softmax_scale &scale) {
  float top[2], shift[2];
  const bool large[2] = {false, false};
  thread_maxima_by_integers(c.s, top);
  softmax_rebase(c.s, top, c.rows, c.bases, scale);
  softmax_follow<false>(top, c.rows, scale.log2, c.factor);
  set_shift(c, scale, large, shift);
  softmax_exponents(c.s, shift, scale.log2);
  softmax_exponentials<0, kTileK / 2>(c.s, c.rows);
  wgmma_wait<0>();
  registers_touch(c.out.o);
  ring_release(m.v, c.used - 2);
  rescale_output(c);
}

// The scores that references need not follow, by the sums as they are without units.
__device__ __forceinline__ void set_bounds(consumer &c, const fa3_softmax_scale &scale) {
  if constexpr (kRowScales) {
    softmax_rows rows = c.rows;
    leave_units(c.units, rows.sum);
    softmax_set_bounds(rows, scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) c.rows.bound[r] = rows.bound[r];
  } else {
    softmax_set_bounds(c.rows, scale);
  }
}

// The scores of tile n of keys, and the product with the values of the tile before. Leaves P.
// `kPlain`: no mask, no cap, and the tile before is no short one. `kLazily`: references follow only
// if they have to.
template <bool kPlain, bool kLazily = kLazyRescale>
__device__ __forceinline__ void step(const fa3_forward_params &params, const layout &m,
                                     const work &w, consumer &c, uint32_t t, int n) {
  const uint32_t k_at = uniform(c.next_k), v_at = uniform(c.next_v);
  ring_wait_full(m.k, c.used);
  take_turn(c.warpgroup);
  registers_touch(c.s);
  registers_touch(c.out.o);
  wgmma_fence();
  issue_scores<kTileK, kQueriesInRegisters>(c, k_at);
  ring_wait_full(m.v, c.used - 1);
  if (kLazily) {
    if (c.grown) rescale_output(c);
    registers_touch(c.out.o);
  }
  wgmma_fence();
  issue_output<kPlain ? kTileK : kLastKeys>(c, v_at);
  wgmma_commit();
  c.accumulate = true;
  if (kLazily) set_bounds(c, scale_of(params, c));
  count_step(m, c);
  wgmma_wait<1>();
  take_scores(m, c, t, n);
  if (!kPlain && !kShortTile) adjust_scores<kTileK>(params, w, c, n);
  if (kLazily)
    softmax_lazily(m, c, scale_of(params, c));
  else
    softmax_always(m, c, scale_of(params, c));
  pack_probabilities<kTileK>(m, c);
}

// Tiles of keys n down to `begin`, of which none needs a mask or a cap, where references follow
// lazily behind the first kFollowing tiles. Returns the next tile's number, below `begin`.
__device__ __forceinline__ int plain_steps(const fa3_forward_params &params, const layout &m,
                                           const work &w, consumer &c, uint32_t t, int n,
                                           int begin) {
  const int later = max(begin, c.tiles.end - kFollowing);
  for (; n >= later; --n) step<true>(params, m, w, c, t, n);
  if (n < begin) return n;
  softmax_leave_bases(c.rows, c.bases);
  for (; n >= begin; --n) step<true, true>(params, m, w, c, t, n);
  if (c.grown) rescale_output(c);
  softmax_take_bases(c.rows, c.bases, scale_of(params, c));
  return n;
}

// What makes O the average, and the log-sum-exp.
__device__ __forceinline__ void finish_tile(const fa3_forward_params &params, const work &w,
                                            consumer &c) {
  if constexpr (kRowScales) leave_units(c.units, c.rows.sum);
  finish_rows(params, w, c.warpgroup, c.rows, scale_of(params, c), c.out, thread_again());
  if constexpr (kRowScales)
    scale_average(c.units, c.out);
  else if constexpr (kUnpacked)
    scale_average(head_scales(params, w).value, c.out);
  c.pending = true;
}

// The last product is issued. It runs while the next tile is looked up, and O leaves while that
// one's first scores are computed.
__device__ __forceinline__ void end_tile(const fa3_forward_params &params, const layout &m,
                                         const work &w, consumer &c) {
  ring_wait_full(m.v, c.used - 1);
  if (kLazyRescale && c.grown) rescale_output(c);
  registers_touch(c.out.o);
  // Two ways to the commit: ptxas serialises the products unless each way begins with a fence, and
  // another fence stands where they meet.
  if (kShortTile && uniform(c.tiles.end - c.tiles.begin) == 1) {
    wgmma_fence();
    issue_output<kLastKeys>(c, uniform(c.next_v));
  } else {
    wgmma_fence();
    issue_output<kTileK>(c, uniform(c.next_v));
  }
  if (kShortTile) wgmma_fence();
  wgmma_commit();
  if (!kLazyRescale) softmax_leave_bases(c.rows, c.bases);
  finish_tile(params, w, c);
  c.product = true;
}

// A tile whose rows see no key.
__device__ __forceinline__ void skip_tile(const fa3_forward_params &params, const layout &m,
                                          const work &w, consumer &c, uint32_t t) {
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] = 0.0f;
  ring_release(c.q, t);
  finish_tile(params, w, c);
}

__device__ __forceinline__ void attend(const fa3_forward_params &params, const layout &m,
                                       int warpgroup) {
  consumer c;
  c.warpgroup = warpgroup;
  c.q = ring_beside(m.q, warpgroup);
  c.used = 0;
  c.pending = false;
  c.product = false;
  c.left_over = 0;
  if (FA3_PINGPONG && warpgroup == 0) named_barrier_arrive(kBarrierTurn, 256);

  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    const bool last = uniform(w.last);
    c.tiles.begin = uniform(w.warpgroup[warpgroup].tiles.begin);
    c.tiles.end = uniform(w.warpgroup[warpgroup].tiles.end);
    const int tiles_begin = uniform(w.tiles.begin);
    int n = uniform(w.tiles.end) - 1;

    // The last product of the tile before. Its output leaves behind this tile's first scores, if
    // they come next.
    wgmma_wait<0>();
    registers_touch(c.out.o);
    if (c.product) ring_release(m.v, c.used - 1);
    c.product = false;
    const bool joined = !last && c.left_over == 0 && c.tiles.begin < c.tiles.end && n < c.tiles.end;
#if FA3_SPLITS
    if (c.pending && !is_whole(work_of(t - 1))) {
      store_part(params, work_of(t - 1), warpgroup, c.out, thread_again());
      finish_work(m, t - 1);
      c.pending = false;
    }
#endif
    if (c.pending && !joined) {
      store_tile(params, m, t - 1, warpgroup, c.out);
      c.pending = false;
    }
    for (; c.left_over > 0; --c.left_over) pass_over(m, c);
    if (last) break;

    c.q_at = uniform(wgmma_descriptor_low(ring_tile(c.q, t), 0));
    ring_wait_full(c.q, t);
    const int stop = max(c.tiles.end, tiles_begin);
    for (; n >= stop; --n) pass_over(m, c);
    if (kUnpacked && !kRowScales) c.scale = scale_times(params.scale, head_scales(params, w).key);
    if (kRowScales) c.units = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    c.rows = {{scale_of(params, c).none, scale_of(params, c).none}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    if (c.tiles.begin >= c.tiles.end) {
      skip_tile(params, m, w, c, t);
      continue;
    }
    c.left_over = c.tiles.begin - tiles_begin;

    begin_tile(params, m, w, c, t, n);
    if constexpr (kDiagonal) {
      if constexpr (kLazyLater)
        plain_steps(params, m, w, c, t, n - 1, c.tiles.begin);
      else
        for (--n; n >= c.tiles.begin; --n) step<true>(params, m, w, c, t, n);
      end_tile(params, m, w, c);
      continue;
    }
    // Most tiles need neither mask nor cap: a loop of their own, without the question. In a variant
    // with a short tile all others are such tiles, but those behind that one.
    const fa3_range whole = w.warpgroup[warpgroup].whole;
    const bool capped = FA3_SOFTCAP && params.softcap_log2 != 0.0f;
    const int plain_begin = max(whole.begin, c.tiles.begin);
    const int plain_end = capped ? plain_begin : min(whole.end, kShortTile ? n - 1 : n);
    for (--n; n >= c.tiles.begin; --n) {
      if (n >= plain_begin && n < plain_end) {
        if constexpr (kLazyLater)
          n = plain_steps(params, m, w, c, t, n, plain_begin);
        else
          for (; n >= plain_begin; --n) step<true>(params, m, w, c, t, n);
        if (n < c.tiles.begin) break;
      }
      step<false>(params, m, w, c, t, n);
    }
    end_tile(params, m, w, c);
  }
  tma_store_wait_read<0>();  // shared memory lives as long as the block
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ fa3_forward_params params) {
  // Opaque, so that the compiler keeps it in a register instead of finding out
  // again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const layout m = lay_out(base);
  const bool paged = FA3_PAGES && params.page_size > 0;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&params.query);
    tma_prefetch_map(&params.key);
    tma_prefetch_map(&params.value);
    tma_prefetch_map(&params.output);
    init_barriers(params, m, paged);
  }
  __syncthreads();
  // And never tells the next to begin early where it may use the same counter of tiles.
  wait_for_prior_grids();
  if (keys_are_dealt(params)) let_next_grid_launch();

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 2 && keys_are_dealt(params))
      schedule_deal(params, m);
    else if (warp == 2)
      schedule(
          params, m, [] {}, [](uint32_t, bool) {});
    else if (paged)
      load_pages(params, m, warp);
    else if (warp == 0)
      load_keys_and_values(params, m);
    else if (warp == 1)
      load_queries(params, m);
  } else {
    registers_take<kConsumerRegisters>();
    attend(params, m, warp / 4 - 1);
  }
}
