// The wide backward kernel's sizes, its shared memory, and the warp that plans the tiles.
#ifndef FA3_BACKWARD_WIDE_WORK_CUH
#define FA3_BACKWARD_WIDE_WORK_CUH

#include "backward_params.h"
#include "backward_sequence.cuh"
#include "cluster.cuh"
#include "mask.h"
#include "mbarrier.cuh"
#include "registers.cuh"
#include "scheduler.h"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kHeadDim = FA3_HEAD_DIM;         // of queries and keys
constexpr int kHeadDimV = FA3_VALUE_HEAD_DIM;  // of values and dO, <= kHeadDim

constexpr int kRows = FA3_TILE_Q;           // queries of a tile
constexpr int kTileN = FA3_TILE_K;          // keys of a cluster
constexpr int kKeys = kTileN / 2;           // keys of a block
constexpr int kQueryStages = 2;             // tiles of queries held
constexpr int kGradStages = FA3_DO_STAGES;  // of dO
constexpr int kDsStages = 2;                // of dS
constexpr int kWorkSlots = 2;               // the tile that is computed, and the next
constexpr int kThreads = FA3_BACKWARD_WIDE_THREADS;
static_assert(kRows == 64 && kTileN == 128, "a tile");

// What the launch allots (128 for every thread) is all there is to share out between the four
// warpgroups. The assembler takes none of it to be less than 96 for dQ.
constexpr int kSumRegisters = kHeadDim > 192 ? 192 : 176;  // of those that sum dK and dV
constexpr int kQueryRegisters = 96;                        // of that which makes dQ
constexpr int kProducerRegisters = 512 - 2 * kSumRegisters - kQueryRegisters;

// A tile lies in shared memory as blocks of 64 columns, row after row of 128 bytes,
// swizzled by the copy engine.
constexpr int kChunk = 64;
constexpr int kRowBytes = 2 * kChunk;
constexpr int kChunkBytes = 64 * kRowBytes;  // of any tile: all have 64 rows
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kChunksV = kHeadDimV / kChunk;
static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0 && kRows == 64 && kKeys == 64 &&
                  FA3_BACKWARD_CHUNK(kHeadDim, kHeadDimV) == kChunk,
              "tile sizes");

// The first block of a cluster makes these columns of dQ, for the keys of both; the
// second makes the rest.
constexpr int kSplit = 128;
constexpr int kSplitChunks = kSplit / kChunk;
static_assert(kHeadDim > kSplit && kHeadDim <= 2 * kSplit, "halves of dQ");

// Shared memory, in bytes from a base aligned to 1024.
constexpr int kKeyAt = 0;
constexpr int kPeerKeyAt = kKeyAt + kChunks * kChunkBytes;  // the peer's keys, our columns of dQ
constexpr int kValueAt = kPeerKeyAt + kSplitChunks * kChunkBytes;
constexpr int kQueryAt = kValueAt + kChunksV * kChunkBytes;               // [query stage]
constexpr int kGradAt = kQueryAt + kQueryStages * kChunks * kChunkBytes;  // [grad stage]
constexpr int kOwnDsAt = kGradAt + kGradStages * kChunksV * kChunkBytes;  // [ds stage]
constexpr int kPeerDsAt = kOwnDsAt + kDsStages * kChunkBytes;             // [ds stage]
constexpr int kProbabilitiesAt = kPeerDsAt + kDsStages * kChunkBytes;     // [warp]
constexpr int kProbabilitiesBytes = 16 * 64 * 4;                          // of a warp
constexpr int kRowsAt = kProbabilitiesAt + 4 * kProbabilitiesBytes;       // [query stage]
constexpr int kRowsBytes = 2 * 4 * kRows;                                 // lse, then D
constexpr int kBarriersAt = kRowsAt + kQueryStages * kRowsBytes;
constexpr int kQueryFull = kBarriersAt;  // [query stage]
constexpr int kQueryEmpty = kQueryFull + 8 * kQueryStages;
constexpr int kGradFull = kQueryEmpty + 8 * kQueryStages;  // [grad stage]
constexpr int kGradEmpty = kGradFull + 8 * kGradStages;
constexpr int kDsFull = kGradEmpty + 8 * kGradStages;  // [ds stage]
constexpr int kDsEmpty = kDsFull + 8 * kDsStages;
constexpr int kProbabilitiesFull = kDsEmpty + 8 * kDsStages;  // [warp]
constexpr int kProbabilitiesEmpty = kProbabilitiesFull + 8 * 4;
constexpr int kKeyFull = kProbabilitiesEmpty + 8 * 4;
constexpr int kKeyEmpty = kKeyFull + 8;
constexpr int kValueFull = kKeyEmpty + 8;
constexpr int kValueEmpty = kValueFull + 8;
constexpr int kAddedFull = kValueEmpty + 8;  // [turn]: dQ has been added to
constexpr int kAddedEmpty = kAddedFull + 8 * 2;
constexpr int kQueryLanded = kAddedEmpty + 8 * 2;  // before their last rows are cleared
constexpr int kGradLanded = kQueryLanded + 8;
constexpr int kKeyLanded = kGradLanded + 8;
constexpr int kMailFull = kKeyLanded + 8;
constexpr int kMailEmpty = kMailFull + 8;  // the first block's
constexpr int kWorkWanted = kMailEmpty + 8;
constexpr int kWorkFull = kWorkWanted + 8;  // [work slot]
constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
constexpr int kMailAt = kWorkEmpty + 8 * kWorkSlots;
constexpr int kWorkAt = (kMailAt + 4 + 15) / 16 * 16;
constexpr int kWorkBytes = 96;
constexpr int kSharedBytes = kWorkAt + kWorkBytes * kWorkSlots;
constexpr int kSharedBytesByHost = FA3_BACKWARD_WIDE_SHARED_BYTES(kHeadDim, kHeadDimV, kGradStages);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");

// Not an instruction: what the compiler has derived from `x` so far is derived again, instead of
// being kept in registers that are few.
__device__ __forceinline__ void forget(uint32_t &x) {
  asm volatile("" : "+r"(x));
}

extern __shared__ __align__(1024) unsigned char shared[];

// One tile of keys of this cluster: what a block does of it. The scheduling warp leaves it in
// shared memory for the others.
struct __align__(16) work {
  int head;                    // of keys
  int query_batch, key_batch;  // as coordinates of the tensors
  int query_row, key_row;      // the sequence's first rows in the tensors
  int slot;                    // of its first block of rows
  int tile;                    // of kTileN keys
  int first;                   // the block's first key
  fa3_mask mask;
  fa3_range blocks;  // of rows, that see keys of the cluster
  fa3_range whole;   // those of them that see all the keys of this block
  int steps;         // blocks of rows, over all query heads of the group
  int last;          // no tile: the work is done
};
static_assert(sizeof(work) <= kWorkBytes, "a work slot");

__device__ __forceinline__ work &work_of(uint32_t tile) {
  return *(work *)(shared + kWorkAt + kWorkBytes * ring_stage<kWorkSlots>(tile));
}

// Whether there are keys in this tile, and so work to do.
__device__ __forceinline__ bool find_work(const fa3_backward_params &p, int index, int rank,
                                          work &w) {
  const fa3_tile tile = fa3_key_tile_at(&p.tiles, index);
  const sequence s = find_sequence(p.sequences, tile.batch);
  const int first = tile.block * kTileN;
  if (first >= s.mask.keys) return false;
  w.head = tile.head;
  w.query_batch = s.query_batch;
  w.key_batch = s.key_batch;
  w.query_row = s.query_row;
  w.key_row = s.key_row;
  w.slot = s.slot;
  w.tile = tile.block;
  w.first = first + rank * kKeys;
  w.mask = s.mask;
  w.blocks = fa3_seeing_tiles(&s.mask, first, first + kTileN, kRows);
  w.steps = w.blocks.begin < w.blocks.end ? (w.blocks.end - w.blocks.begin) * p.queries_per_key : 0;
  w.whole.begin = w.whole.end = 0;
  if (w.first + kKeys <= s.mask.keys) {
    const fa3_range common = fa3_common_queries(&s.mask, w.first, w.first + kKeys);
    w.whole.begin = (common.begin + kRows - 1) / kRows;
    w.whole.end = common.end / kRows;
  }
  return true;
}

// The first block of the cluster takes the next tile and tells the second.
__device__ __forceinline__ void schedule(const fa3_backward_params &p, uint32_t base) {
  const int total = fa3_tile_count(&p.tiles), rank = cluster_rank();
  const bool leader = (threadIdx.x & 31) == 0;
  const uint32_t mail_empty = cluster_map(base + kMailEmpty, 0);
  uint32_t taken = 0, done = 0;
  for (;;) {
    if (leader) mbarrier_arrive_expect(base + kMailFull, 4);
    if (rank == 0 && leader) {
      mbarrier_wait(base + kMailEmpty, (taken & 1) ^ 1);
      const int next = atomicAdd(p.next_tile, 1);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        cluster_store(cluster_map(base + kMailAt, r), next, cluster_map(base + kMailFull, r));
    }
    __syncwarp();
    mbarrier_wait(base + kMailFull, taken & 1);
    const int index = *(volatile int *)(shared + kMailAt);
    __syncwarp();
    if (leader) cluster_arrive(mail_empty);
    ++taken;
    const bool last = index >= total;
    const uint32_t stage = ring_stage<kWorkSlots>(done);
    mbarrier_wait(base + kWorkEmpty + 8 * stage, ring_parity<kWorkSlots>(done) ^ 1);
    bool found = true;
    if (leader) {
      work &w = work_of(done);
      w.last = last;
      if (!last) found = find_work(p, index, rank, w);
      if (found) mbarrier_arrive(base + kWorkFull + 8 * stage);
    }
    if (last) break;
    if (!__shfl_sync(0xffffffff, found, 0)) continue;
    // Not before its loads are under way: a tile that is taken early waits here while
    // others run dry.
    mbarrier_wait(base + kWorkWanted, done & 1);
    ++done;
  }
}

__device__ __forceinline__ const work &wait_for_work(uint32_t base, uint32_t tile) {
  mbarrier_wait(base + kWorkFull + 8 * ring_stage<kWorkSlots>(tile), ring_parity<kWorkSlots>(tile));
  return work_of(tile);
}

__device__ __forceinline__ void finish_work(uint32_t base, uint32_t tile) {
  mbarrier_arrive(base + kWorkEmpty + 8 * ring_stage<kWorkSlots>(tile));  // every thread that read
}

#endif
