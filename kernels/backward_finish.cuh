// Where dQ is finished later: which slice of which block of queries a block of backward_finish
// takes, and when. A multiprocessor reads 45 bytes a nanosecond, so a block of queries is shared by
// several. Where such blocks are few, and each has many sums, slices are narrow: there are more.
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
  int slice;        // of the block
  int block, head;  // of queries
  int64_t slot;     // of its first sum
  fa3_sequence sequence;
  bool seen;  // by any tile
};

// Those that tiles come to first are taken first: the last, or the first where tiles go upwards.
__device__ __forceinline__ finished_block find_finished_block(const fa3_backward_params &p,
                                                              int slices, int tile_q, int tile_k) {
  const int number = blockIdx.x / slices, place = number / p.heads;
  const int last = gridDim.x / slices / p.heads - 1;
  finished_block at;
  at.slice = blockIdx.x % slices;
  at.block = p.tiles.upward > 0 ? place : last - place;
  at.head = number % p.heads;
  at.sequence = fa3_find_sequence(&p.sequences, blockIdx.y);
  at.slot = (int64_t)at.head * p.slots + at.block +
            fa3_backward_slot(&p.sequences, &p.blocks, blockIdx.y, at.sequence.query_row);
  const int row = at.block * tile_q;
  const fa3_range tiles = fa3_visible_tiles(&at.sequence.mask, row, row + tile_q, tile_k);
  at.seen = row < at.sequence.mask.queries && tiles.begin < tiles.end;
  return at;
}

// By all threads: until every tile has been counted `times` times. Returns a bit for each sum that
// any tile adds to.
__device__ __forceinline__ uint32_t wait_for_sums(const fa3_backward_params &p,
                                                  const finished_block &at, const int *counters,
                                                  int times, int tile_q, int tile_k) {
  static_assert(FA3_MOST_SUMS <= 32, "a lane waits for each sum");
  __shared__ uint32_t used;
  if (threadIdx.x < 32) {
    const int sum = threadIdx.x;
    int all = 0;
    if (sum < fa3_sum_count(&p.tiles))
      all =
          times * fa3_additions_to_sum(&p.tiles, &at.sequence.mask, at.block, sum, tile_q, tile_k);
    const int *counter = counters + at.slot + sum * p.sums_apart;
    while (all > 0 && load_acquire(counter) < all) __nanosleep(100);
    const uint32_t any = __ballot_sync(0xffffffff, all > 0);
    if (threadIdx.x == 0) used = any;
  }
  __syncthreads();
  return used;
}

// The total of those sums, of which the thread's part of the first is at `from` and that of the
// next one `apart` vectors behind it. kAtOnce of them are on their way together.
template <int kVectors, int kAtOnce>
__device__ __forceinline__ void add_up_sums(float (&total)[4 * kVectors], const float4 *from,
                                            int64_t apart, uint32_t used) {
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) total[i] = 0.0f;
#pragma unroll 1
  while (used != 0) {
    float4 x[kAtOnce][kVectors];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const float4 *sum = from + (__ffs(used) - 1) * apart;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) x[n][j] = load_relaxed_if(used != 0, sum + j * 128);
      used &= used - 1;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float4 &y = x[n][j];
        total[4 * j] += y.x, total[4 * j + 1] += y.y, total[4 * j + 2] += y.z;
        total[4 * j + 3] += y.w;
      }
    }
  }
}

// This grid is not to end before backward, so that whoever waits for it has all gradients. One
// block waits for backward: the others make room.
__device__ __forceinline__ void outlast_backward(void) {
  if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) wait_for_prior_grids();
}

// Takes a slice of a block's sums of dQ, and stores it: each backward kernel has its own.
template <bool kNarrow>
__device__ __forceinline__ void finish_slice(const fa3_backward_params &p);

extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_FINISH_THREADS, 5)
    backward_finish(const __grid_constant__ fa3_backward_params p) {
  let_next_grid_launch();
  finish_slice<false>(p);
  outlast_backward();
}

extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_FINISH_THREADS, 5)
    backward_finish_narrow(const __grid_constant__ fa3_backward_params p) {
  let_next_grid_launch();
  finish_slice<true>(p);
  outlast_backward();
}

#endif
