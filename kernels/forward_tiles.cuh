// The tiles of a forward kernel, and the warp that plans them. Who includes it has kWarpgroups,
// kTileK, kWorkBytes and `layout` with the rings of work.
#ifndef FA3_FORWARD_TILES_CUH
#define FA3_FORWARD_TILES_CUH

#include <limits.h>

#include "forward_params.h"
#include "registers.cuh"
#include "ring.cuh"

// Kernels of 16 bits with code for pages can share keys out too, and those for unpacked codes.
#if (FA3_PAGES || FA3_UNPACKED) && !FA3_E4M3
#define FA3_SPLITS 1
#else
#define FA3_SPLITS 0
#endif

extern __shared__ __align__(1024) unsigned char shared[];

// For the host to give out: each is zero whenever nobody uses it.
extern "C" {
__device__ unsigned tile_counters[FA3_TILE_COUNTERS];
}

// Whether the kernel is for calls under a causal mask whose diagonal crosses one tile of keys for
// each warpgroup, from its first row to its last, and no others need a mask. Such calls have dense
// tensors, and whole tiles of one query head each.
#if FA3_DIAGONAL
constexpr bool kDiagonal = true;
#else
constexpr bool kDiagonal = false;
#endif

// The scales that all rows of a warpgroup and all of a tile's keys have.
struct work_scales {
  float score[kWarpgroups];  // with the softmax's; 0: rows have scales of their own
  float value;
};

// Of a tile whose keys are not shared out.
constexpr int kWhole = INT_MIN;

// Whether tiles may be cut into the rows of their warpgroups. Codes' are not, and where keys may be
// shared out the scheduling warp of three warpgroups has no registers for it.
#if FA3_E4M3
constexpr bool kCutTiles = false;
#elif FA3_SPLITS
constexpr bool kCutTiles = kWarpgroups < 3;
#else
constexpr bool kCutTiles = true;
#endif

// One output tile of this block: which rows, and which tiles of keys it needs.
// The scheduling warp leaves it in shared memory for the others.
struct __align__(16) work {
  struct {
    fa3_range tiles;  // of keys, that its rows see
    fa3_range whole;  // those of them that all its rows see entirely
#if FA3_E4M3
    int plain_end;  // behind the last of these before which all rows have seen a key
#endif
  } warpgroup[kWarpgroups];
  fa3_sequence sequence;
#if FA3_E4M3
  int batch;  // the sequence's number, for its scales
  work_scales scales;
#elif FA3_SPLITS
  int part;  // the place of its results, less query * part_stride + head of each row; or kWhole
#endif
  int head;         // of queries; of keys, if the queries of its whole group share tiles
  int key_head;     // the one of keys and values
  int first;        // the tile's first query within its sequence
  fa3_range tiles;  // of keys, for the whole tile
  int last;         // no tile: the work is done
};
static_assert(sizeof(work) <= kWorkBytes, "a work slot");

__device__ __forceinline__ work &work_of(uint32_t tile) {
  constexpr layout from_shared = lay_out(0);
  return *(work *)(shared + ring_tile(from_shared.work, tile));
}

// work_of, without a register for the address.
__device__ __forceinline__ const work &work_again(uint32_t t) {
  asm volatile("" : "+r"(t));
  return work_of(t);
}

// How many query heads share a tile.
__device__ __forceinline__ int heads_of_tile(const fa3_forward_params &params) {
  return kDiagonal ? 1 : params.tile_heads;
}

__device__ __forceinline__ int queries_of_warpgroup(const fa3_forward_params &params) {
  return kDiagonal ? kRows : params.queries_per_warpgroup;
}

// Which of a warpgroup's queries is in this row of its tile.
__device__ __forceinline__ int query_of_row(const fa3_forward_params &params, int row) {
  return kDiagonal ? row : row * params.tile_heads_inverse >> 16;
}

// Which query head.
__device__ __forceinline__ int head_of_row(const fa3_forward_params &params, const work &w,
                                           int row) {
  const int heads = heads_of_tile(params);
  return w.head * heads + row - query_of_row(params, row) * heads;
}

__device__ __forceinline__ void find_work(const fa3_forward_params &params, const fa3_tile &tile,
                                          work &w) {
#if FA3_E4M3
  w.batch = tile.batch;
#endif
  w.head = tile.head;
  w.key_head = heads_of_tile(params) == 1 ? tile.head / params.group : tile.head;
  w.sequence = fa3_read_sequence(&params.sequences, tile.batch);
  fa3_mask *mask = &w.sequence.mask;
  const int step = queries_of_warpgroup(params);
  int block = tile.block, queries = params.tile_queries;
  if (kCutTiles && block >= params.tiles.blocks) {
    block -= params.tiles.blocks;
    queries = step;
  }
  w.first = block * queries;
  // For now: a tile without rows, or of another kernel's sequence.
  w.last = w.first >= mask->queries || mask->queries <= params.few_queries;
  // Behind the tile's own queries the sequence ends, for consumers that have none of them. The
  // other bound is fa3_find_sequence's, for which there are no registers.
  mask->queries = min(min(mask->queries, params.sequences.seqlen_q), w.first + queries);
  w.tiles = fa3_visible_tiles(mask, w.first, w.first + kWarpgroups * step, kTileK);
  for (int i = 0; i < kWarpgroups; ++i) {
    const int begin = w.first + i * step;
    const fa3_range common = fa3_common_keys(mask, begin, begin + step);
    w.warpgroup[i].tiles = fa3_visible_tiles(mask, begin, begin + step, kTileK);
    w.warpgroup[i].whole.begin = (common.begin + kTileK - 1) / kTileK;
    w.warpgroup[i].whole.end = common.end / kTileK;
#if FA3_E4M3
    w.warpgroup[i].plain_end = common.end / kTileK - (common.end % kTileK == 0);
#endif
  }
}

#if FA3_SPLITS
// Of a tile's keys, these alone.
__device__ __forceinline__ void limit_tiles(work &w, fa3_range tiles) {
  w.tiles = fa3_common_range(w.tiles, tiles);
#pragma unroll 1
  for (int i = 0; i < kWarpgroups; ++i)
    w.warpgroup[i].tiles = fa3_common_range(w.warpgroup[i].tiles, tiles);
}

// The share number `split` of them, where there are several.
__device__ __forceinline__ void take_share(const fa3_forward_params &params, work &w, int split) {
  w.part = kWhole;
  if (params.splits == 1) return;
  w.part = (split * params.tiles.batches + w.sequence.query_batch) * params.longest_query *
           params.part_stride;
  limit_tiles(w, fa3_share_of(w.tiles, split, params.splits));
}
#endif

#if FA3_E4M3
constexpr bool kPackedTiles = false;
#else
constexpr bool kPackedTiles = true;
#endif

// Whether the scheduling warp puts a tile together in the ring: it has too few registers for one.
#if FA3_E4M3
constexpr bool kWorkInPlace = true;
#else
constexpr bool kWorkInPlace = false;
#endif

// Where only the tiles that there are have numbers (fa3_tile_space.packed): 32 sequences, one a
// lane, in one phase. A worker's numbers grow, so that it walks on from where it is.
struct tile_walk {
  int above;  // the phase has blocks below this one
  int first;  // of the sequences
  int begin;  // the number of their first tile
  int end;    // behind the last tile of the lane's sequence, counted from `begin`
};

__device__ __forceinline__ int phase_bottom(const fa3_forward_params &params, int above) {
  return params.tiles.uneven ? above / 2 : 0;
}

__device__ __forceinline__ void count_tiles(const fa3_forward_params &params, tile_walk &walk) {
  const int lane = threadIdx.x & 31, batch = walk.first + lane;
  walk.end = 0;
  if (batch < params.tiles.batches) {
    const int queries = fa3_find_sequence(&params.sequences, batch).mask.queries;
    const int blocks = (queries + params.tile_queries - 1) / params.tile_queries;
    if (queries > params.few_queries)
      walk.end =
          max(min(blocks, walk.above) - phase_bottom(params, walk.above), 0) * params.tiles.heads;
  }
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, walk.end, step);
    if (lane >= step) walk.end += before;
  }
}

// False where there is no such tile; `begin` is then how many there are.
__device__ __forceinline__ bool walk_to_tile(const fa3_forward_params &params, tile_walk &walk,
                                             int index, fa3_tile &tile) {
  for (;;) {
    const int next = walk.begin + __shfl_sync(0xffffffff, walk.end, 31);
    if (index < next) break;
    walk.begin = next;
    walk.first += 32;
    if (walk.first >= params.tiles.batches) {
      walk.above = phase_bottom(params, walk.above);
      walk.first = 0;
      if (walk.above == 0) return false;
    }
    count_tiles(params, walk);
  }
  const int heads = params.tiles.heads, section = min(params.tiles.section, heads);
  const int lane = __ffs(__ballot_sync(0xffffffff, index - walk.begin < walk.end)) - 1;
  int before = __shfl_sync(0xffffffff, walk.end, max(lane - 1, 0));
  if (lane == 0) before = 0;
  const int blocks = (__shfl_sync(0xffffffff, walk.end, lane) - before) / heads;
  const int rest = index - walk.begin - before;
  const int first_head = rest / (section * blocks) * section;
  const int width = min(section, heads - first_head), in_section = rest - first_head * blocks;
  tile.batch = walk.first + lane;
  tile.head = first_head + in_section % width;
  tile.block = phase_bottom(params, walk.above) + blocks - 1 - in_section / width;
  return true;
}

// `begin` waits until barriers are there, and memory may be read: of codes, the first tile's number
// is found before. `add_scales` adds a tile's scales, which only codes have, or none if it is no
// tile. The whole warp calls both.
template <typename Begin, typename Add>
__device__ __forceinline__ void schedule(const fa3_forward_params &params, const layout &m,
                                         const Begin &begin, const Add &add_scales) {
  const int workers = gridDim.x;
#if FA3_SPLITS
  const int splits = params.splits;
#else
  constexpr int splits = 1;
#endif
  const bool packed = kPackedTiles && params.tiles.packed;
  tile_walk walk = {params.tiles.blocks, 0, 0, 0};
  if (packed) count_tiles(params, walk);
  uint32_t done = 0;
  for (int round = 0;; ++round) {
    // Not always the same tiles of a head, of which the last may be shorter.
    int index = round * workers + (blockIdx.x + round) % workers;
    if (params.next_tile != nullptr && round > 0) {
      // A tile that is taken early waits here while others run dry.
      if (done > 0) barrier_wait(m.work_wanted, done - 1);
      if ((threadIdx.x & 31) == 0) index = workers + atomicAdd(params.next_tile, 1);
      index = __shfl_sync(0xffffffff, index, 0);
    }
    fa3_tile tile;
    bool last;
    int total;
    if (packed) {
      last = !walk_to_tile(params, walk, index / splits, tile);
      total = walk.begin * splits;
    } else {
      total = (kCutTiles ? fa3_part_count(&params.tiles) : fa3_tile_count(&params.tiles)) * splits;
      last = index >= total;
    }
    work in_registers;
    if (kWorkInPlace && !last) tile = fa3_tile_at(&params.tiles, index);
    if (round == 0) begin();
    if (kWorkInPlace) ring_wait_empty(m.work, done);
    work &w = kWorkInPlace ? work_of(done) : in_registers;
    if (!last) {
      if (!kWorkInPlace && !packed)
        tile = kCutTiles ? fa3_part_at(&params.tiles, index / splits)
                         : fa3_tile_at(&params.tiles, index / splits);
      if (!kWorkInPlace || (threadIdx.x & 31) == 0) find_work(params, tile, w);
      if (kWorkInPlace) __syncwarp();
      if (w.last) {
        if (kWorkInPlace) __syncwarp();
        continue;
      }
    } else if (params.next_tile != nullptr && index == workers + total - 1 &&
               (threadIdx.x & 31) == 0) {
      // Who has a tile asks for another one, in the end in vain: `total` questions. The last leaves
      // the counter as the launch found it, for the stream's next.
      *params.next_tile = 0;
    }
    if (!kWorkInPlace) {
      w.last = last;
      ring_claim(m.work, done);
    }
    if ((threadIdx.x & 31) == 0) {
      if (!kWorkInPlace)
        work_of(done) = w;
      else if (last)
        w.last = true;
#if FA3_SPLITS
      if (!last) take_share(params, work_of(done), index % splits);
#endif
      barrier_arrive(ring_full(m.work, done));
    }
    __syncwarp();
    add_scales(done, last);
    ++done;
    if (last) break;
  }
}

// By every thread that has read it.
__device__ __forceinline__ void finish_work(const layout &m, uint32_t tile) {
  barrier_arrive(ring_empty(m.work, tile));
}

#endif
