// One part of a tile of keys, for both backward kernels.
#ifndef FA3_BACKWARD_TILE_CUH
#define FA3_BACKWARD_TILE_CUH

#include "backward_params.h"

// Not an instruction: what is in memory is read again, instead of being kept in registers that are
// few.
__device__ __forceinline__ void forget_memory(void) {
  asm volatile("" ::: "memory");
}

// What a block, or a pair of blocks, does at a time. The scheduling warp leaves it in shared memory
// for the others.
struct __align__(16) work {
  int head;                 // of keys
  int tile;                 // its place among the head's
  int first;                // its first key, or that of this block of a pair
  int head_part, row_part;  // as of fa3_key_tile
  int batch;
  int query_head, heads;  // the first query head, and how many
  int steps;              // blocks of queries, of all these heads
  fa3_sequence sequence;
  int slot;             // of its first block of queries
  fa3_range blocks;     // of queries
  fa3_range whole[2];   // those that see all keys of a warpgroup, or of this block of a pair
  int start, step;      // the block that is visited first, and from one to the next
  int upward;           // tiles of this head that go upwards
  fa3_stagger stagger;  // where tiles are staggered
  int last;             // no tile: the work is done
};
constexpr int kWorkBytes = 128;
static_assert(sizeof(work) <= kWorkBytes, "a work slot");

// The number of the next tile, or of none. Without a counter each block, or pair of blocks, has
// one tile, of its own number: they begin in the order of their numbers, so those that it may wait
// for have begun.
__device__ __forceinline__ int take_tile(const fa3_backward_params &p, int of_block, bool first) {
  if (p.next_tile) return atomicAdd(p.next_tile, 1);
  return first ? of_block : fa3_key_tile_count(&p.tiles);
}

// The part's number, counted over all heads of keys.
__device__ __forceinline__ int number_of_part(const fa3_backward_params &p, const work &w) {
  return (w.head * p.tiles.head_parts + w.head_part) * p.tiles.row_parts + w.row_part;
}

// The packed sequences by their queries, the most first: by a whole warp, which leaves them in
// shared memory.
__device__ __forceinline__ void sort_sequences(const fa3_backward_params &p, uint8_t *order) {
  const int lane = threadIdx.x & 31;
  const bool exists = lane < p.tiles.batches;
  const int *starts = p.sequences.cu_seqlens_q;
  const int queries = exists ? starts[lane + 1] - starts[lane] : 0;
  int before = 0;
  for (int other = 0; other < p.tiles.batches; ++other) {
    const int its = __shfl_sync(0xffffffff, queries, other);
    before += its > queries || (its == queries && other < lane);
  }
  if (exists) order[before] = (uint8_t)lane;
  __syncwarp();
}

// Whether there are keys in this tile, and so work to do. For one thread of a warp that has few
// registers. `order` is that of sort_sequences, or null.
__device__ __forceinline__ bool find_work(const fa3_backward_params &p, int index, int tile_q,
                                          int tile_k, const uint8_t *order, work &w) {
  fa3_key_tile tile = fa3_key_tile_at(&p.tiles, index);
  if (order && p.tiles.longest_first) tile.batch = order[tile.batch];
  w.head = tile.head;
  w.head_part = tile.head_part;
  w.row_part = tile.row_part;
  w.batch = tile.batch;
  w.tile = tile.tile;
  w.upward = tile.upward;
  const int head = fa3_divide(p.queries_per_key * tile.head_part, p.tiles.head_parts);
  w.heads = fa3_divide(p.queries_per_key * (tile.head_part + 1), p.tiles.head_parts) - head;
  w.query_head = tile.head * p.queries_per_key + head;
  forget_memory();
  w.sequence = fa3_find_sequence(&p.sequences, tile.batch);
  forget_memory();
  w.slot = fa3_backward_slot(&p.sequences, &p.blocks, tile.batch, w.sequence.query_row);
  forget_memory();
  if (w.tile * tile_k >= w.sequence.mask.keys) return false;
  w.blocks = fa3_blocks_of_part(&p.tiles, &tile, &w.sequence.mask, tile_q, tile_k);
  forget_memory();
  const bool upward = w.tile < w.upward;
  w.start = upward ? w.blocks.begin : w.blocks.end - 1;
  w.step = upward ? 1 : -1;
  const int blocks = w.blocks.end - w.blocks.begin;
  if (p.tiles.staggered && blocks > 0) {
    w.stagger = fa3_find_stagger(&p.tiles, blocks, w.tile);
    w.start = fa3_staggered_start(&p.tiles, blocks, w.stagger.place);
  }
  w.steps = blocks > 0 ? blocks * w.heads : 0;
  return true;
}

// A step of a tile: a block of queries of a head.
struct query_step {
  int block, head;
};

__device__ __forceinline__ query_step first_step(const work &w) {
  return {w.start, w.query_head};
}

// kByHead: the tile is done with a query head of its group before it takes the next. Else all heads
// take a block of queries before the next block: tiles of the same keys' head keep their distance,
// where they would meet again at the last block of the next head. In a window they don't meet.
template <bool kByHead>
__device__ __forceinline__ void next_step(const work &w, query_step &step) {
  if (kByHead) {
    step.block += w.step;
    if (step.block >= w.blocks.begin && step.block < w.blocks.end) return;
    step.block = w.start;
    ++step.head;
  } else {
    if (++step.head < w.query_head + w.heads) return;
    step.head = w.query_head;
    step.block = fa3_next_block(w.blocks, step.block, w.step);
  }
}

// When the tile adds to a step's block of dQ, and whether it then stores it. kUpward: tiles may go
// upwards, or be staggered.
template <bool kUpward>
__device__ __forceinline__ fa3_turn find_turn(const fa3_backward_params &p, const work &w,
                                              int block, int tile_q, int tile_k) {
  if (kUpward && p.tiles.staggered)
    return fa3_find_staggered_turn(&p.tiles, w.stagger, w.tile, block);
  fa3_key_tiles tiles = {};
  tiles.sums_log2 = p.tiles.sums_log2;
  fa3_turn turn = fa3_find_turn(&tiles, kUpward ? w.upward : 0, &w.sequence.mask, w.tile, block,
                                tile_q, tile_k);
  if (p.finished_later) turn.last = 0;
  return turn;
}

// The number of the sum that it adds to.
__device__ __forceinline__ int64_t slot_of_sum(const fa3_backward_params &p, const work &w,
                                               const query_step &step, int sum) {
  return (int64_t)(sum * p.heads + step.head) * p.slots + w.slot + step.block;
}

// The blocks whose queries see all the keys first <= j < last.
__device__ __forceinline__ fa3_range find_whole(const work &w, int first, int last, int tile_q) {
  const fa3_mask &mask = w.sequence.mask;
  const fa3_range common = fa3_common_queries(&mask, first, last);
  fa3_range whole;
  whole.begin = (common.begin + tile_q - 1) / tile_q;
  // What follows the last query takes no part anyway.
  whole.end = last > mask.keys             ? 0
              : common.end >= mask.queries ? w.blocks.end
                                           : common.end / tile_q;
  return whole;
}

#endif
