// The wide backward kernel's sizes, its shared memory, and the warp that plans the tiles.
#ifndef FA3_BACKWARD_WIDE_WORK_CUH
#define FA3_BACKWARD_WIDE_WORK_CUH

#include "backward_params.h"
#include "backward_tile.cuh"
#include "cluster.cuh"
#include "mask.h"
#include "registers.cuh"
#include "ring.cuh"
#include "scheduler.h"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kHeadDim = FA3_HEAD_DIM;         // of queries and keys
constexpr int kHeadDimV = FA3_VALUE_HEAD_DIM;  // of values and dO, <= kHeadDim

constexpr int kTileQ = FA3_TILE_Q;        // queries of a tile
constexpr int kTileK = FA3_TILE_K;        // keys of a cluster
constexpr int kKeys = kTileK / 2;         // keys of a block
constexpr int kQStages = 2;               // depth of the ring of Q
constexpr int kDoStages = FA3_DO_STAGES;  // of dO
constexpr int kDsStages = 2;              // of dS
constexpr int kWorkSlots = 2;             // the tile that is computed, and the next
constexpr int kThreads = FA3_BACKWARD_WIDE_THREADS;
static_assert(kTileQ == 64 && kTileK == 128, "a tile");

constexpr bool kByHead = true;   // all steps of a query head come before the next one's
constexpr bool kUpward = false;  // tiles may go upwards, or be staggered

// What the launch allots (128 for every thread) is all there is to share out between the four
// warpgroups. The assembler takes none of it to be less than 96 for dQ.
constexpr int kSumRegisters = kHeadDim > 192 ? 192 : 176;  // of those that sum dK and dV
constexpr int kDqRegisters = 96;                           // of that which makes dQ
constexpr int kProducerRegisters = 512 - 2 * kSumRegisters - kDqRegisters;

// A tile lies in shared memory as blocks of 64 columns, row after row of 128 bytes,
// swizzled by the copy engine.
constexpr int kChunk = 64;
constexpr int kRowBytes = 2 * kChunk;
constexpr int kChunkBytes = 64 * kRowBytes;  // of any tile: all have 64 rows
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kChunksV = kHeadDimV / kChunk;
static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0 && kKeys == 64 &&
                  FA3_BACKWARD_CHUNK(kHeadDim, kHeadDimV) == kChunk,
              "tile sizes");

// The first block of a cluster makes these columns of dQ, for the keys of both; the
// second makes the rest.
constexpr int kSplit = 128;
constexpr int kSplitChunks = kSplit / kChunk;
static_assert(kHeadDim > kSplit && kHeadDim <= 2 * kSplit, "halves of dQ");

constexpr int kQBytes = kChunks * kChunkBytes;  // of Q, and of the block's K
constexpr int kDoBytes = kChunksV * kChunkBytes;
constexpr int kPBytes = 16 * kTileQ * 4;                         // of a warp's P
constexpr int kRowsBytes = 4 * FA3_BACKWARD_STATISTICS(kTileQ);  // lse and D

// What lies in shared memory. Buffers of Q and of dO are filled in both blocks at once, and empty
// when both have read them.
struct layout {
  ring<1, kQBytes> k;   // with k_of_peer, which lies beside it
  uint32_t k_of_peer;   // the other block's keys, in the columns of dQ that are ours
  ring<1, kDoBytes> v;  // as wide as dO
  ring<kQStages, kQBytes> q;
  ring<kDoStages, kDoBytes> d_o;     // dO
  ring<kDsStages, kChunkBytes> d_s;  // dS of this block's keys; filled with d_s_of_peer
  uint32_t d_s_of_peer;              // of the other block's, a buffer for each of d_s
  ring<1, kPBytes> p;                // of the first warp; those of the other three lie beside it
  uint32_t rows;                     // lse and D of a block of queries, beside each buffer of Q
  ring<2, 0> added;                  // full: a step has added to dQ; empty: others are told
  barrier q_landed, do_landed;       // a tile of which a part is to be cleared: the first buffer's
  barrier k_landed;
  ring<1, 4> mail;  // the next tile's number; empty: the first block's alone
  ring<kWorkSlots, kWorkBytes> work;
  barrier work_wanted;
  uint32_t end;
};

// From a base aligned to 1024, as the copy engine's tiles have to be.
__host__ __device__ constexpr layout lay_out(uint32_t base) {
  layout m = {};
  const uint32_t k = base;
  m.k_of_peer = k + kQBytes;
  const uint32_t v = m.k_of_peer + kSplitChunks * kChunkBytes, q = v + kDoBytes;
  const uint32_t d_o = q + kQStages * kQBytes, d_s = d_o + kDoStages * kDoBytes;
  m.d_s_of_peer = d_s + kDsStages * kChunkBytes;
  const uint32_t p = m.d_s_of_peer + kDsStages * kChunkBytes;
  m.rows = p + 4 * kPBytes;
  const uint32_t k_barriers = m.rows + kQStages * kRowsBytes;
  const uint32_t v_barriers = k_barriers + kRingBarrierBytes<1>;
  const uint32_t q_barriers = v_barriers + kRingBarrierBytes<1>;
  const uint32_t do_barriers = q_barriers + kRingBarrierBytes<kQStages>;
  const uint32_t ds_barriers = do_barriers + kRingBarrierBytes<kDoStages>;
  const uint32_t p_barriers = ds_barriers + kRingBarrierBytes<kDsStages>;
  const uint32_t added_barriers = p_barriers + 4 * kRingBarrierBytes<1>;
  const uint32_t mail_barriers = added_barriers + kRingBarrierBytes<2>;
  const uint32_t work_barriers = mail_barriers + kRingBarrierBytes<1>;
  m.q_landed = {work_barriers + kRingBarrierBytes<kWorkSlots>};
  m.do_landed = {m.q_landed.address + 8 * kQStages};
  m.k_landed = {m.do_landed.address + 8 * kDoStages};
  m.work_wanted = {m.k_landed.address + 8};
  const uint32_t mail = m.work_wanted.address + 8, work = (mail + 4 + 15) / 16 * 16;
  m.k = make_ring<1, kQBytes>(k, k_barriers);
  m.v = make_ring<1, kDoBytes>(v, v_barriers);
  m.q = make_ring<kQStages, kQBytes>(q, q_barriers);
  m.d_o = make_ring<kDoStages, kDoBytes>(d_o, do_barriers);
  m.d_s = make_ring<kDsStages, kChunkBytes>(d_s, ds_barriers);
  m.p = make_ring<1, kPBytes>(p, p_barriers);
  m.added = make_ring<2, 0>(0, added_barriers);
  m.mail = make_ring<1, 4>(mail, mail_barriers);
  m.work = make_ring<kWorkSlots, kWorkBytes>(work, work_barriers);
  m.end = work + kWorkBytes * kWorkSlots;
  return m;
}

constexpr int kSharedBytes = lay_out(0).end;
constexpr int kSharedBytesByHost = FA3_BACKWARD_WIDE_SHARED_BYTES(kHeadDim, kHeadDimV, kDoStages);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");

// Each buffer has its own: the other block, which copies half of every tile, may be a tile ahead,
// and its bytes of that one would end the phase of this one too early.
__device__ __forceinline__ barrier landed_in(barrier of_first, uint32_t buffer) {
  return {of_first.address + 8 * buffer};
}

// Its barriers and the initial arrivals at them, by one thread.
__device__ __forceinline__ void init_barriers(const layout &m) {
  ring_init(m.k, 1, 8);
  ring_init(m.v, 1, 4);
  ring_init(m.q, 1, 16 + 256);  // warps of two roles of both blocks, and the block's own threads
  ring_init(m.d_o, 1, 16);
  ring_init(m.d_s, 4, 8);
  for (int warp = 0; warp < 4; ++warp) ring_init(ring_beside(m.p, warp), 32, 32);
  ring_init(m.added, 4, 1);
  ring_init(m.mail, 1, 2);
  ring_init(m.work, 1, 32 * (3 * 4 + 3));
  for (int i = 0; i < kQStages; ++i) barrier_init(landed_in(m.q_landed, i), 1);
  for (int i = 0; i < kDoStages; ++i) barrier_init(landed_in(m.do_landed, i), 1);
  barrier_init(m.k_landed, 1);
  barrier_init(m.work_wanted, 1);
  mbarrier_init_fence();
}

// lse and D of the block of queries of a step.
__device__ __forceinline__ uint32_t rows_of_step(const layout &m, uint32_t use) {
  return m.rows + use % kQStages * kRowsBytes;
}

// Not an instruction: what the compiler has derived from `x` so far is derived again, instead of
// being kept in registers that are few.
__device__ __forceinline__ void forget(uint32_t &x) {
  asm volatile("" : "+r"(x));
}

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ work &work_of(uint32_t tile) {
  constexpr layout from_shared = lay_out(0);
  return *(work *)(shared + ring_tile(from_shared.work, tile));
}

// The number that the first block has sent last.
__device__ __forceinline__ int read_mail(void) {
  constexpr layout from_shared = lay_out(0);
  return *(volatile int *)(shared + from_shared.mail.data);
}

// The first block of the cluster takes the next tile and tells the second.
__device__ __forceinline__ int share_tile(const fa3_backward_params &p, const layout &m,
                                          uint32_t taken, bool leader) {
  if (leader) {
    barrier_expect(ring_full(m.mail, taken), 4);
    if (cluster_rank() == 0) {
      ring_wait_empty(m.mail, taken);
      const int next = take_tile(p, blockIdx.x / 2, taken == 0);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        cluster_store(cluster_map(m.mail.data, r), next, cluster_map(m.mail.full.address, r));
    }
  }
  ring_wait_full(m.mail, taken);
  const int index = __shfl_sync(0xffffffff, read_mail(), 0);
  // The condition always holds. An arrival at another block's barrier may overtake a read before
  // it, unless it depends on what was read; the first block then writes the next number over this
  // one. Only what the first lane has read counts.
  if (leader && index >= 0) cluster_arrive(cluster_map(m.mail.empty.address, 0));
  return index;
}

__device__ __forceinline__ void schedule(const fa3_backward_params &p, uint32_t base) {
  const bool leader = (threadIdx.x & 31) == 0;
  uint32_t taken = 0, done = 0;
  for (;;) {
    forget(base);
    const int index = share_tile(p, lay_out(base), taken++, leader);
    const bool last = index >= fa3_key_tile_count(&p.tiles);
    ring_claim(lay_out(base).work, done);
    bool found = true;
    if (leader) {
      work &w = work_of(done);
      w.last = last;
      if (!last) found = find_work(p, index, kTileQ, kTileK, nullptr, w);
      forget_memory();
      if (!last && found) {
        w.first = w.tile * kTileK + cluster_rank() * kKeys;
        w.whole[0] = find_whole(w, w.first, w.first + kKeys, kTileQ);
      }
      if (found) barrier_arrive(ring_full(lay_out(base).work, done));
    }
    if (last) break;
    if (!__shfl_sync(0xffffffff, found, 0)) continue;
    // Not before its loads are under way: a tile that is taken early waits here while
    // others run dry.
    barrier_wait(lay_out(base).work_wanted, done);
    ++done;
  }
}

__device__ __forceinline__ const work &wait_for_work(const layout &m, uint32_t tile) {
  ring_wait_full(m.work, tile);
  return work_of(tile);
}

__device__ __forceinline__ void finish_work(const layout &m, uint32_t tile) {
  barrier_arrive(ring_empty(m.work, tile));  // every thread that read
}

// This warp has read a buffer that both blocks share for the last time.
template <int kDepth, int kBytes>
__device__ __forceinline__ void release_both(const ring<kDepth, kBytes> &r, uint32_t use) {
  const uint32_t empty = ring_empty(r, use).address;
  if ((threadIdx.x & 31) < 2) cluster_arrive(cluster_map(empty, threadIdx.x & 1));
}

// The same of Q, and each thread has read the rows' statistics, which are the block's own.
__device__ __forceinline__ void release_queries(const layout &m, uint32_t use) {
  barrier_arrive(ring_empty(m.q, use));
  release_both(m.q, use);
}

#endif
