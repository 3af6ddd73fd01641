// The backward pass on Hopper for wide heads: dQ, dK and dV, deterministic.
//
// dK and dV of 64 keys fill half of a multiprocessor's registers, and no more keys fit. So two
// blocks work together, as a cluster, on 128 keys of one head: tiles of queries and of dO arrive
// in both at once, and each sums its columns of dQ over the keys of both. In a block three
// warpgroups have a role each, and pass on what they make through shared memory:
//
//   make_dv:  S^T = K Q^T;  P^T = exp(S^T - lse);  dV += P^T dO
//   make_dk:  dP^T = V dO^T;  dS^T = P^T * (dP^T - D);  dK += dS^T Q
//   make_dq:  dQ = dS K, half of the columns for twice the keys
//
// P goes to the second in float32, dS to the third in 16 bits, and to the third of the other
// block. A fourth warpgroup loads and plans.
//
// Compile with what variants.def says; see backward_params.h for what the host prepares.
#include "backward_finish.cuh"
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

// P between this warp and the one that it is passed to.
__device__ __forceinline__ ring<1, kPBytes> p_of_warp(const layout &m) {
  return ring_beside(m.p, (thread_again() & 127) / 32);
}

// dQ = dS K, or dQ += dS K, for 64 keys.
template <int kColumns>
__device__ __forceinline__ void issue_dq(float (&dq)[kColumns / 2], uint32_t ds, uint32_t keys,
                                         bool accumulate) {
#pragma unroll
  for (int k = 0; k < kKeys; k += 16)
    wgmma_transposed<kColumns>(dq, ds + ((k * kRowBytes) >> 4), kDescriptorHigh,
                               keys + ((k * kRowBytes) >> 4), kDescriptorHigh, k > 0 || accumulate);
}

// What the thread needs of a tile's lse, or of its D, for some groups of columns.
__device__ __forceinline__ void load_statistics(float2 (&of)[8], int first, int count,
                                                uint32_t rows) {
#pragma unroll
  for (int j = first; j < first + count; ++j)
    of[j] = load_shared_pair(rows + 32 * j + 8 * (threadIdx.x & 3));
}

// Scores become probabilities; they are packed, and go to shared memory. In general
// there may be a mask, a cap or large lse; then what is passed on is also times the cap's slope,
// which dS has as a factor, too.
template <bool kGeneral>
__device__ __forceinline__ void find_probabilities(const fa3_backward_params &p, const work &w,
                                                   int block, float (&s)[32], float2 (&lse)[8],
                                                   uint32_t rows, uint32_t (&weights)[16],
                                                   uint32_t to) {
  if (!kGeneral) load_statistics(lse, 4, 4, rows);
  const bool capped = kGeneral && p.softcap_log2 != 0.0f;
  const bool large = kGeneral && has_large_lse<kTileQ>(rows);
  fa3_range seeing[2];
  if constexpr (kGeneral) {
    const int thread = thread_again() & 127, column = 2 * (thread & 3);
    if (capped) cap_scores(s, p.softcap_log2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = w.first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
      seeing[r] = fa3_seeing_queries(&w.sequence.mask, key);
      if (key >= w.sequence.mask.keys) seeing[r].end = seeing[r].begin;
      seeing[r].begin -= block * kTileQ + column;
      seeing[r].end -= block * kTileQ + column;
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
    weights[2 * j] = pack_pair(s[4 * j], s[4 * j + 1]);
    weights[2 * j + 1] = pack_pair(s[4 * j + 2], s[4 * j + 3]);
  }
}

// What the warpgroup that makes dV has in hand.
struct dv_state {
  float dv[kHeadDimV / 2];
  float s[32];           // S^T, then P^T
  uint32_t weights[16];  // P^T, as dV's product takes it
  uint32_t use;          // steps begun
};

// S^T = K Q^T, P^T, dV += P^T dO, for a block of queries.
__device__ __forceinline__ void step_dv(const fa3_backward_params &p, const layout &m,
                                        const work &w, dv_state &c, uint32_t keys,
                                        uint32_t keys_use, int block, int left) {
  const uint32_t queries = tile_descriptor(ring_tile(m.q, c.use));
  ring_wait_full(m.q, c.use);
  registers_touch(c.s);
  wgmma_fence();
  issue_scores<kHeadDim>(c.s, keys, queries);
  const uint32_t rows = rows_of_step(m, c.use);
  float2 lse[8];
  load_statistics(lse, 0, 4, rows);
  const bool general = p.softcap_log2 != 0.0f || has_large_lse<kTileQ>(rows) ||
                       block < uniform(w.whole[0].begin) || block >= uniform(w.whole[0].end);
  wgmma_wait<0>();
  registers_touch(c.s);
  if (left == 1) ring_release(m.k, keys_use);
  ring_wait_empty(p_of_warp(m), c.use);
  const uint32_t to = p_of_warp(m).data + thread_again() % 32 * 16;
  if (general)
    find_probabilities<true>(p, w, block, c.s, lse, rows, c.weights, to);
  else
    find_probabilities<false>(p, w, block, c.s, lse, rows, c.weights, to);
  barrier_arrive(p_of_warp(m).full);
  release_queries(m, c.use);

  const uint32_t d_o = tile_descriptor(ring_tile(m.d_o, c.use));
  ring_wait_full(m.d_o, c.use);
  registers_touch(c.dv);
  wgmma_fence();
  issue_gradient<kHeadDimV>(c.dv, c.weights, d_o, left < uniform(w.steps));
  wgmma_wait<0>();
  registers_touch(c.dv);
  release_both(m.d_o, c.use);
  ++c.use;
}

__device__ __forceinline__ void make_dv(const fa3_backward_params &p, const layout &m) {
  dv_state c;
  c.use = 0;
  uint32_t keys_use = 0;  // tiles of keys loaded
  const uint32_t keys = tile_descriptor(m.k.data);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(m, t);
    if (uniform(w.last)) break;
    int block = uniform(w.blocks.end) - 1;
    int left = uniform(w.steps);
    if (left > 0) ring_wait_full(m.k, keys_use++);
    for (; left > 0; --left) {
      step_dv(p, m, w, c, keys, keys_use - 1, block, left);
      if (--block < w.blocks.begin) block = w.blocks.end - 1;
    }
    // P was read: its memory is free.
    ring_wait_empty(p_of_warp(m), c.use);
    store_block<kHeadDimV>(p, p.grad_value, c.dv, uniform(w.steps) > 0, 1.0f, p_of_warp(m).data, w);
    finish_work(m, t);
  }
}

// dP becomes dS^T = P^T * (dP^T - D), and is packed; 0 where P is, if it is `masked`.
template <bool kMasked>
__device__ __forceinline__ void find_ds(float (&dp)[32], float2 (&d)[8], uint32_t rows,
                                        uint32_t (&ds)[16], uint32_t probabilities) {
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
        float &x = dp[4 * (first + j) + e];
        x = probability[j][e] * (x - (e % 2 ? d[first + j].y : d[first + j].x));
        if (kMasked && probability[j][e] == 0.0f) x = 0.0f;
      }
      const float *x = dp + 4 * (first + j);
      ds[2 * (first + j)] = pack_pair(x[0], x[1]);
      ds[2 * (first + j) + 1] = pack_pair(x[2], x[3]);
    }
  }
}

// The warp's 16 keys of dS^T, with their queries side by side, for the products of both blocks.
__device__ __forceinline__ void pass_ds(const layout &m, const uint32_t (&ds)[16], uint32_t use) {
  const int warp = (threadIdx.x & 127) / 32, lane = threadIdx.x & 31;
  const uint32_t own = ring_tile(m.d_s, use) + warp * 16 * kRowBytes;
  ring_wait_empty(m.d_s, use);
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    store_matrices(own + (lane & 15) * kRowBytes + (((j + lane / 16) ^ (lane & 7)) << 4), ds[2 * j],
                   ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    const barrier full = ring_full(m.d_s, use);
    const uint32_t peer = cluster_rank() ^ 1;
    barrier_expect(full, 16 * kRowBytes);
    cluster_copy(cluster_map(own - m.d_s.data + m.d_s_of_peer, peer), own, 16 * kRowBytes,
                 cluster_map(full.address, peer));
  }
  __syncwarp();
}

// What the warpgroup that makes dK has in hand.
struct dk_state {
  float dk[kHeadDim / 2];
  float dp[32];     // dP^T, then dS^T
  uint32_t ds[16];  // dS^T, as dK's product takes it
  uint32_t use;     // steps begun
};

// dP^T = V dO^T, dS^T, dK += dS^T Q, for a block of queries.
__device__ __forceinline__ void step_dk(const layout &m, const work &w, dk_state &c,
                                        uint32_t values, uint32_t values_use, int block, int left,
                                        int steps) {
  const uint32_t probabilities = p_of_warp(m).data + threadIdx.x % 32 * 16;
  const uint32_t d_o = tile_descriptor(ring_tile(m.d_o, c.use));
  ring_wait_full(m.d_o, c.use);
  registers_touch(c.dp);
  wgmma_fence();
  issue_scores<kHeadDimV>(c.dp, values, d_o);
  ring_wait_full(m.q, c.use);
  const uint32_t rows = rows_of_step(m, c.use) + 4 * kTileQ;
  float2 d[8];
  load_statistics(d, 0, 4, rows);
  const bool masked = block < uniform(w.whole[0].begin) || block >= uniform(w.whole[0].end);
  wgmma_wait<0>();
  registers_touch(c.dp);
  if (left == 1) ring_release(m.v, values_use);
  release_both(m.d_o, c.use);

  ring_wait_full(p_of_warp(m), c.use);
  // What a key beyond the sequence's end holds must not matter.
  if (masked)
    find_ds<true>(c.dp, d, rows, c.ds, probabilities);
  else
    find_ds<false>(c.dp, d, rows, c.ds, probabilities);
  barrier_arrive(p_of_warp(m).empty);

  const uint32_t queries = tile_descriptor(ring_tile(m.q, c.use));
  registers_touch(c.dk);
  wgmma_fence();
  issue_gradient<kHeadDim>(c.dk, c.ds, queries, left < steps);
  pass_ds(m, c.ds, c.use);
  wgmma_wait<0>();
  registers_touch(c.dk);
  release_queries(m, c.use);
  ++c.use;
}

__device__ __forceinline__ void make_dk(const fa3_backward_params &p, uint32_t base) {
  const int warp = (threadIdx.x & 127) / 32;
  dk_state c;
  c.use = 0;
  uint32_t values_use = 0;  // tiles of values loaded
  const uint32_t values = tile_descriptor(lay_out(base).v.data);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(lay_out(base), t);
    if (uniform(w.last)) break;
    const int steps = uniform(w.steps);
    int block = uniform(w.blocks.end) - 1;
    if (steps > 0) ring_wait_full(lay_out(base).v, values_use++);
    for (int left = steps; left > 0; --left) {
      forget(base);
      step_dk(lay_out(base), w, c, values, values_use - 1, block, left, steps);
      if (--block < w.blocks.begin) block = w.blocks.end - 1;
    }
    // The next dS may go there, and will after this.
    const layout m = lay_out(base);
    ring_wait_empty(m.d_s, c.use);
    store_block<kHeadDim>(p, p.grad_key, c.dk, steps > 0, p.scale,
                          ring_tile(m.d_s, c.use) + warp * 16 * kRowBytes, w);
    finish_work(m, t);
  }
}

// Where the thread's part of a block of dQ is summed, from a column on.
__device__ __forceinline__ float *partial_of(const fa3_backward_params &p, int64_t slot,
                                             int column) {
  return p.partial + slot * (kTileQ * kHeadDim) + column * kTileQ + (threadIdx.x & 127) * 4;
}

// dQ, `kColumns` of it from `column` on.
template <int kColumns>
__device__ __forceinline__ void make_dq(const fa3_backward_params &p, uint32_t base, int column) {
  float dq[kColumns / 2];
  uint32_t use = 0, added = 0, keys_use = 0;  // steps begun, told of, tiles of keys loaded
  const uint32_t keys = tile_descriptor(lay_out(base).k.data + column / kChunk * kChunkBytes);
  const uint32_t keys_of_peer = tile_descriptor(lay_out(base).k_of_peer);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(lay_out(base), t);
    if (uniform(w.last)) break;
    int left = uniform(w.steps);
    query_step step = {uniform(w.blocks.end) - 1, uniform(w.query_head)};
    if (left > 0) ring_wait_full(lay_out(base).k, keys_use++);
    for (; left > 0; --left) {
      forget(base);
      const layout m = lay_out(base);
      const uint32_t d_s = tile_descriptor(ring_tile(m.d_s, use));
      const uint32_t d_s_of_peer =
          tile_descriptor(ring_tile(m.d_s, use) - m.d_s.data + m.d_s_of_peer);
      ring_wait_full(m.d_s, use);
      registers_touch(dq);
      wgmma_fence();
      issue_dq<kColumns>(dq, d_s, keys, false);
      issue_dq<kColumns>(dq, d_s_of_peer, keys_of_peer, true);
      wgmma_commit();

      const fa3_turn mine = find_turn<kUpward>(p, w, step.block, kTileQ, kTileK);
      const int64_t slot = slot_of_sum(p, w, step, mine.sum);
      float *partial = partial_of(p, slot, column);
      if (!mine.last) ring_wait_empty(m.added, added);
      if (mine.before > 0) {
        while (load_acquire(p.counters + slot) < 2 * mine.before) {
        }
      }
      wgmma_wait<0>();
      registers_touch(dq);
      release_both(m.d_s, use);
      ++use;
      if (left == 1) ring_release(m.k, keys_use - 1);

      if (mine.before == 0) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) store_four(partial + j * 512, dq + 4 * j);
      } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) add_four(partial + j * 512, dq + 4 * j);
      }
      if (!mine.last) {
        __syncwarp();
        barrier_arrive_warp(ring_full(m.added, added));
        ++added;
      } else {
        const int row = step.block * kTileQ;
        store_dq<kColumns>(p.grad_query, partial, p.scale, w.sequence.query_batch,
                           w.sequence.query_row + row, w.sequence.mask.queries - row, step.head,
                           column);
      }
      next_step<kByHead>(w, step);
    }
    finish_work(lay_out(base), t);
  }
}

// Tells the tiles of keys that follow that a block of dQ has been added to. Only this warp waits
// until that is so for the whole device.
__device__ __forceinline__ void count_additions(const fa3_backward_params &p, const layout &m) {
  const bool leader = (threadIdx.x & 31) == 0;
  uint32_t added = 0;
  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(m, t);
    if (w.last) break;
    query_step step = first_step(w);
    for (int left = w.steps; left > 0; --left, next_step<kByHead>(w, step)) {
      const fa3_turn mine = find_turn<kUpward>(p, w, step.block, kTileQ, kTileK);
      if (mine.last) continue;
      ring_wait_full(m.added, added);
      __syncwarp();  // as in ring_claim
      if (leader) {
        barrier_arrive(ring_empty(m.added, added));
        count_release(p.counters + slot_of_sum(p, w, step, mine.sum));
      }
      ++added;
      __syncwarp();
    }
    finish_work(m, t);
  }
}

// Takes a slice of a block's sums of dQ, which backward leaves, and stores it.
template <bool kNarrow>
__device__ __forceinline__ void finish_slice(const fa3_backward_params &p) {
  constexpr int kVectors = FA3_BACKWARD_FINISH_VECTORS(kTileQ, kNarrow);
  constexpr int kSlices = FA3_BACKWARD_FINISH_SLICES(kHeadDim, kTileQ, kNarrow);
  const finished_block at = find_finished_block(p, kSlices, kTileQ, kTileK);
  if (!at.seen) return;
  const uint32_t used = wait_for_sums(p, at, p.counters, 2, kTileQ, kTileK);
  const float *sum = partial_of(p, at.slot, 0) + kVectors * at.slice * 512;
  float dq[4 * kVectors];
  add_up_sums<kVectors, 16 / kVectors>(dq, (const float4 *)sum,
                                       p.sums_apart * (kTileQ * kHeadDim / 4), used);
  const fa3_sequence &s = at.sequence;
  const int row = at.block * kTileQ;
  store_rows<8 * kVectors>(p.grad_query, dq, p.scale, s.query_batch, s.query_row + row,
                           s.mask.queries - row, at.head, 8 * kVectors * at.slice, 0);
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
    init_barriers(lay_out(base));
  }
  cluster_sync();
  // Who finds out what there is to do need not wait where that is in no memory.
  if (!p.early || warp != 2) {
    wait_for_prior_grids();
    if (p.finished_later) let_next_grid_launch();  // backward_finish, once the counters are clear
  }

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 0)
      load_queries(p, base);
    else if (warp == 1)
      load_do(p, base);
    else if (warp == 2)
      schedule(p, base);
    else
      count_additions(p, lay_out(base));
  } else if (warp < 8) {
    registers_give_back<kDqRegisters>();
    if (uniform(cluster_rank()) == 0)
      make_dq<kSplit>(p, base, 0);
    else
      make_dq<kHeadDim - kSplit>(p, base, kSplit);
  } else if (warp < 12) {
    registers_take<kSumRegisters>();
    make_dv(p, lay_out(base));
  } else {
    registers_take<kSumRegisters>();
    make_dk(p, base);
  }
  __syncwarp();
  cluster_sync();  // shared memory lives as long as the block
}
