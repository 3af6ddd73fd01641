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
// Compile with -DFA3_BF16=0|1 -DFA3_HEAD_DIM= -DFA3_HEAD_DIM_V=; see backward_params.h for what the
// host prepares.
#include "backward_wide_load.cuh"

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();

// Both operands in shared memory, with rows that run along M and along N.
#define WGMMA_SHARED_TRANSPOSED(columns, list, a, b, flag, ...)                          \
  asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 p, " flag           \
               ", 0;\n\t"                                                                \
               "mov.b64 a, {" a "};\n\tmov.b64 b, {" b                                   \
               "};\n\t"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16." WGMMA_TYPES " {" list \
               "}, a, b, p, 1, 1, 1, 1;\n\t}"                                            \
               : __VA_ARGS__                                                             \
               : "r"(a_tile), "r"(b_tile), "r"(high), "r"(accumulate))

template <int kColumns>
__device__ __forceinline__ void wgmma_shared_transposed(float (&d)[64], uint32_t a_tile,
                                                        uint32_t b_tile, uint32_t high,
                                                        int accumulate) {
  if constexpr (kColumns == 64)
    WGMMA_SHARED_TRANSPOSED(64, WGMMA_LIST32, "%32,%34", "%33,%34", "%35", WGMMA_OUT32(d, 0));
  else
    WGMMA_SHARED_TRANSPOSED(128, WGMMA_LIST64, "%64,%66", "%65,%66", "%67", WGMMA_OUT64(d, 0));
}

__device__ __forceinline__ uint32_t tile_descriptor(uint32_t address) {
  return uniform(wgmma_descriptor_low(address, kChunkBytes));
}

// A = (64 x kColumns of shared memory) (64 x the same)^T.
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
                                      b + ((2 * kChunkBytes + k * kRowBytes) >> 4),
                                      kDescriptorHigh, k > 0 || accumulate);
  }
  wgmma_commit();
}

// This warp has read a buffer that both blocks share, or this block's alone, for the last time.
__device__ __forceinline__ void release_both(uint32_t barrier) {
  if ((threadIdx.x & 31) < 2) cluster_arrive(cluster_map(barrier, threadIdx.x & 1));
}

__device__ __forceinline__ void release(uint32_t barrier) {
  if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
}

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// Each thread of a quad holds two neighbouring columns of four groups of eight; then each holds
// the eight columns of one group, the quad's first thread of the first group.
__device__ __forceinline__ void exchange_in_quad(float (&x)[8]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &low = x[2 * i + e], &high = x[2 * (i + bit) + e];
        const float other = __shfl_xor_sync(0xffffffff, upper ? low : high, bit);
        if (upper)
          low = other;
        else
          high = other;
      }
    }
  }
}

// PTX ISA, "ld" with .acquire, "red" with .release and with vectors: what other blocks have added
// up in `partial`, and how many of their warps have.
__device__ __forceinline__ int load_acquire(const int *from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ void count_release(int *counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void add_four(float *to, const float *x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ void store_four(float *to, const float *x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ float4 load_four(const float *from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// 64 rows of a gradient leave, as the accumulators of a warpgroup hold them, with what `sums` holds
// in the same way, or nothing; or zeros leave.
template <int kColumns>
__device__ __forceinline__ void store_rows(const fa3_gradient &g, const float *d, bool any,
                                           const float *sums, float scale, int batch, int row,
                                           int rows, int head, int column) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 4) {
    // Not known to the compiler, or it keeps what it could derive from it, and spills.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread), "+r"(row), "+r"(batch), "+r"(head), "+l"(sums));
    const int quad_row = (thread & 127) / 32 * 16 + (thread & 31) / 4;
    float4 more[4] = {};
    if (sums != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) more[i] = load_four(sums + (j + i) * 512);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[2 * i] = any ? (d[4 * (j + i) + 2 * r] + (r ? more[i].z : more[i].x)) * scale : 0.0f;
        x[2 * i + 1] =
            any ? (d[4 * (j + i) + 2 * r + 1] + (r ? more[i].w : more[i].y)) * scale : 0.0f;
      }
      exchange_in_quad(x);
      const int in_tile = quad_row + 8 * r;
      if (in_tile < rows)
        store_gradient(g, batch, row + in_tile, head, column + 8 * (j + (thread & 3)), x);
    }
  }
}

// S^T, P^T, dV.
__device__ __forceinline__ void make_probabilities(const fa3_backward_params &p, uint32_t base) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  const uint32_t mine = base + kProbabilitiesAt + thread * 16;
  float dv[kHeadDimV / 2], s[32];
  uint32_t operand[16];
  uint32_t use = 0, tiles = 0;  // buffers used so far
  const uint32_t key = tile_descriptor(base + kKeyAt);

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (uniform(w.last)) break;
    const int steps = uniform(w.steps);
    const bool any = steps > 0;
    int left = steps, i = uniform(w.blocks.end) - 1;
    if (any) mbarrier_wait(base + kKeyFull, tiles++ & 1);
    while (any) {
      const uint32_t query_stage = ring_stage<kQueryStages>(use);
      const uint32_t query_tile =
          tile_descriptor(base + kQueryAt + query_stage * kChunks * kChunkBytes);
      mbarrier_wait(base + kQueryFull + 8 * query_stage, ring_parity<kQueryStages>(use));
      registers_touch(s);
      wgmma_fence();
      issue_scores<kHeadDim>(s, key, query_tile);
      wgmma_wait<0>();
      registers_touch(s);
      if (left == 1) release(base + kKeyEmpty);
      named_barrier_sync(kBarrierRead, 256);

      const uint32_t rows = base + kRowsAt + query_stage * kRowsBytes + 8 * (lane & 3);
      const bool masked = i < w.whole.begin || i >= w.whole.end;
      if (p.softcap_log2 != 0.0f) cap_scores(s, p.softcap_log2);
      fa3_range seeing[2];
      if (masked) {
        const int row = w.first + thread / 32 * 16 + lane / 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          seeing[r] = fa3_seeing_queries(&w.mask, row + 8 * r);
          if (row + 8 * r >= w.mask.keys) seeing[r].end = seeing[r].begin;
          seeing[r].begin -= i * kRows + 2 * (lane & 3);
          seeing[r].end -= i * kRows + 2 * (lane & 3);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 lse = load_pair(rows + 32 * j);
        float passed[4];  // P, times what the cap's slope takes from dS
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &x = s[4 * j + e];
          const float capped = x;
          x = exp2_unit(fmaf(x, p.scale_log2, e % 2 ? -lse.y : -lse.x));
          if (masked && (8 * j + e % 2 < seeing[e / 2].begin || 8 * j + e % 2 >= seeing[e / 2].end))
            x = 0.0f;
          passed[e] = x;
          if (p.softcap_log2 != 0.0f) passed[e] = fmaf(-x * capped, capped, x);
        }
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + j * 2048),
                     "f"(passed[0]), "f"(passed[1]), "f"(passed[2]), "f"(passed[3])
                     : "memory");
        operand[2 * j] = pack_pair(s[4 * j], s[4 * j + 1]);
        operand[2 * j + 1] = pack_pair(s[4 * j + 2], s[4 * j + 3]);
      }
      named_barrier_arrive(kBarrierReady, 256);
      release_both(base + kQueryEmpty + 8 * query_stage);

      const uint32_t stage = ring_stage<kGradStages>(use);
      const uint32_t tile = tile_descriptor(base + kGradAt + stage * kChunksV * kChunkBytes);
      mbarrier_wait(base + kGradFull + 8 * stage, ring_parity<kGradStages>(use));
      registers_touch(dv);
      wgmma_fence();
      issue_gradient<kHeadDimV>(dv, operand, tile, left < steps);
      wgmma_wait<0>();
      registers_touch(dv);
      release_both(base + kGradEmpty + 8 * stage);
      ++use;
      if (--left == 0) break;
      if (--i < w.blocks.begin) i = w.blocks.end - 1;
    }
    store_rows<kHeadDimV>(p.grad_value, dv, any, nullptr, 1.0f, w.key_batch, w.key_row + w.first,
                          w.mask.keys - w.first, w.head, 0);
    finish_work(base, t);
  }
  named_barrier_sync(kBarrierRead, 256);
}

// dP^T, dS^T, dK.
__device__ __forceinline__ void make_scores(const fa3_backward_params &p, uint32_t base) {
  const int thread = threadIdx.x & 127, warp = thread / 32, lane = threadIdx.x & 31;
  const uint32_t peer = cluster_rank() ^ 1;
  const uint32_t probabilities = base + kProbabilitiesAt + thread * 16;
  float dk[kHeadDim / 2], s[32];
  uint32_t operand[16];
  uint32_t use = 0, tiles = 0;  // buffers used so far
  const uint32_t value = tile_descriptor(base + kValueAt);

  named_barrier_arrive(kBarrierRead, 256);
  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (uniform(w.last)) break;
    const int steps = uniform(w.steps);
    const bool any = steps > 0;
    int left = steps, i = uniform(w.blocks.end) - 1;
    if (any) mbarrier_wait(base + kValueFull, tiles++ & 1);
    while (any) {
      const uint32_t stage = ring_stage<kGradStages>(use);
      const uint32_t grad_tile = tile_descriptor(base + kGradAt + stage * kChunksV * kChunkBytes);
      mbarrier_wait(base + kGradFull + 8 * stage, ring_parity<kGradStages>(use));
      registers_touch(s);
      wgmma_fence();
      issue_scores<kHeadDimV>(s, value, grad_tile);
      wgmma_wait<0>();
      registers_touch(s);
      if (left == 1) release(base + kValueEmpty);
      release_both(base + kGradEmpty + 8 * stage);

      const uint32_t query_stage = ring_stage<kQueryStages>(use);
      const uint32_t rows = base + kRowsAt + query_stage * kRowsBytes + 4 * kRows + 8 * (lane & 3);
      const bool masked = i < w.whole.begin || i >= w.whole.end;
      mbarrier_wait(base + kQueryFull + 8 * query_stage, ring_parity<kQueryStages>(use));
      named_barrier_sync(kBarrierReady, 256);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 d = load_pair(rows + 32 * j);
        float probability[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(probability[0]), "=f"(probability[1]), "=f"(probability[2]),
                       "=f"(probability[3])
                     : "r"(probabilities + j * 2048)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &x = s[4 * j + e];
          x = probability[e] * (x - (e % 2 ? d.y : d.x));
          // What a key beyond the sequence's end holds must not matter.
          if (masked && probability[e] == 0.0f) x = 0.0f;
        }
        operand[2 * j] = pack_pair(s[4 * j], s[4 * j + 1]);
        operand[2 * j + 1] = pack_pair(s[4 * j + 2], s[4 * j + 3]);
      }
      named_barrier_arrive(kBarrierRead, 256);

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

      const uint32_t tile = tile_descriptor(base + kQueryAt + query_stage * kChunks * kChunkBytes);
      registers_touch(dk);
      wgmma_fence();
      issue_gradient<kHeadDim>(dk, operand, tile, left < steps);
      wgmma_wait<0>();
      registers_touch(dk);
      release_both(base + kQueryEmpty + 8 * query_stage);
      ++use;
      if (--left == 0) break;
      if (--i < w.blocks.begin) i = w.blocks.end - 1;
    }
    store_rows<kHeadDim>(p.grad_key, dk, any, nullptr, p.scale, w.key_batch, w.key_row + w.first,
                         w.mask.keys - w.first, w.head, 0);
    finish_work(base, t);
  }
}

// dQ, `kColumns` of it from `column` on.
template <int kColumns>
__device__ __forceinline__ void make_queries(const fa3_backward_params &p, uint32_t base,
                                             int column) {
  constexpr int kWarpsOfCluster = 8;
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  float dq[64];
  uint32_t ds = 0, tiles = 0;  // buffers used so far
  const uint32_t key = tile_descriptor(base + kKeyAt + column / kChunk * kChunkBytes);
  const uint32_t peer_key = tile_descriptor(base + kPeerKeyAt);
  int *pending = nullptr;  // a counter that does not know of this warp's last addition yet

  auto count_pending = [&]() {
    __syncwarp();
    if (pending != nullptr && lane == 0) count_release(pending);
    pending = nullptr;
  };

  for (uint32_t t = 0;; ++t) {
    const work &w = wait_for_work(base, t);
    if (uniform(w.last)) break;
    int left = uniform(w.steps), i = uniform(w.blocks.end) - 1;
    int head = uniform(w.head) * p.queries_per_key;
    if (left > 0) mbarrier_wait(base + kKeyFull, tiles++ & 1);
    for (; left > 0; --left) {
      const uint32_t stage = ring_stage<kDsStages>(ds);
      const uint32_t own = tile_descriptor(base + kOwnDsAt + stage * kChunkBytes);
      const uint32_t other = tile_descriptor(base + kPeerDsAt + stage * kChunkBytes);
      mbarrier_wait(base + kDsFull + 8 * stage, ring_parity<kDsStages>(ds));
      registers_touch(dq);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys; k += 16)
        wgmma_shared_transposed<kColumns>(dq, own + ((k * kRowBytes) >> 4),
                                          key + ((k * kRowBytes) >> 4), kDescriptorHigh, k > 0);
#pragma unroll
      for (int k = 0; k < kKeys; k += 16)
        wgmma_shared_transposed<kColumns>(dq, other + ((k * kRowBytes) >> 4),
                                          peer_key + ((k * kRowBytes) >> 4), kDescriptorHigh, true);
      wgmma_commit();
      wgmma_wait<0>();
      registers_touch(dq);
      release_both(base + kDsEmpty + 8 * stage);
      ++ds;
      if (left == 1) release(base + kKeyEmpty);
      // By now it is through, and need not be waited for.
      count_pending();

      const fa3_range tiles_of_block =
          fa3_visible_tiles(&w.mask, i * kRows, (i + 1) * kRows, kTileN);
      const bool is_first = w.tile == tiles_of_block.begin, is_last = w.tile + 1 == tiles_of_block.end;
      const int64_t slot = (int64_t)head * p.slots + w.slot + i;
      int *counter = p.counters + slot;
      float *partial = p.partial + slot * (kRows * kHeadDim) + column * kRows + thread * 4;
      if (!is_first) {
        if (lane == 0) {
          const int turn = (w.tile - tiles_of_block.begin) * kWarpsOfCluster;
          while (load_acquire(counter) < turn) {
          }
        }
        __syncwarp();
      }
      if (is_last) {
        store_rows<kColumns>(p.grad_query, dq, true, is_first ? nullptr : partial, p.scale, w.query_batch, w.query_row + i * kRows,
                             w.mask.queries - i * kRows, head, column);
      } else if (is_first) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) store_four(partial + j * 512, dq + 4 * j);
        pending = counter;
      } else {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) add_four(partial + j * 512, dq + 4 * j);
        pending = counter;
      }
      if (--i < w.blocks.begin) {
        i = w.blocks.end - 1;
        ++head;
      }
    }
    count_pending();
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
      mbarrier_init(base + kQueryEmpty + 8 * i, 16);  // warps of two roles, of both blocks
    }
    for (int i = 0; i < kGradStages; ++i) {
      mbarrier_init(base + kGradFull + 8 * i, 1);
      mbarrier_init(base + kGradEmpty + 8 * i, 16);
    }
    for (int i = 0; i < kDsStages; ++i) {
      mbarrier_init(base + kDsFull + 8 * i, 4);
      mbarrier_init(base + kDsEmpty + 8 * i, 8);
    }
    mbarrier_init(base + kKeyFull, 1);
    mbarrier_init(base + kKeyEmpty, 8);
    mbarrier_init(base + kValueFull, 1);
    mbarrier_init(base + kValueEmpty, 4);
    mbarrier_init(base + kQueryLanded, 1);
    mbarrier_init(base + kGradLanded, 1);
    mbarrier_init(base + kKeyLanded, 1);
    mbarrier_init(base + kMailFull, 1);
    mbarrier_init(base + kMailEmpty, 2);
    mbarrier_init(base + kWorkWanted, 1);
    for (int i = 0; i < kWorkSlots; ++i) {
      mbarrier_init(base + kWorkFull + 8 * i, 1);
      mbarrier_init(base + kWorkEmpty + 8 * i, 32 * (3 * 4 + 2));
    }
    mbarrier_init_fence();
  }
  cluster_sync();
  wait_for_prior_grids();

  if (warp < 4) {
    registers_give_back<32>();
    if (warp == 0)
      load_queries(p, base);
    else if (warp == 1)
      load_grads(p, base);
    else if (warp == 2)
      schedule(p, base);
  } else if (warp < 8) {
    registers_give_back<96>();
    if (uniform(cluster_rank()) == 0)
      make_queries<kSplit>(p, base, 0);
    else
      make_queries<kHeadDim - kSplit>(p, base, kSplit);
  } else if (warp < 12) {
    registers_take<192>();
    make_probabilities(p, base);
  } else {
    registers_take<192>();
    make_scores(p, base);
  }
  __syncwarp();
  cluster_sync();  // shared memory lives as long as the block
}
