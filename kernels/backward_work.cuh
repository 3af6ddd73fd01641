// The backward kernel's sizes, its shared memory, and the warps that plan the tiles and keep the
// order in which dQ is summed.
#ifndef FA3_BACKWARD_WORK_CUH
#define FA3_BACKWARD_WORK_CUH

#include "backward_tile.cuh"
#include "counters.cuh"
#include "mbarrier.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kHeadDim = FA3_HEAD_DIM;
constexpr int kTileM = FA3_TILE_Q;            // queries per step: 64, 80 or 128
constexpr int kTileN = FA3_TILE_K;            // keys of a tile
constexpr int kStages = FA3_BACKWARD_STAGES;  // depth of the rings of Q and of dO

constexpr int kWarpgroups = 2;               // consumers
constexpr int kKeys = kTileN / kWarpgroups;  // of a warpgroup
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerWarps = 4 * kWarpgroups;
// What the launch allots (168 for every thread) is all there is to share out.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kWorkSlots = 2;  // the tile that is computed, and the next
constexpr int kTurns = 4;      // steps that may have the leave to add, and not have added

// The warpgroups share dQ's product: by rows if there are 128; else both take all rows and 64
// columns, of which the second leaves out those that the first has too. 80 rows are no multiple of
// 64, which is what a product has: then it is dQ^T that is computed.
constexpr bool kSplitRows = kTileM == 128;
constexpr bool kTransposed = kTileM == 80;
constexpr int kQueryColumns = kSplitRows ? kHeadDim : kTransposed ? kTileM : 64;  // of the product
constexpr int kSecondColumn = kSplitRows ? 0 : kHeadDim - 64;  // where the second begins
constexpr int kOverlap = kSplitRows ? 0 : 64 - kSecondColumn;
static_assert((kTileM == 64 || kTileM == 80 || kTileM == 128) && kTileN == 128, "a step");
static_assert(kHeadDim == FA3_VALUE_HEAD_DIM, "head dims");
static_assert(kSplitRows || kHeadDim >= 64, "dQ's columns");
static_assert(!kTransposed || kHeadDim == 128, "a warpgroup has 64 columns of dQ^T");

// A tile lies in shared memory as blocks of kChunk columns, row after row of kRowBytes, swizzled by
// the copy engine.
constexpr int kChunk = FA3_BACKWARD_CHUNK(kHeadDim, kHeadDim);
constexpr int kRowBytes = 2 * kChunk;
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kKeyBytes = kTileN * kHeadDim * 2;
constexpr int kQueryBytes = kTileM * kHeadDim * 2;
// dS: blocks of 64 queries, key after key; for dQ^T blocks of 64 keys, query after query.
constexpr int kDsRowBytes = 128;
constexpr int kDsBlockBytes = (kTransposed ? kTileM : kTileN) * kDsRowBytes;
constexpr int kDsBytes = 2 * kTileM * kTileN;
constexpr int kRowsBytes = 2 * kTileM * 4;  // lse and D

// Shared memory, in bytes from a base aligned to 1024.
constexpr int kKeyAt = 0;
constexpr int kValueAt = kKeyAt + kKeyBytes;
constexpr int kQueryAt = kValueAt + kKeyBytes;
constexpr int kDoAt = kQueryAt + kStages * kQueryBytes;  // dO
constexpr int kDsAt = kDoAt + kStages * kQueryBytes;     // dS, two buffers
constexpr int kRowsAt = kDsAt + 2 * kDsBytes;            // [stage]
constexpr int kBarriersAt = kRowsAt + kStages * kRowsBytes;
constexpr int kKeyFull = kBarriersAt;
constexpr int kKeyEmpty = kKeyFull + 8;
constexpr int kValueFull = kKeyEmpty + 8;
constexpr int kValueEmpty = kValueFull + 8;
constexpr int kLanded = kValueEmpty + 8;
constexpr int kQueryFull = kLanded + 8;  // [stage]
constexpr int kQueryEmpty = kQueryFull + 8 * kStages;
constexpr int kDoFull = kQueryEmpty + 8 * kStages;
constexpr int kDoEmpty = kDoFull + 8 * kStages;
constexpr int kDsFull = kDoEmpty + 8 * kStages;  // [buffer]
constexpr int kDsEmpty = kDsFull + 8 * 2;
constexpr int kTurnFull = kDsEmpty + 8 * 2;          // [turn]: the step may add to dQ,
constexpr int kTurnTaken = kTurnFull + 8 * kTurns;   // it has,
constexpr int kTurnEmpty = kTurnTaken + 8 * kTurns;  // and the next tile of keys knows
constexpr int kWorkFull = kTurnEmpty + 8 * kTurns;   // [work slot]
constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
constexpr int kWorkWanted = kWorkEmpty + 8 * kWorkSlots;
constexpr int kTurnBytes = 32;
constexpr int kTurnsAt = (kWorkWanted + 8 + 31) / 32 * 32;  // [turn]
constexpr int kWorkAt = kTurnsAt + kTurnBytes * kTurns;
constexpr int kSharedBytes = kWorkAt + kWorkBytes * kWorkSlots;
constexpr int kSharedBytesByHost = FA3_BACKWARD_SHARED_BYTES(kHeadDim, kHeadDim, kTileM, kTileN);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kThreads == FA3_BACKWARD_THREADS, "threads");

enum { kBarrierTurn = 1 };  // named barriers kBarrierTurn + warpgroup; 0 is __syncthreads

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ work &work_of(uint32_t tile) {
  return *(work *)(shared + kWorkAt + kWorkBytes * ring_stage<kWorkSlots>(tile));
}

enum turn_kind {
  kTurnBetween,  // the tile adds to what others have added before it
  kTurnFirst,    // it is the first,
  kTurnLast,     // or the last, which takes the sum,
  kTurnAlone     // or both
};

// One step's turn, which a warp of the producers works out and leaves in shared memory.
struct __align__(32) turn {
  int *counter;    // of tiles that have added to the block
  float *partial;  // where its sum is
  int before;      // tiles that add before this one
  int kind;        // turn_kind
};
static_assert(sizeof(turn) <= kTurnBytes, "a turn");

__device__ __forceinline__ turn make_turn(const fa3_backward_params &p, const work &w, int head,
                                          int block) {
  const fa3_turn mine = fa3_find_turn(&p.tiles, &w.sequence.mask, w.tile, block, kTileM, kTileN);
  const int64_t slot = (int64_t)(mine.sum * p.heads + head) * p.slots + w.sequence.slot + block;
  turn t;
  t.counter = p.counters + slot;
  t.partial = p.partial + slot * (kTileM * kHeadDim);
  t.before = mine.before;
  const bool last = mine.last && !p.finished_later;
  t.kind = mine.before == 0 ? last ? kTurnAlone : kTurnFirst : last ? kTurnLast : kTurnBetween;
  return t;
}

__device__ __forceinline__ turn &turn_of(uint32_t use) {
  return *(turn *)(shared + kTurnsAt + kTurnBytes * ring_stage<kTurns>(use));
}

__device__ __forceinline__ void schedule(const fa3_backward_params &p, uint32_t base) {
  const int total = fa3_key_tile_count(&p.tiles);
  for (uint32_t done = 0;; ++done) {
    // A tile that is taken early waits here, and so do those that come after it in its head.
    if (done > 0) mbarrier_wait(base + kWorkWanted, (done - 1) & 1);
    const uint32_t stage = ring_stage<kWorkSlots>(done);
    mbarrier_wait(base + kWorkEmpty + 8 * stage, ring_parity<kWorkSlots>(done) ^ 1);
    int last = 0;
    if ((threadIdx.x & 31) == 0) {
      work &w = work_of(done);
      int index;
      do {
        index = atomicAdd(p.next_tile, 1);
      } while (index < total && !find_work(p, index, kTileM, kTileN, w));
      w.last = last = index >= total;
      w.first = w.tile * kTileN;
#pragma unroll 1
      for (int g = 0; g < kWarpgroups; ++g) {
        const int first = w.first + g * kKeys;
        w.whole[g] = find_whole(w, first, first + kKeys, kTileM);
      }
      mbarrier_arrive(base + kWorkFull + 8 * stage);
    }
    if (uniform(last)) break;
  }
}

__device__ __forceinline__ void wait_for_work(uint32_t base, uint32_t tile) {
  mbarrier_wait(base + kWorkFull + 8 * ring_stage<kWorkSlots>(tile), ring_parity<kWorkSlots>(tile));
}

__device__ __forceinline__ void finish_work(uint32_t base, uint32_t tile) {
  mbarrier_arrive(base + kWorkEmpty + 8 * ring_stage<kWorkSlots>(tile));  // every thread that read
}

// Waits until the tiles before this one have added to a block of dQ, step after step.
__device__ __forceinline__ void grant_turns(const fa3_backward_params &p, uint32_t base) {
  wait_for_prior_grids();  // which clear the counters
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    for (int m = w.start, left = w.blocks.end - w.blocks.begin; left > 0; m += w.step, --left) {
      for (int g = 0; g < w.heads; ++g, ++use) {
        const uint32_t stage = ring_stage<kTurns>(use);
        mbarrier_wait(base + kTurnEmpty + 8 * stage, ring_parity<kTurns>(use) ^ 1);
        if ((threadIdx.x & 31) == 0) {
          const turn mine = make_turn(p, w, w.query_head + g, m);
          turn_of(use) = mine;
          while (mine.before > 0 && load_acquire(mine.counter) < mine.before) {
          }
          mbarrier_arrive(base + kTurnFull + 8 * stage);
        }
        __syncwarp();
      }
    }
    finish_work(base, t);
  }
}

// Tells the next tile that this one has added.
__device__ __forceinline__ void pass_turns(uint32_t base) {
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    for (int left = w.steps; left > 0; --left, ++use) {
      const uint32_t stage = ring_stage<kTurns>(use);
      mbarrier_wait(base + kTurnTaken + 8 * stage, ring_parity<kTurns>(use));
      if ((threadIdx.x & 31) == 0) {
        const turn mine = turn_of(use);
        if (mine.kind < kTurnLast) store_release(mine.counter, mine.before + 1);
        mbarrier_arrive(base + kTurnEmpty + 8 * stage);
      }
      __syncwarp();
    }
    finish_work(base, t);
  }
}

#endif
