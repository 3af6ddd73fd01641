// The forward kernel's sizes, its shared memory, and the warp that plans the tiles.
#ifndef FA3_FORWARD_WORK_CUH
#define FA3_FORWARD_WORK_CUH

#include "forward_params.h"
#include "mask.h"
#include "mbarrier.cuh"
#include "registers.cuh"
#include "scheduler.h"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#ifndef FA3_PINGPONG
#define FA3_PINGPONG 1
#endif

constexpr int kHeadDim = FA3_HEAD_DIM;         // of queries and keys
constexpr int kHeadDimV = FA3_VALUE_HEAD_DIM;  // of values and output, <= kHeadDim
constexpr int kWarpgroups = FA3_TILE_Q / 64;   // consumers
constexpr int kTileN = FA3_TILE_K;             // keys per tile
constexpr int kStages = FA3_FORWARD_STAGES;    // depth of the key ring and of the value ring
constexpr int kQueryStages = 1;                // query tiles held

constexpr int kRows = 64;      // of a warpgroup
constexpr int kWorkSlots = 2;  // the tile that is computed, and the next
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerWarps = 4 * kWarpgroups;
// What the launch allots (168 or 128 for every thread) is all there is to share out.
constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;

// A tile lies in shared memory as blocks of kChunk columns, row after row of
// kRowBytes, swizzled by the copy engine.
constexpr int kChunk = kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 ? 64 : 32;
constexpr int kRowBytes = 2 * kChunk;
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kChunksV = kHeadDimV / kChunk;
constexpr int kQueryBytes = kRows * kHeadDim * 2;  // of a warpgroup
constexpr int kKeyBytes = kTileN * kHeadDim * 2;
constexpr int kValueBytes = kTileN * kHeadDimV * 2;

// The output leaves through a few rows of shared memory of each warp, this many
// chunks of columns at a time.
constexpr int kStageChunks = kChunksV < 2 ? 1 : 2;
constexpr int kStageChunkBytes = 16 * kRowBytes;  // of a warp
constexpr int kStageBytes = kStageChunkBytes * kStageChunks;
constexpr int kUnits = kChunk / 8;  // of 16 bytes in a row of a chunk

static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0 && kTileN % 8 == 0, "tile sizes");
// A warpgroup that waits for the next work holds the buffer of its last values, and those of keys
// and values that the other rows of its tile do not see: of one tile at most, or it would wait for
// what the loading warp can't reach.
static_assert(kRows * (kWarpgroups - 1) <= kTileN, "rows");

// Shared memory, in bytes from a base aligned to 1024.
constexpr int kQueryAt = 0;
constexpr int kKeyAt = kQueryAt + kQueryStages * kWarpgroups * kQueryBytes;
constexpr int kValueAt = kKeyAt + kStages * kKeyBytes;
constexpr int kStageAt = kValueAt + kStages * kValueBytes;
constexpr int kBarriersAt = kStageAt + kConsumerWarps * kStageBytes;
constexpr int kQueryFull = kBarriersAt;  // [query stage][warpgroup]
constexpr int kQueryEmpty = kQueryFull + 8 * kQueryStages * kWarpgroups;
constexpr int kKeyFull = kQueryEmpty + 8 * kQueryStages * kWarpgroups;  // [stage]
constexpr int kKeyEmpty = kKeyFull + 8 * kStages;
constexpr int kValueFull = kKeyEmpty + 8 * kStages;
constexpr int kValueEmpty = kValueFull + 8 * kStages;
constexpr int kValueLanded = kValueEmpty + 8 * kStages;
constexpr int kWorkFull = kValueLanded + 8;  // [work slot]
constexpr int kWorkEmpty = kWorkFull + 8 * kWorkSlots;
constexpr int kWorkWanted = kWorkEmpty + 8 * kWorkSlots;
constexpr int kWorkAt = (kWorkWanted + 8 + 15) / 16 * 16;
constexpr int kWorkBytes = 128;
constexpr int kSharedBytes = kWorkAt + kWorkBytes * kWorkSlots;
constexpr int kSharedBytesByHost =
    FA3_FORWARD_SHARED_BYTES(kHeadDim, kHeadDimV, FA3_TILE_Q, FA3_TILE_K);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kThreads == FA3_FORWARD_THREADS(FA3_TILE_Q), "threads");
static_assert(kChunk == FA3_FORWARD_CHUNK(kHeadDim, kHeadDimV), "chunk");

enum { kBarrierTurn = 1 };  // named barriers kBarrierTurn + warpgroup; 0 is __syncthreads

extern __shared__ __align__(1024) unsigned char shared[];

// For the host to give out: each is zero whenever nobody uses it.
extern "C" {
__device__ unsigned tile_counters[FA3_TILE_COUNTERS];
}

// One output tile of this block: which rows, and which tiles of keys it needs.
// The scheduling warp leaves it in shared memory for the others.
struct __align__(16) work {
  struct {
    fa3_range tiles;  // of keys, that its rows need
    fa3_range whole;  // those of them that all its rows see entirely
  } warpgroup[kWarpgroups];
  int head, batch;  // as coordinates of the tensor maps
  int key_batch;
  int first;      // the block's first query within its sequence
  int query_row;  // the sequence's first row in the tensors
  int key_row;
  fa3_mask mask;
  fa3_range tiles;  // of keys, for the whole block
  int last;         // no tile: the work is done
};
static_assert(sizeof(work) <= kWorkBytes, "a work slot");

__device__ __forceinline__ work &work_of(uint32_t tile) {
  return *(work *)(shared + kWorkAt + kWorkBytes * ring_stage<kWorkSlots>(tile));
}

// Which of a warpgroup's queries is in this row of its tile.
__device__ __forceinline__ int query_of_row(const fa3_forward_params &p, int row) {
  return row * p.packed_inverse >> 16;
}

// Which query head.
__device__ __forceinline__ int head_of_row(const fa3_forward_params &p, const work &w, int row) {
  return w.head * p.packed + row - query_of_row(p, row) * p.packed;
}

__device__ __forceinline__ work find_work(const fa3_forward_params &p, int index) {
  const fa3_tile tile = fa3_tile_at(&p.tiles, index);
  const int b = tile.batch;
  work w;
  w.head = tile.head;
  w.query_row = p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0;
  w.key_row = p.cu_seqlens_k ? p.cu_seqlens_k[b] : 0;
  const int queries = p.used_q         ? p.used_q[b]
                      : p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - w.query_row
                                       : p.seqlen_q;
  int keys = p.used_k         ? p.used_k[b]
             : p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - w.key_row
                              : p.seqlen_k;
  if (p.leftpad_k) {
    w.key_row += p.leftpad_k[b];
    keys -= p.leftpad_k[b];
  }
  const int64_t diagonal = p.diagonal ? p.diagonal[b] : keys - queries;
  w.mask = fa3_make_mask(queries, keys, diagonal, p.window_left, p.window_right);
  w.batch = p.cu_seqlens_q ? 0 : b;
  w.key_batch = p.batch_index_k ? p.batch_index_k[b] : p.cu_seqlens_k ? 0 : b;
  const int step = p.queries_per_warpgroup, rows = kWarpgroups * step;
  w.first = tile.block * rows;
  w.tiles = fa3_visible_tiles(&w.mask, w.first, w.first + rows, kTileN);
  w.last = w.first >= w.mask.queries;  // for now: a tile without rows
  for (int g = 0; g < kWarpgroups; ++g) {
    const int begin = w.first + g * step;
    const fa3_range common = fa3_common_keys(&w.mask, begin, begin + step);
    w.warpgroup[g].tiles = fa3_visible_tiles(&w.mask, begin, begin + step, kTileN);
    w.warpgroup[g].whole.begin = (common.begin + kTileN - 1) / kTileN;
    w.warpgroup[g].whole.end = common.end / kTileN;
  }
  return w;
}

__device__ __forceinline__ void schedule(const fa3_forward_params &p, uint32_t base) {
  const int workers = gridDim.x;
  const int total = fa3_tile_count(&p.tiles);
  uint32_t done = 0;
  for (int round = 0;; ++round) {
    // Not always the same tiles of a head, of which the last may be shorter.
    int index = round * workers + (blockIdx.x + round) % workers;
    if (p.next_tile != nullptr && round > 0) {
      // A tile that is taken early waits here while others run dry.
      if (done > 0) mbarrier_wait(base + kWorkWanted, (done - 1) & 1);
      if ((threadIdx.x & 31) == 0) {
        const int taken = atomicAdd(p.next_tile, 1);
        // Workers, fewer than tiles, begin with a tile each; the other tiles are asked for, and
        // each worker asks once more, in vain: `total` questions. The last leaves the counter as
        // the launch found it, for the stream's next.
        if (taken == total - 1) *p.next_tile = 0;
        index = workers + taken;
      }
      index = __shfl_sync(0xffffffff, index, 0);
    }
    const bool last = index >= total;
    work w;
    if (!last) {
      w = find_work(p, index);
      if (w.last) continue;
    }
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

#endif
