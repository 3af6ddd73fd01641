// The backward pass on Hopper for wide heads: dQ, dK and dV, deterministic.
//
// dK and dV of 64 keys fill half of a multiprocessor's registers, and no more keys fit. So two
// blocks work together, as a cluster, on 128 keys of one head: tiles of queries and of dO arrive
// in both at once, and each sums its columns of dQ over the keys of both. In a block three
// warpgroups have a role each, and pass on what they make through shared memory:
//
//   probabilities:  S^T = K Q^T;  P^T = exp(S^T - lse);  dV += P^T dO
//   scores:         dP^T = V dO^T;  dS^T = P^T * (dP^T - D);  dK += dS^T Q
//   queries:        dQ = dS K, half of the columns for twice the keys
//
// P goes to the second in float32, dS to the third in 16 bits, and to the third of the other
// block. A fourth warpgroup loads and plans.
//
// Compile with what variants.def says; see backward_params.h for what the host prepares.
#include "backward_probability.cuh"
#include "backward_wide_load.cuh"
#include "backward_wide_store.cuh"

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();

__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address) {
  return uniform(wgmma_descriptor_low(address, kChunkBytes));
}

// S = A B^T, both 64 rows of kColumns in shared memory.
template <int kColumns>
__device__ __forceinline__ void issue_scores(float (&s)[32], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < kColumns; k += 16) {
    const int at = (k / kChunk * kChunkBytes + k % kChunk * 2) >> 4;
    wgmma_shared<64>(s, a + at, b + at, kDescriptorHigh, k > 0);
  }
  wgmma_commit();
}

// D += A B, A in registers, or D = A B. 128 columns at a time, because the assembler takes no
// instruction with more registers than the launch allots a thread.
template <int kColumns>
__device__ __forceinline__ void issue_gradient(float (&d)[kColumns / 2], const uint32_t (&a)[16],
                                               uint32_t b, bool accumulate) {
#pragma unroll
  for (int k = 0; k < 64; k += 16) {
    wgmma_registers<128>(*(float(*)[64])d, a + k / 4, b + ((k * kRowBytes) >> 4), kDescriptorHigh,
                         k > 0 || accumulate);
    if constexpr (kColumns > 128)
      wgmma_registers<kColumns - 128>(*(float(*)[kColumns / 2 - 64])(d + 64), a + k / 4,
                                      b + ((2 * kChunkBytes + k * kRowBytes) >> 4), kDescriptorHigh,
                                      k > 0 || accumulate);
  }
  wgmma_commit();
}

// This warp has read a buffer that both blocks share for the last time.
__device__ __forceinline__ void release_both(uint32_t barrier) {
  if ((threadIdx.x & 31) < 2) cluster_arrive(cluster_map(barrier, threadIdx.x & 1));
}

// The same for queries, and each thread has read their statistics, which are the block's own.
__device__ __forceinline__ void release_queries(uint32_t barrier) {
  mbarrier_arrive(barrier);
  release_both(barrier);
}

// The barrier of this warp and the one that it passes probabilities to; `barrier`: the first
// warp's.
__device__ __forceinline__ uint32_t of_warp(uint32_t barrier) {
  return barrier + (thread_again() & 127) / 32 * 8;
}

// What the thread needs of a tile's lse, or of its D, for some groups of columns.
__device__ __forceinline__ void load_statistics(float2 (&of)[8], int first, int count,
                                                uint32_t rows) {
#pragma unroll
  for (int j = first; j < first + count; ++j)
    of[j] = load_shared_pair(rows + 32 * j + 8 * (threadIdx.x & 3));
}

// Scores become probabilities; they are packed as an operand, and go to shared memory. In general
// there may be a mask, a cap or large lse; then what is passed on is also times the cap's slope,
// which dS has as a factor, too.
template <bool kGeneral>
__device__ __forceinline__ void find_probabilities(const fa3_backward_params &p, const work &w,
                                                   int block, float (&s)[32], float2 (&lse)[8],
                                                   uint32_t rows, uint32_t (&operand)[16],
                                                   uint32_t to) {
  if (!kGeneral) load_statistics(lse, 4, 4, rows);
  const bool capped = kGeneral && p.softcap_log2 != 0.0f;
  const bool large = kGeneral && has_large_lse<kRows>(rows);
  fa3_range seeing[2];
  if constexpr (kGeneral) {
    const int thread = thread_again() & 127, column = 2 * (thread & 3);
    if (capped) cap_scores(s, p.softcap_log2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = w.first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
      seeing[r] = fa3_seeing_queries(&w.sequence.mask, key);
      if (key >= w.sequence.mask.keys) seeing[r].end = seeing[r].begin;
      seeing[r].begin -= block * kRows + column;
      seeing[r].end -= block * kRows + column;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (kGeneral) load_statistics(lse, j, 1, rows);
    float passed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float &x = s[4 * j + e];
      const float score = x, of_row = e % 2 ? lse[j].y : lse[j].x;
      x = kGeneral && large ? large_probability(x, p.natural, of_row)
                            : exp2_unit(fmaf(x, p.scale_log2, -of_row));
      if (kGeneral && (8 * j + e % 2 < seeing[e / 2].begin || 8 * j + e % 2 >= seeing[e / 2].end))
        x = 0.0f;
      passed[e] = capped ? fmaf(-x * score, score, x) : x;
    }
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 512), "f"(passed[0]),
                 "f"(passed[1]), "f"(passed[2]), "f"(passed[3])
                 : "memory");
    operand[2 * j] = pack_pair(s[4 * j], s[4 * j + 1]);
    operand[2 * j + 1] = pack_pair(s[4 * j + 2], s[4 * j + 3]);
  }
}

// S^T, P^T, dV.
__device__ __forceinline__ void make_dv(const fa3_backward_params &p, uint32_t base) {
  float dv[kHeadDimV / 2], s[32];
  uint32_t operand[16];
  uint32_t use = 0, tiles = 0;  // buffers used so far
  const uint32_t key = tile_descriptor(base + kKeyAt);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (uniform(w.last)) break;
    int left = uniform(w.steps), i = uniform(w.blocks.end) - 1;
    if (left > 0) mbarrier_wait(base + kKeyFull, tiles++ & 1);
    while (left > 0) {
      const uint32_t query_stage = ring_stage<kQueryStages>(use);
      const uint32_t query_tile =
          tile_descriptor(base + kQueryAt + query_stage * kChunks * kChunkBytes);
      mbarrier_wait(base + kQueryFull + 8 * query_stage, ring_parity<kQueryStages>(use));
      registers_touch(s);
      wgmma_fence();
      issue_scores<kHeadDim>(s, key, query_tile);
      const uint32_t rows = base + kRowsAt + query_stage * kRowsBytes;
      float2 lse[8];
      load_statistics(lse, 0, 4, rows);
      const bool general = p.softcap_log2 != 0.0f || has_large_lse<kRows>(rows) ||
                           i < uniform(w.whole[0].begin) || i >= uniform(w.whole[0].end);
      wgmma_wait<0>();
      registers_touch(s);
      if (left == 1) mbarrier_arrive_warp(base + kKeyEmpty);
      const int thread = thread_again() & 127, warp = thread / 32;
      const uint32_t mine = base + kProbabilitiesAt + warp * kProbabilitiesBytes + thread % 32 * 16;
      mbarrier_wait(of_warp(base + kProbabilitiesEmpty), (use & 1) ^ 1);
      if (general)
        find_probabilities<true>(p, w, i, s, lse, rows, operand, mine);
      else
        find_probabilities<false>(p, w, i, s, lse, rows, operand, mine);
      mbarrier_arrive(of_warp(base + kProbabilitiesFull));
      release_queries(base + kQueryEmpty + 8 * query_stage);

      const uint32_t stage = ring_stage<kDoStages>(use);
      const uint32_t tile = tile_descriptor(base + kDoAt + stage * kChunksV * kChunkBytes);
      mbarrier_wait(base + kDoFull + 8 * stage, ring_parity<kDoStages>(use));
      registers_touch(dv);
      wgmma_fence();
      issue_gradient<kHeadDimV>(dv, operand, tile, left < uniform(w.steps));
      wgmma_wait<0>();
      registers_touch(dv);
      release_both(base + kDoEmpty + 8 * stage);
      ++use;
      --left;
      if (--i < w.blocks.begin) i = w.blocks.end - 1;
    }
    const int warp = (thread_again() & 127) / 32;
    mbarrier_wait(of_warp(base + kProbabilitiesEmpty), (use & 1) ^ 1);
    store_rows<kHeadDimV, 64>(p.grad_value, dv, uniform(w.steps) > 0, 1.0f,
                              base + kProbabilitiesAt + warp * kProbabilitiesBytes,
                              w.sequence.key_batch, w.sequence.key_row + w.first + warp * 16,
                              w.sequence.mask.keys - w.first - warp * 16, w.part);
    finish_work(base, t);
  }
}

// dS^T = P^T * (dP^T - D), packed as an operand; 0 where P is, if it is `masked`.
template <bool kMasked>
__device__ __forceinline__ void find_ds(float (&s)[32], float2 (&d)[8], uint32_t rows,
                                        uint32_t (&operand)[16], uint32_t probabilities) {
  constexpr int kAtOnce = 4;  // groups of eight columns
#pragma unroll
  for (int first = 0; first < 8; first += kAtOnce) {
    float probability[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      load_four_shared(probability[j], probabilities + (first + j) * 512);
    if (first + kAtOnce < 8) load_statistics(d, first + kAtOnce, kAtOnce, rows);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &x = s[4 * (first + j) + e];
        x = probability[j][e] * (x - (e % 2 ? d[first + j].y : d[first + j].x));
        if (kMasked && probability[j][e] == 0.0f) x = 0.0f;
      }
      const float *x = s + 4 * (first + j);
      operand[2 * (first + j)] = pack_pair(x[0], x[1]);
      operand[2 * (first + j) + 1] = pack_pair(x[2], x[3]);
    }
  }
}

// dP^T, dS^T, dK.
__device__ __forceinline__ void make_dk(const fa3_backward_params &p, uint32_t base) {
  const int warp = (threadIdx.x & 127) / 32, lane = threadIdx.x & 31;
  const uint32_t peer = cluster_rank() ^ 1;
  const uint32_t probabilities = base + kProbabilitiesAt + warp * kProbabilitiesBytes + lane * 16;
  float dk[kHeadDim / 2], s[32];
  uint32_t operand[16];
  uint32_t use = 0, tiles = 0;  // buffers used so far
  const uint32_t value = tile_descriptor(base + kValueAt);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (uniform(w.last)) break;
    const int steps = uniform(w.steps);
    const bool any = steps > 0;
    int left = steps, i = uniform(w.blocks.end) - 1;
    if (any) mbarrier_wait(base + kValueFull, tiles++ & 1);
    while (any) {
      forget(base);
      const uint32_t stage = ring_stage<kDoStages>(use);
      const uint32_t do_tile = tile_descriptor(base + kDoAt + stage * kChunksV * kChunkBytes);
      const uint32_t query_stage = ring_stage<kQueryStages>(use);
      mbarrier_wait(base + kDoFull + 8 * stage, ring_parity<kDoStages>(use));
      registers_touch(s);
      wgmma_fence();
      issue_scores<kHeadDimV>(s, value, do_tile);
      mbarrier_wait(base + kQueryFull + 8 * query_stage, ring_parity<kQueryStages>(use));
      const uint32_t rows = base + kRowsAt + query_stage * kRowsBytes + 4 * kRows;
      float2 d[8];
      load_statistics(d, 0, 4, rows);
      const bool masked = i < uniform(w.whole[0].begin) || i >= uniform(w.whole[0].end);
      wgmma_wait<0>();
      registers_touch(s);
      if (left == 1) mbarrier_arrive_warp(base + kValueEmpty);
      release_both(base + kDoEmpty + 8 * stage);

      mbarrier_wait(of_warp(base + kProbabilitiesFull), use & 1);
      // What a key beyond the sequence's end holds must not matter.
      if (masked)
        find_ds<true>(s, d, rows, operand, probabilities);
      else
        find_ds<false>(s, d, rows, operand, probabilities);
      mbarrier_arrive(of_warp(base + kProbabilitiesEmpty));

      const uint32_t tile = tile_descriptor(base + kQueryAt + query_stage * kChunks * kChunkBytes);
      registers_touch(dk);
      wgmma_fence();
      issue_gradient<kHeadDim>(dk, operand, tile, left < steps);

      // The warp's 16 keys, with their queries side by side.
      const uint32_t ds_stage = ring_stage<kDsStages>(use);
      const uint32_t own = base + kOwnDsAt + ds_stage * kChunkBytes + warp * 16 * kRowBytes;
      mbarrier_wait(base + kDsEmpty + 8 * ds_stage, ring_parity<kDsStages>(use) ^ 1);
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        store_matrices(own + (lane & 15) * kRowBytes + (((j + lane / 16) ^ (lane & 7)) << 4),
                       operand[2 * j], operand[2 * j + 1], operand[2 * j + 2], operand[2 * j + 3]);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        const uint32_t full = base + kDsFull + 8 * ds_stage;
        mbarrier_arrive_expect(full, 16 * kRowBytes);
        cluster_copy(cluster_map(own - kOwnDsAt + kPeerDsAt, peer), own, 16 * kRowBytes,
                     cluster_map(full, peer));
      }
      __syncwarp();
      wgmma_wait<0>();
      registers_touch(dk);
      release_queries(base + kQueryEmpty + 8 * query_stage);
      ++use;
      if (--left == 0) break;
      if (--i < w.blocks.begin) i = w.blocks.end - 1;
    }
    // The next dS may go there, and will after this.
    const uint32_t stage = ring_stage<kDsStages>(use);
    mbarrier_wait(base + kDsEmpty + 8 * stage, ring_parity<kDsStages>(use) ^ 1);
    store_rows<kHeadDim, 32>(p.grad_key, dk, any, p.scale,
                             base + kOwnDsAt + stage * kChunkBytes + warp * 16 * kRowBytes,
                             w.sequence.key_batch, w.sequence.key_row + w.first + warp * 16,
                             w.sequence.mask.keys - w.first - warp * 16, w.part);
    finish_work(base, t);
  }
}

// dQ, `kColumns` of it from `column` on.
template <int kColumns>
__device__ __forceinline__ void make_dq(const fa3_backward_params &p, uint32_t base, int column) {
  const int thread = threadIdx.x & 127;
  float dq[kColumns / 2];
  uint32_t use = 0, added = 0, tiles = 0;  // buffers used so far
  const uint32_t key = tile_descriptor(base + kKeyAt + column / kChunk * kChunkBytes);
  const uint32_t peer_key = tile_descriptor(base + kPeerKeyAt);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (uniform(w.last)) break;
    int left = uniform(w.steps), i = uniform(w.blocks.end) - 1;
    int head = uniform(w.query_head);
    if (left > 0) mbarrier_wait(base + kKeyFull, tiles++ & 1);
    for (; left > 0; --left) {
      forget(base);
      const uint32_t stage = ring_stage<kDsStages>(use);
      const uint32_t own = tile_descriptor(base + kOwnDsAt + stage * kChunkBytes);
      const uint32_t other = tile_descriptor(base + kPeerDsAt + stage * kChunkBytes);
      mbarrier_wait(base + kDsFull + 8 * stage, ring_parity<kDsStages>(use));
      registers_touch(dq);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys; k += 16)
        wgmma_transposed<kColumns>(dq, own + ((k * kRowBytes) >> 4), kDescriptorHigh,
                                   key + ((k * kRowBytes) >> 4), kDescriptorHigh, k > 0);
#pragma unroll
      for (int k = 0; k < kKeys; k += 16)
        wgmma_transposed<kColumns>(dq, other + ((k * kRowBytes) >> 4), kDescriptorHigh,
                                   peer_key + ((k * kRowBytes) >> 4), kDescriptorHigh, true);
      wgmma_commit();

      const fa3_turn mine = fa3_find_turn(&one_sum, &w.sequence.mask, w.tile, i, kRows, kTileN);
      const int64_t slot = (int64_t)head * p.slots + w.sequence.slot + i;
      float *partial = p.partial + slot * (kRows * kHeadDim) + column * kRows + thread * 4;
      if (!mine.last)
        mbarrier_wait(base + kAddedEmpty + 8 * ring_stage<2>(added), ring_parity<2>(added) ^ 1);
      if (mine.before > 0) {
        while (load_acquire(p.counters + slot) < 2 * mine.before) {
        }
      }
      wgmma_wait<0>();
      registers_touch(dq);
      release_both(base + kDsEmpty + 8 * stage);
      ++use;
      if (left == 1) mbarrier_arrive_warp(base + kKeyEmpty);

      if (mine.before == 0) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) store_four(partial + j * 512, dq + 4 * j);
      } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) add_four(partial + j * 512, dq + 4 * j);
      }
      if (!mine.last) {
        __syncwarp();
        mbarrier_arrive_warp(base + kAddedFull + 8 * ring_stage<2>(added));
        ++added;
      } else {
        store_sums<kColumns>(p.grad_query, partial, p.scale, w.sequence.query_batch,
                             w.sequence.query_row + i * kRows, w.sequence.mask.queries - i * kRows,
                             head, column);
      }
      if (--i < w.blocks.begin) {
        i = w.blocks.end - 1;
        ++head;
      }
    }
    finish_work(base, t);
  }
}

// Tells the tiles of keys that follow that a block of dQ has been added to. Only this warp waits
// until that is so for the whole device.
__device__ __forceinline__ void count_additions(const fa3_backward_params &p, uint32_t base) {
  const bool leader = (threadIdx.x & 31) == 0;
  uint32_t added = 0;
  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (w.last) break;
    int head = w.query_head;
    for (int left = w.steps, i = w.blocks.end - 1; left > 0; --left) {
      if (!fa3_find_turn(&one_sum, &w.sequence.mask, w.tile, i, kRows, kTileN).last) {
        const uint32_t stage = ring_stage<2>(added);
        mbarrier_wait(base + kAddedFull + 8 * stage, ring_parity<2>(added));
        ++added;
        if (leader) {
          mbarrier_arrive(base + kAddedEmpty + 8 * stage);
          count_release(p.counters + (int64_t)head * p.slots + w.sequence.slot + i);
        }
        __syncwarp();
      }
      if (--i < w.blocks.begin) {
        i = w.blocks.end - 1;
        ++head;
      }
    }
    finish_work(base, t);
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    backward(const __grid_constant__ fa3_backward_params p) {
  // Opaque, so that the compiler keeps it in a register instead of finding out
  // again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.query);
    tma_prefetch_map(&p.grad_output);
    tma_prefetch_map(&p.key);
    tma_prefetch_map(&p.value);
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(base + kQueryFull + 8 * i, 1);
      mbarrier_init(base + kQueryEmpty + 8 * i, 16 + 256);  // and the own block's threads
    }
    for (int i = 0; i < kDoStages; ++i) {
      mbarrier_init(base + kDoFull + 8 * i, 1);
      mbarrier_init(base + kDoEmpty + 8 * i, 16);  // warps of two roles, of both blocks
    }
    for (int i = 0; i < kDsStages; ++i) {
      mbarrier_init(base + kDsFull + 8 * i, 4);
      mbarrier_init(base + kDsEmpty + 8 * i, 8);
    }
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(base + kProbabilitiesFull + 8 * i, 32);
      mbarrier_init(base + kProbabilitiesEmpty + 8 * i, 32);
    }
    mbarrier_init(base + kKeyFull, 1);
    mbarrier_init(base + kKeyEmpty, 8);
    mbarrier_init(base + kValueFull, 1);
    mbarrier_init(base + kValueEmpty, 4);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(base + kAddedFull + 8 * i, 4);
      mbarrier_init(base + kAddedEmpty + 8 * i, 1);
    }
    mbarrier_init(base + kQueryLanded, 1);
    mbarrier_init(base + kDoLanded, 1);
    mbarrier_init(base + kKeyLanded, 1);
    mbarrier_init(base + kMailFull, 1);
    mbarrier_init(base + kMailEmpty, 2);
    mbarrier_init(base + kWorkWanted, 1);
    for (int i = 0; i < kWorkSlots; ++i) {
      mbarrier_init(base + kWorkFull + 8 * i, 1);
      mbarrier_init(base + kWorkEmpty + 8 * i, 32 * (3 * 4 + 3));
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  wait_for_prior_grids();

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 0)
      load_queries(p, base);
    else if (warp == 1)
      load_do(p, base);
    else if (warp == 2)
      schedule(p, base);
    else
      count_additions(p, base);
  } else if (warp < 8) {
    registers_give_back<kQueryRegisters>();
    if (uniform(cluster_rank()) == 0)
      make_dq<kSplit>(p, base, 0);
    else
      make_dq<kHeadDim - kSplit>(p, base, kSplit);
  } else if (warp < 12) {
    registers_take<kSumRegisters>();
    make_dv(p, base);
  } else {
    registers_take<kSumRegisters>();
    make_dk(p, base);
  }
  __syncwarp();
  cluster_sync();  // shared memory lives as long as the block
}
