// The wide backward kernel's sizes, its shared memory, and the warp that plans the tiles.
#ifndef FA3_BACKWARD_WIDE_WORK_CUH
#define FA3_BACKWARD_WIDE_WORK_CUH

#include "backward_params.h"
#include "backward_tile.cuh"
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

constexpr int kRows = FA3_TILE_Q;         // queries of a tile
constexpr int kTileN = FA3_TILE_K;        // keys of a cluster
constexpr int kKeys = kTileN / 2;         // keys of a block
constexpr int kQueryStages = 2;           // tiles of queries held
constexpr int kDoStages = FA3_DO_STAGES;  // of dO
constexpr int kDsStages = 2;              // of dS
constexpr int kWorkSlots = 2;             // the tile that is computed, and the next
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
constexpr int kQueryAt = kValueAt + kChunksV * kChunkBytes;             // [query stage]
constexpr int kDoAt = kQueryAt + kQueryStages * kChunks * kChunkBytes;  // [dO stage]
constexpr int kOwnDsAt = kDoAt + kDoStages * kChunksV * kChunkBytes;    // [dS stage]
constexpr int kPeerDsAt = kOwnDsAt + kDsStages * kChunkBytes;           // [dS stage]
constexpr int kProbabilitiesAt = kPeerDsAt + kDsStages * kChunkBytes;   // [warp]
constexpr int kProbabilitiesBytes = 16 * 64 * 4;                        // of a warp
constexpr int kRowsAt = kProbabilitiesAt + 4 * kProbabilitiesBytes;     // [query stage]
constexpr int kRowsBytes = 4 * FA3_BACKWARD_STATISTICS(kRows);          // lse, then D
constexpr int kBarriersAt = kRowsAt + kQueryStages * kRowsBytes;
constexpr int kQueryFull = kBarriersAt;  // [query stage]
constexpr int kQueryEmpty = kQueryFull + 8 * kQueryStages;
constexpr int kDoFull = kQueryEmpty + 8 * kQueryStages;  // [dO stage]
constexpr int kDoEmpty = kDoFull + 8 * kDoStages;
constexpr int kDsFull = kDoEmpty + 8 * kDoStages;  // [dS stage]
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
constexpr int kDoLanded = kQueryLanded + 8;
constexpr int kKeyLanded = kDoLanded + 8;
constexpr int kMailFull = kKeyLanded + 8;
constexpr int kMailEmpty = kMailFull + 8;  // the first block's
constexpr int kWorkWanted = kMailEmpty + 8;
constexpr int kWorkFull = kWorkWanted + 8;  // [work slot]
constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
constexpr int kMailAt = kWorkEmpty + 8 * kWorkSlots;
constexpr int kWorkAt = (kMailAt + 4 + 15) / 16 * 16;
constexpr int kSharedBytes = kWorkAt + kWorkBytes * kWorkSlots;
constexpr int kSharedBytesByHost = FA3_BACKWARD_WIDE_SHARED_BYTES(kHeadDim, kHeadDimV, kDoStages);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");

// Not an instruction: what the compiler has derived from `x` so far is derived again, instead of
// being kept in registers that are few.
__device__ __forceinline__ void forget(uint32_t &x) {
  asm volatile("" : "+r"(x));
}

// In this kernel all tiles of a head add to one sum.
__device__ constexpr fa3_key_tiles one_sum = {};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ work &work_of(uint32_t tile) {
  return *(work *)(shared + kWorkAt + kWorkBytes * ring_stage<kWorkSlots>(tile));
}

// The first block of the cluster takes the next tile and tells the second.
__device__ __forceinline__ void schedule(const fa3_backward_params &p, uint32_t base) {
  const bool leader = (threadIdx.x & 31) == 0;
  uint32_t taken = 0, done = 0;
  for (;;) {
    forget(base);
    if (leader) mbarrier_arrive_expect(base + kMailFull, 4);
    if (cluster_rank() == 0 && leader) {
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
    if (leader) cluster_arrive(cluster_map(base + kMailEmpty, 0));
    ++taken;
    const bool last = index >= fa3_key_tile_count(&p.tiles);
    const uint32_t stage = ring_stage<kWorkSlots>(done);
    mbarrier_wait(base + kWorkEmpty + 8 * stage, ring_parity<kWorkSlots>(done) ^ 1);
    bool found = true;
    if (leader) {
      work &w = work_of(done);
      w.last = last;
      if (!last) found = find_work(p, index, kRows, kTileN, w);
      forget_memory();
      if (!last && found) {
        w.first = w.tile * kTileN + cluster_rank() * kKeys;
        w.whole[0] = find_whole(w, w.first, w.first + kKeys, kRows);
      }
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
