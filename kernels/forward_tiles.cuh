// The tiles of a forward kernel, and the warp that plans them. Who includes it has kWarpgroups,
// kTileK, kWorkBytes and `layout` with the rings of work.
#ifndef FA3_FORWARD_TILES_CUH
#define FA3_FORWARD_TILES_CUH

#include "forward_params.h"
#include "registers.cuh"
#include "ring.cuh"

extern __shared__ __align__(1024) unsigned char shared[];

// For the host to give out: each is zero whenever nobody uses it.
extern "C" {
__device__ unsigned tile_counters[FA3_TILE_COUNTERS];
}

// One output tile of this block: which rows, and which tiles of keys it needs.
// The scheduling warp leaves it in shared memory for the others.
struct __align__(16) work {
  struct {
    fa3_range tiles;  // of keys, that its rows see
    fa3_range whole;  // those of them that all its rows see entirely
  } warpgroup[kWarpgroups];
  fa3_sequence sequence;
#if FA3_E4M3
  int batch;  // the sequence's number, for its scales
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

// Which of a warpgroup's queries is in this row of its tile.
__device__ __forceinline__ int query_of_row(const fa3_forward_params &params, int row) {
  return row * params.tile_heads_inverse >> 16;
}

// Which query head.
__device__ __forceinline__ int head_of_row(const fa3_forward_params &params, const work &w,
                                           int row) {
  return w.head * params.tile_heads + row - query_of_row(params, row) * params.tile_heads;
}

__device__ __forceinline__ work find_work(const fa3_forward_params &params, int index) {
  const fa3_tile tile = fa3_tile_at(&params.tiles, index);
  work w;
#if FA3_E4M3
  w.batch = tile.batch;
#endif
  w.head = tile.head;
  w.key_head = params.tile_heads == 1 ? tile.head / params.group : tile.head;
  w.sequence = fa3_find_sequence(&params.sequences, tile.batch);
  fa3_mask *mask = &w.sequence.mask;
  const int step = params.queries_per_warpgroup;
  w.first = tile.block * params.tile_queries;
  // For now: a tile without rows, or of another kernel's sequence.
  w.last = w.first >= mask->queries || mask->queries <= params.few_queries;
  // Behind the tile's own queries the sequence ends, for consumers that have none of them.
  mask->queries = min(mask->queries, w.first + params.tile_queries);
  w.tiles = fa3_visible_tiles(mask, w.first, w.first + kWarpgroups * step, kTileK);
  for (int i = 0; i < kWarpgroups; ++i) {
    const int begin = w.first + i * step;
    const fa3_range common = fa3_common_keys(mask, begin, begin + step);
    w.warpgroup[i].tiles = fa3_visible_tiles(mask, begin, begin + step, kTileK);
    w.warpgroup[i].whole.begin = (common.begin + kTileK - 1) / kTileK;
    w.warpgroup[i].whole.end = common.end / kTileK;
  }
  return w;
}

__device__ __forceinline__ void schedule(const fa3_forward_params &params, const layout &m) {
  const int workers = gridDim.x;
  const int total = fa3_tile_count(&params.tiles);
  uint32_t done = 0;
  for (int round = 0;; ++round) {
    // Not always the same tiles of a head, of which the last may be shorter.
    int index = round * workers + (blockIdx.x + round) % workers;
    if (params.next_tile != nullptr && round > 0) {
      // A tile that is taken early waits here while others run dry.
      if (done > 0) barrier_wait(m.work_wanted, done - 1);
      if ((threadIdx.x & 31) == 0) {
        const int taken = atomicAdd(params.next_tile, 1);
        // Workers, fewer than tiles, begin with a tile each; the other tiles are asked for, and
        // each worker asks once more, in vain: `total` questions. The last leaves the counter as
        // the launch found it, for the stream's next.
        if (taken == total - 1) *params.next_tile = 0;
        index = workers + taken;
      }
      index = __shfl_sync(0xffffffff, index, 0);
    }
    const bool last = index >= total;
    work w;
    if (!last) {
      w = find_work(params, index);
      if (w.last) continue;
    }
    w.last = last;
    ring_wait_empty(m.work, done);
    if ((threadIdx.x & 31) == 0) {
      work_of(done) = w;
      barrier_arrive(ring_full(m.work, done));
    }
    __syncwarp();
    ++done;
    if (last) break;
  }
}

// By every thread that has read it.
__device__ __forceinline__ void finish_work(const layout &m, uint32_t tile) {
  barrier_arrive(ring_empty(m.work, tile));
}

#endif
