// The backward kernel's sizes, its shared memory, and the warps that plan the tiles and keep the
// order in which dQ is summed.
#ifndef FA3_BACKWARD_WORK_CUH
#define FA3_BACKWARD_WORK_CUH

#include "backward_sequence.cuh"
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
constexpr int kGradRowBytes = 128;
constexpr int kGradBlockBytes = (kTransposed ? kTileM : kTileN) * kGradRowBytes;
constexpr int kGradBytes = 2 * kTileM * kTileN;
constexpr int kRowsBytes = 2 * kTileM * 4;  // lse and D

// Shared memory, in bytes from a base aligned to 1024.
constexpr int kKeyAt = 0;
constexpr int kValueAt = kKeyAt + kKeyBytes;
constexpr int kQueryAt = kValueAt + kKeyBytes;
constexpr int kOutputAt = kQueryAt + kStages * kQueryBytes;  // dO
constexpr int kGradAt = kOutputAt + kStages * kQueryBytes;   // dS, two buffers
constexpr int kRowsAt = kGradAt + 2 * kGradBytes;            // [stage]
constexpr int kBarriersAt = kRowsAt + kStages * kRowsBytes;
constexpr int kKeyFull = kBarriersAt;
constexpr int kKeyEmpty = kKeyFull + 8;
constexpr int kValueFull = kKeyEmpty + 8;
constexpr int kValueEmpty = kValueFull + 8;
constexpr int kLanded = kValueEmpty + 8;
constexpr int kQueryFull = kLanded + 8;  // [stage]
constexpr int kQueryEmpty = kQueryFull + 8 * kStages;
constexpr int kOutputFull = kQueryEmpty + 8 * kStages;
constexpr int kOutputEmpty = kOutputFull + 8 * kStages;
constexpr int kGradFull = kOutputEmpty + 8 * kStages;  // [buffer]
constexpr int kGradEmpty = kGradFull + 8 * 2;
constexpr int kTurnFull = kGradEmpty + 8 * 2;        // [turn]: the step may add to dQ,
constexpr int kTurnTaken = kTurnFull + 8 * kTurns;   // it has,
constexpr int kTurnEmpty = kTurnTaken + 8 * kTurns;  // and the next tile of keys knows
constexpr int kWorkFull = kTurnEmpty + 8 * kTurns;   // [work slot]
constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
constexpr int kWorkWanted = kWorkEmpty + 8 * kWorkSlots;
constexpr int kPlacesAt = kWorkWanted + 8;  // [stage]
constexpr int kWorkAt = (kPlacesAt + 4 * kStages + 15) / 16 * 16;
constexpr int kWorkBytes = 96;
constexpr int kSharedBytes = kWorkAt + kWorkBytes * kWorkSlots;
constexpr int kSharedBytesByHost = FA3_BACKWARD_SHARED_BYTES(kHeadDim, kHeadDim, kTileM, kTileN);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kThreads == FA3_BACKWARD_THREADS, "threads");

enum { kBarrierTurn = 1 };  // named barriers kBarrierTurn + warpgroup; 0 is __syncthreads

extern __shared__ __align__(1024) unsigned char shared[];

// One tile of keys: the scheduling warp leaves it in shared memory for the others.
struct __align__(16) work {
  int head;  // of keys
  int tile;  // its place among the head's
  sequence place;
  fa3_range blocks;              // of queries that see any of its keys
  fa3_range whole[kWarpgroups];  // those of them that see all of the warpgroup's
  int last;                      // no tile: the work is done
};
static_assert(sizeof(work) <= kWorkBytes, "a work slot");

__device__ __forceinline__ work &work_of(uint32_t tile) {
  return *(work *)(shared + kWorkAt + kWorkBytes * ring_stage<kWorkSlots>(tile));
}

// Whether the tile is the first of those that add to the block of queries in this stage (1), and
// whether it is the last (2).
__device__ __forceinline__ int &place_of(uint32_t stage) {
  return *(int *)(shared + kPlacesAt + 4 * stage);
}

__device__ __forceinline__ work find_work(const fa3_backward_params &p, int index) {
  const fa3_tile tile = fa3_key_tile_at(&p.tiles, index);
  work w;
  w.head = tile.head;
  w.tile = tile.block;
  w.place = find_sequence(p.sequences, tile.batch);
  const fa3_mask &mask = w.place.mask;
  const int first = tile.block * kTileN;
  w.last = first >= mask.keys;  // for now: a tile without keys
  w.blocks = fa3_seeing_tiles(&mask, first, first + kTileN, kTileM);
  for (int g = 0; g < kWarpgroups; ++g) {
    const int begin = first + g * kKeys, end = begin + kKeys;
    const fa3_range common = fa3_common_queries(&mask, begin, end);
    w.whole[g].begin = (common.begin + kTileM - 1) / kTileM;
    // What follows the last query takes no part anyway.
    w.whole[g].end = end > mask.keys              ? 0
                     : common.end >= mask.queries ? w.blocks.end
                                                  : common.end / kTileM;
  }
  return w;
}

__device__ __forceinline__ void schedule(const fa3_backward_params &p, uint32_t base) {
  const int total = fa3_tile_count(&p.tiles);
  uint32_t done = 0;
  for (;;) {
    // A tile that is taken early waits here, and so do those that come after it in its head.
    if (done > 0) mbarrier_wait(base + kWorkWanted, (done - 1) & 1);
    work w;
    bool last;
    do {
      int index = 0;
      if ((threadIdx.x & 31) == 0) index = atomicAdd(p.next_tile, 1);
      index = __shfl_sync(0xffffffff, index, 0);
      last = index >= total;
      if (!last) w = find_work(p, index);
    } while (!last && w.last);
    w.last = last;
    const uint32_t stage = ring_stage<kWorkSlots>(done);
    mbarrier_wait(base + kWorkEmpty + 8 * stage, ring_parity<kWorkSlots>(done) ^ 1);
    if ((threadIdx.x & 31) == 0) {
      work_of(done) = w;
      mbarrier_arrive(base + kWorkFull + 8 * stage);
    }
    __syncwarp();
    ++done;
    if (last) break;
  }
}

__device__ __forceinline__ void wait_for_work(uint32_t base, uint32_t tile) {
  mbarrier_wait(base + kWorkFull + 8 * ring_stage<kWorkSlots>(tile), ring_parity<kWorkSlots>(tile));
}

__device__ __forceinline__ void finish_work(uint32_t base, uint32_t tile) {
  mbarrier_arrive(base + kWorkEmpty + 8 * ring_stage<kWorkSlots>(tile));  // every thread that read
}

// Which tiles of keys came before this one in dQ's block of rows, and whether it is the last.
struct place_in_order {
  int before;
  bool last;
};

__device__ __forceinline__ place_in_order find_place(const fa3_mask &mask, int block, int tile) {
  const fa3_range tiles = fa3_visible_tiles(&mask, block * kTileM, (block + 1) * kTileM, kTileN);
  return {tile - tiles.begin, tile + 1 == tiles.end};
}

// Waits until the tiles before this one have added to a block of dQ, step after step.
__device__ __forceinline__ void grant_turns(const fa3_backward_params &p, uint32_t base) {
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int *counters = p.counters + (int64_t)w.head * p.queries_per_key * p.slots + w.place.slot;
    for (int m = w.blocks.end - 1; m >= w.blocks.begin; --m) {
      const int before = find_place(w.place.mask, m, w.tile).before;
      for (int g = 0; g < p.queries_per_key; ++g, ++use) {
        const uint32_t turn = ring_stage<kTurns>(use);
        mbarrier_wait(base + kTurnEmpty + 8 * turn, ring_parity<kTurns>(use) ^ 1);
        if ((threadIdx.x & 31) == 0) {
          while (before > 0 && load_acquire(counters + g * p.slots + m) < before) {
          }
          mbarrier_arrive(base + kTurnFull + 8 * turn);
        }
        __syncwarp();
      }
    }
    finish_work(base, t);
  }
}

// Tells the next tile that this one has added.
__device__ __forceinline__ void pass_turns(const fa3_backward_params &p, uint32_t base) {
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    wait_for_work(base, t);
    const work &w = work_of(t);
    if (w.last) break;
    int *counters = p.counters + (int64_t)w.head * p.queries_per_key * p.slots + w.place.slot;
    for (int m = w.blocks.end - 1; m >= w.blocks.begin; --m) {
      const place_in_order place = find_place(w.place.mask, m, w.tile);
      for (int g = 0; g < p.queries_per_key; ++g, ++use) {
        const uint32_t turn = ring_stage<kTurns>(use);
        mbarrier_wait(base + kTurnTaken + 8 * turn, ring_parity<kTurns>(use));
        if ((threadIdx.x & 31) == 0) {
          if (!place.last) store_release(counters + g * p.slots + m, place.before + 1);
          mbarrier_arrive(base + kTurnEmpty + 8 * turn);
        }
        __syncwarp();
      }
    }
    finish_work(base, t);
  }
}

#endif
