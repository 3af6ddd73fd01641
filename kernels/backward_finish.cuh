// Where dQ is finished later: which block of queries a block of backward_finish takes, and when.
//
// backward_finish runs beside backward, on multiprocessors that have no tile left. All blocks of
// backward exist before its first one does, so it may wait for what they add. It finds counters
// that are clear, though only backward has waited for the grid that clears them: a block of
// backward that has a step lets backward_finish launch after that.
#ifndef FA3_BACKWARD_FINISH_CUH
#define FA3_BACKWARD_FINISH_CUH

#include "backward_params.h"
#include "counters.cuh"
#include "registers.cuh"

struct finished_block {
  int block, head;  // of queries
  int64_t slot;     // of its first sum
  fa3_sequence sequence;
  bool seen;  // by any tile
};

// Those that tiles come to first are taken first: the last, or the first where tiles go upwards.
__device__ __forceinline__ finished_block find_finished_block(const fa3_backward_params &p,
                                                              int tile_q, int tile_k) {
  const int place = blockIdx.x / p.heads, last = gridDim.x / p.heads - 1;
  finished_block at;
  at.block = p.tiles.upward > 0 ? place : last - place;
  at.head = blockIdx.x % p.heads;
  at.sequence = fa3_find_sequence(&p.sequences, blockIdx.y);
  at.slot = (int64_t)at.head * p.slots + at.block +
            fa3_backward_slot(&p.sequences, &p.blocks, blockIdx.y, at.sequence.query_row);
  const int row = at.block * tile_q;
  const fa3_range tiles = fa3_visible_tiles(&at.sequence.mask, row, row + tile_q, tile_k);
  at.seen = row < at.sequence.mask.queries && tiles.begin < tiles.end;
  return at;
}

__device__ __forceinline__ int additions_to_sum(const fa3_backward_params &p,
                                                const finished_block &at, int sum, int tile_q,
                                                int tile_k) {
  return fa3_additions_to_sum(&p.tiles, &at.sequence.mask, at.block, sum, tile_q, tile_k);
}

// By one warp, of which each lane waits for a sum: until every tile has been counted `times` times.
__device__ __forceinline__ void wait_for_sums(const fa3_backward_params &p,
                                              const finished_block &at, const int *counters,
                                              int times, int tile_q, int tile_k) {
  static_assert(FA3_MOST_SUMS <= 32, "a lane waits for each sum");
  const int sum = threadIdx.x & 31;
  if (sum < fa3_sum_count(&p.tiles)) {
    const int *counter = counters + at.slot + sum * p.sums_apart;
    const int all = times * additions_to_sum(p, at, sum, tile_q, tile_k);
    while (all > 0 && load_acquire(counter) < all) __nanosleep(100);
  }
  __syncwarp();
}

// This grid is not to end before backward, so that whoever waits for it has all gradients. One
// block waits for backward: the others make room.
__device__ __forceinline__ void outlast_backward(void) {
  if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) wait_for_prior_grids();
}

#endif
