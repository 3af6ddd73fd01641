// The forward pass on Hopper: O = softmax(scale Q K^T) V, tile by tile.
//
// A block computes 64 query rows for each of its consumer warpgroups. It has one
// more warpgroup, whose first warp streams tiles of keys and values into two rings
// of shared memory buffers, and whose second warp fetches queries, one tile ahead.
// A consumer warpgroup keeps its scores, probabilities and output in registers:
//
//   issue S(n) = Q K(n)^T            the matrix unit works on both products while
//   rescale O if the reference moved
//   issue O += P(n+1) V(n+1)         the warpgroup waits for the first,
//   wait S(n); softmax S(n) -> P(n)  and on the second during the softmax
//   wait O
//
// The last product of a tile runs while the next tile is looked up, and its output
// leaves while that one's first scores are computed.
//
// The warpgroups take turns at issuing (named barriers), so that one's softmax
// falls in the time of the other's products. Keys are visited from the last tile
// to the first: the tiles that need a mask come early.
//
// Compile with what variants.def says; see forward_params.h for what the host prepares.
#include "forward_load.cuh"
#include "forward_work.cuh"

__device__ __forceinline__ void take_turn(int warpgroup) {
  if (FA3_PINGPONG) named_barrier_sync(kBarrierTurn + warpgroup, 256);
}

__device__ __forceinline__ void pass_turn(int warpgroup) {
  if (FA3_PINGPONG)
    named_barrier_arrive(kBarrierTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
}

// How many of a thread's scores become exponentials before the wait for the product
// that runs meanwhile.
constexpr int kAhead = kTileN / 8;

// Whether references move only if they have to. With three warpgroups the multiplications hide
// behind the other two.
constexpr bool kLazyRescale = kWarpgroups < 3;

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();

// S = Q K^T for the warpgroup's 64 rows and a tile of keys.
__device__ __forceinline__ void issue_scores(float (&s)[kTileN / 2], uint32_t query, uint32_t key) {
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    const int chunk = k / kChunk, inside = k % kChunk * 2;
    wgmma_shared<kTileN>(s, query + ((chunk * kRows * kRowBytes + inside) >> 4),
                         key + ((chunk * kTileN * kRowBytes + inside) >> 4), kDescriptorHigh,
                         k > 0);
  }
  wgmma_commit();
}

// O += P V, or O = P V.
__device__ __forceinline__ void issue_output(float (&o)[kHeadDimV / 2],
                                             const uint32_t (&probabilities)[kTileN / 4],
                                             uint32_t value, bool accumulate) {
#pragma unroll
  for (int k = 0; k < kTileN; k += 16)
    wgmma_registers<kHeadDimV>(o, probabilities + k / 4, value + ((k * kRowBytes) >> 4),
                               kDescriptorHigh, k > 0 || accumulate);
  wgmma_commit();
}

// Two accumulators of the score layout, side by side in a row, make one operand
// pair of the layout that the second product takes.
__device__ __forceinline__ void pack_probabilities(uint32_t (&probabilities)[kTileN / 4],
                                                   const float (&s)[kTileN / 2]) {
#pragma unroll
  for (int i = 0; i < kTileN / 4; ++i) probabilities[i] = pack_pair(s[2 * i], s[2 * i + 1]);
}

// A chunk of the warp's 16 rows of output goes to shared memory, as the average.
__device__ __forceinline__ void stage_output(const float *o, const float (&factor)[2],
                                             uint32_t rows) {
  const int lane = threadIdx.x & 31;
  const int turn = kRowBytes == 128 ? lane & 7 : (lane & 7) >> 1;  // the swizzle
#pragma unroll
  for (int j = 0; j < kUnits; j += 2) {
    const float *x = o + j * 4;
    store_matrices(rows + (lane & 15) * kRowBytes + (((j + lane / 16) ^ turn) << 4),
                   pack_pair(x[0] * factor[0], x[1] * factor[0]),
                   pack_pair(x[2] * factor[1], x[3] * factor[1]),
                   pack_pair(x[4] * factor[0], x[5] * factor[0]),
                   pack_pair(x[6] * factor[1], x[7] * factor[1]));
  }
}

// The warp's rows leave by the copy engine. `row` is the first of them in its tile.
__device__ __forceinline__ void store_output_by_tma(const fa3_forward_params &p, const work &w,
                                                    const float (&o)[kHeadDimV / 2],
                                                    const float (&factor)[2], uint32_t stage,
                                                    int row) {
  // Chunks that leave together: all, if there is room for them.
  constexpr int kTogether = kChunksV <= kStageChunks ? kChunksV : 1;
#pragma unroll
  for (int c = 0; c < kChunksV; ++c) {
    if (c >= kStageChunks) {
      tma_store_wait_read<kStageChunks - 1>();
      __syncwarp();
    }
    stage_output(o + c * kUnits * 4, factor, stage + c % kStageChunks * kStageChunkBytes);
    if ((c + 1) % kTogether != 0) continue;
    fence_proxy_async();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
      for (int leaving = c + 1 - kTogether; leaving <= c; ++leaving)
        tma_store_4d(&p.out, stage + leaving % kStageChunks * kStageChunkBytes, leaving * kChunk,
                     w.query_row + w.first + row, w.head, w.batch);
    }
    tma_store_commit();
  }
}

// The warp's rows leave one by one: not all are of this sequence, or they are of several heads.
__device__ __forceinline__ void store_output_by_threads(const fa3_forward_params &p, const work &w,
                                                        int warpgroup,
                                                        const float (&o)[kHeadDimV / 2],
                                                        const float (&factor)[2], uint32_t stage) {
  const int lane = threadIdx.x & 31, row0 = (threadIdx.x & 127) / 32 * 16;
  const int first = w.first + warpgroup * p.queries_per_warpgroup;
  const int limit = p.queries_per_warpgroup * p.packed;
#pragma unroll
  for (int c = 0; c < kChunksV; ++c) {
    const uint32_t rows = stage + c % kStageChunks * kStageChunkBytes;
    stage_output(o + c * kUnits * 4, factor, rows);
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * kUnits; i += 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const int in_tile = row0 + row;
      const int query = first + query_of_row(p, in_tile);
      const int head = head_of_row(p, w, in_tile);
      const int column = c * kChunk + unit * 8;
      if (in_tile >= limit || query >= w.mask.queries || column >= p.head_dim_v) continue;
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(rows + row * kRowBytes +
                         ((unit ^ (kRowBytes == 128 ? row & 7 : (row & 7) >> 1)) << 4))
                   : "memory");
      uint16_t *to = (uint16_t *)p.out_pointer + w.batch * p.out_stride_batch +
                     (w.query_row + query) * p.out_stride_row + head * p.out_stride_head + column;
      *(uint4 *)to = v;
    }
    __syncwarp();
  }
}

// Where a thread's row `r` of two is, as in softmax_rows.
struct row_place {
  int head, query;  // of all heads; within the sequence
  bool stored;      // whether it is a row of the output
};

__device__ __forceinline__ row_place place_of_row(const fa3_forward_params &p, const work &w,
                                                  int warpgroup, int r) {
  const int row = (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4 + 8 * r;
  const int step = p.queries_per_warpgroup;
  row_place place;
  place.head = head_of_row(p, w, row);
  place.query = w.first + warpgroup * step + query_of_row(p, row);
  place.stored = place.query < w.mask.queries && row < step * p.packed;
  return place;
}

// A tile has seen its last scores: `factor` will turn the summed output into the average.
__device__ __forceinline__ void finish_rows(const fa3_forward_params &p, const work &w,
                                            int warpgroup, const softmax_rows &rows,
                                            float (&factor)[2], float (&lse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float *sink = nullptr;
    if (p.sink != nullptr) {
      const row_place place = place_of_row(p, w, warpgroup, r);
      if (place.stored) sink = p.sink + place.head;
    }
    lse[r] = softmax_finish(rows, r, sink, factor[r]);
  }
}

// A tile has seen its last product: the output leaves, and the log-sum-exp.
__device__ __forceinline__ void finish_tile(const fa3_forward_params &p, uint32_t base, uint32_t t,
                                            int warpgroup, const float (&o)[kHeadDimV / 2],
                                            const float (&factor)[2], const float (&lse)[2]) {
  const work &w = work_of(t);
  const int warp = (threadIdx.x & 127) / 32;
  const int row = warpgroup * p.queries_per_warpgroup + warp * 16;
  const uint32_t stage = base + kStageAt + (warpgroup * 4 + warp) * kStageBytes;
  tma_store_wait_read<0>();  // by the tile before
  __syncwarp();
  // The copy engine clips at the tensor's end, not at the sequence's.
  if (p.store_by_tma && (!p.clear_value || w.first + row + 16 <= w.mask.queries))
    store_output_by_tma(p, w, o, factor, stage, row);
  else
    store_output_by_threads(p, w, warpgroup, o, factor, stage);
  if (p.lse != nullptr && (threadIdx.x & 3) == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const row_place place = place_of_row(p, w, warpgroup, r);
      if (place.stored)
        p.lse[w.batch * p.lse_stride_batch + place.head * p.lse_stride_head + w.query_row +
              place.query] = lse[r];
    }
  }
  finish_work(base, t);
}

__device__ __forceinline__ void attend(const fa3_forward_params &p, uint32_t base, int warpgroup) {
  const int lane = threadIdx.x & 31;
  float o[kHeadDimV / 2];
  // Of a tile whose scores are done: what turns its output into the average, and
  // the log-sum-exp.
  float average[2] = {0.0f, 0.0f}, lse[2] = {0.0f, 0.0f};
  uint32_t probabilities[kTileN / 4];

  // Buffers of keys used so far. Values run one behind: buffer used - 1 is held until its product
  // is done.
  uint32_t used = 0;
  // The last product of the tile before is running, and the output still to be stored.
  bool pending = false;
  // Key tiles at the end of the tile before that this warpgroup does not need.
  int left_over = 0;

  auto wait_key = [&](uint32_t use) {
    mbarrier_wait(base + kKeyFull + 8 * ring_stage<kStages>(use), ring_parity<kStages>(use));
  };
  auto wait_value = [&](uint32_t use) {
    mbarrier_wait(base + kValueFull + 8 * ring_stage<kStages>(use), ring_parity<kStages>(use));
  };
  auto release_key = [&](uint32_t use) {
    mbarrier_arrive_warp(base + kKeyEmpty + 8 * ring_stage<kStages>(use));
  };
  auto release_value = [&](uint32_t use) {
    mbarrier_arrive_warp(base + kValueEmpty + 8 * ring_stage<kStages>(use));
  };
  auto release_query = [&](uint32_t t) {
    if (lane == 0)
      mbarrier_arrive(base + kQueryEmpty +
                      8 * (ring_stage<kQueryStages>(t) * kWarpgroups + warpgroup));
  };
  auto key_tile = [&](uint32_t use) {
    return wgmma_descriptor_low(base + kKeyAt + ring_stage<kStages>(use) * kKeyBytes, 0);
  };
  auto value_tile = [&](uint32_t use) {
    return wgmma_descriptor_low(base + kValueAt + ring_stage<kStages>(use) * kValueBytes,
                                kTileN * kRowBytes);
  };
  // A tile of keys that only other rows see: hand it back, and keep the turns in step.
  auto pass_over = [&]() {
    wait_key(used);
    release_key(used);
    wait_value(used);
    release_value(used);
    ++used;
    take_turn(warpgroup);
    pass_turn(warpgroup);
  };

  if (FA3_PINGPONG && warpgroup == 0) named_barrier_arrive(kBarrierTurn, 256);

  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    const bool last = uniform(w.last);
    const int own_begin = uniform(w.warpgroup[warpgroup].tiles.begin);
    const int own_end = uniform(w.warpgroup[warpgroup].tiles.end);
    const int tiles_begin = uniform(w.tiles.begin);
    int n = uniform(w.tiles.end) - 1;

    // The last product of the tile before. Its output leaves behind this tile's first scores, if
    // they come next.
    wgmma_wait<0>();
    registers_touch(o);
    if (pending) release_value(used - 1);
    const bool joined = !last && left_over == 0 && own_begin < own_end && n < own_end;
    if (pending && !joined) {
      finish_tile(p, base, t - 1, warpgroup, o, average, lse);
      pending = false;
    }
    for (; left_over > 0; --left_over) pass_over();
    if (last) break;

    const int buffer = ring_stage<kQueryStages>(t) * kWarpgroups + warpgroup;
    const uint32_t query_tile =
        uniform(wgmma_descriptor_low(base + kQueryAt + buffer * kQueryBytes, 0));
    mbarrier_wait(base + kQueryFull + 8 * buffer, ring_parity<kQueryStages>(t));

    const int stop = own_end > tiles_begin ? own_end : tiles_begin;
    for (; n >= stop; --n) pass_over();
    softmax_rows rows = {{FA3_NO_REFERENCE, FA3_NO_REFERENCE}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    if (own_begin >= own_end) {
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
      release_query(t);
      finish_rows(p, w, warpgroup, rows, average, lse);
      finish_tile(p, base, t, warpgroup, o, average, lse);
      continue;
    }
    left_over = own_begin - tiles_begin;

    // Whether O holds a product of this tile already.
    bool accumulate = false;
    // Whether O is to be multiplied by `factor` before the next product.
    bool grown = false;
    float factor[2] = {1.0f, 1.0f};
    float s[kTileN / 2];
    uint32_t next_key = key_tile(used), next_value = value_tile(used - 1);
    auto rescale_output = [&]() {
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= factor[i / 2 % 2];
    };
    auto adjust_scores = [&]() {
      if (FA3_SOFTCAP && p.softcap_log2 != 0.0f) cap_scores(s, p.softcap_log2);
      const fa3_range whole = w.warpgroup[warpgroup].whole;
      if (n >= whole.begin && n < whole.end) return;
      fa3_range seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        seen[r] = fa3_visible_keys(&w.mask, place_of_row(p, w, warpgroup, r).query);
      mask_scores(s, seen, n * kTileN + 2 * (lane & 3));
    };
    // After the scores of a tile of keys are issued.
    auto count_step = [&]() {
      // Not known to the compiler, or it keeps what it could derive from it, and
      // spills; and then what it could derive in time, it derives too late.
      asm volatile("" : "+r"(used));
      ++used;
      next_key = key_tile(used);
      next_value = value_tile(used - 1);
      asm volatile("" : "+r"(next_key), "+r"(next_value));
    };
    // After they are there.
    auto release_operands = [&]() {
      release_key(used - 1);
      if (n == own_begin) release_query(t);
    };

    // The first scores, and the output of the tile before. To pass the turn before that is no
    // faster.
    wait_key(used);
    take_turn(warpgroup);
    registers_touch(s);
    wgmma_fence();
    issue_scores(s, query_tile, uniform(next_key));
    if (pending) finish_tile(p, base, t - 1, warpgroup, o, average, lse);
    count_step();
    wgmma_wait<0>();
    pass_turn(warpgroup);
    registers_touch(s);
    release_operands();
    adjust_scores();
    softmax_begin(s, rows, p.scale_log2);
    pack_probabilities(probabilities, s);

    // The scores of the next tile of keys, and the product with the values of the last. Leaves the
    // probabilities for the next product.
    auto take_step = [&](bool adjust) {
      const uint32_t k = uniform(next_key), v = uniform(next_value);
      wait_key(used);
      take_turn(warpgroup);
      registers_touch(s);
      registers_touch(o);
      wgmma_fence();
      issue_scores(s, query_tile, k);
      wait_value(used - 1);
      if (kLazyRescale) {
        if (grown) rescale_output();
        registers_touch(o);
      }
      wgmma_fence();
      issue_output(o, probabilities, v, accumulate);
      accumulate = true;
      if (kLazyRescale) softmax_set_bounds(rows);
      count_step();
      wgmma_wait<1>();
      pass_turn(warpgroup);
      registers_touch(s);
      release_operands();
      if (adjust) adjust_scores();

      float top[2];
      thread_maxima_by_integers(s, top);
      if (kLazyRescale) {
        grown = false;
        if (softmax_outgrown(top, rows, p.scale_log2)) {
          correct_maxima(s, top);
          grown = softmax_follow<true>(top, rows, p.scale_log2, factor);
        }
        softmax_exponents<0, kTileN / 2>(s, rows, p.scale_log2);
        softmax_exponentials<0, kAhead>(s, rows);
        // The compiler would put off what does not need the product, and the assembler moves the
        // wait up as far as it can, above the exponentials that are to run beside the product,
        // but not across a branch. What this one waits for is there already; the assembler does
        // not know, and cannot make it a predicate.
        registers_touch(rows.sum);
        registers_touch(s);
        if (grown) wait_value(used - 2);
      } else {
        correct_maxima(s, top);
        softmax_follow<false>(top, rows, p.scale_log2, factor);
        softmax_exponents<0, kTileN / 2>(s, rows, p.scale_log2);
        softmax_exponentials<0, kTileN / 2>(s, rows);
      }
      wgmma_wait<0>();
      registers_touch(o);
      release_value(used - 2);
      if (kLazyRescale)
        softmax_exponentials<kAhead, kTileN / 2>(s, rows);
      else
        rescale_output();
      pack_probabilities(probabilities, s);
    };
    // Most tiles need no mask: a loop of their own, without the question.
    const fa3_range whole = w.warpgroup[warpgroup].whole;
    const bool capped = FA3_SOFTCAP && p.softcap_log2 != 0.0f;
    const int plain_begin = max(whole.begin, own_begin);
    const int plain_end = capped ? plain_begin : min(whole.end, n);
    for (--n; n >= own_begin; --n) {
      if (n >= plain_begin && n < plain_end) {
        for (; n >= plain_begin; --n) take_step(false);
        if (n < own_begin) break;
      }
      take_step(true);
    }
    wait_value(used - 1);
    if (kLazyRescale && grown) rescale_output();
    registers_touch(o);
    wgmma_fence();
    issue_output(o, probabilities, uniform(next_value), accumulate);
    finish_rows(p, w, warpgroup, rows, average, lse);
    pending = true;
  }
  tma_store_wait_read<0>();  // shared memory lives as long as the block
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    forward(const __grid_constant__ fa3_forward_params p) {
  // Opaque, so that the compiler keeps it in a register instead of finding out
  // again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.query);
    tma_prefetch_map(&p.key);
    tma_prefetch_map(&p.value);
    tma_prefetch_map(&p.out);
    for (int i = 0; i < kQueryStages * kWarpgroups; ++i) {
      mbarrier_init(base + kQueryFull + 8 * i, 1);
      mbarrier_init(base + kQueryEmpty + 8 * i, 4);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kKeyFull + 8 * i, 1);
      mbarrier_init(base + kKeyEmpty + 8 * i, kConsumerWarps);
      mbarrier_init(base + kValueFull + 8 * i, 1);
      mbarrier_init(base + kValueEmpty + 8 * i, kConsumerWarps);
    }
    mbarrier_init(base + kValueLanded, 1);
    mbarrier_init(base + kWorkWanted, 1);
    for (int i = 0; i < kWorkSlots; ++i) {
      mbarrier_init(base + kWorkFull + 8 * i, 1);
      mbarrier_init(base + kWorkEmpty + 8 * i, 32 * (kConsumerWarps + 2));
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  // And never tells the next to begin early: it may use the same counter of tiles.
  wait_for_prior_grids();

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 0)
      load_keys_and_values(p, base);
    else if (warp == 1)
      load_queries(p, base);
    else if (warp == 2)
      schedule(p, base);
  } else {
    registers_take<kConsumerRegisters>();
    attend(p, base, warp / 4 - 1);
  }
}
