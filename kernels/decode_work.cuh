// The decode kernel's sizes, and what a block has to do.
#ifndef FA3_DECODE_WORK_CUH
#define FA3_DECODE_WORK_CUH

#include "decode_params.h"
#include "divide.cuh"
#include "registers.cuh"

constexpr int kHeadDim = FA3_HEAD_DIM;  // of query, key, value and output
constexpr int kStages = FA3_STAGES;     // depth of a warp's ring

constexpr int kRows = FA3_TILE_Q;     // of a block
constexpr int kRowTiles = kRows / 8;  // that a product takes at once
#ifdef FA3_WARPS
constexpr int kWarps = FA3_WARPS;
#else
constexpr int kWarps = FA3_DECODE_WARPS;
#endif
constexpr int kLoadKeys = 16;  // that a warp loads, and a product takes, at once
// Of a step, which is a chain of waits: with two there are half as many.
#ifdef FA3_LOADS
constexpr int kLoads = FA3_LOADS;
#else
constexpr int kLoads = 1;
#endif
constexpr int kStepKeys = kLoads * kLoadKeys;  // of a warp
// Of keys, neighbours: a step has so many heads' rows. Each has its own 8 rows of the block, for
// the query heads of a sequence's one query.
#ifdef FA3_HEADS
constexpr int kHeads = FA3_HEADS;
#else
constexpr int kHeads = 1;
#endif
static_assert(kHeads == 1 || kHeads == kRowTiles, "8 rows each");
constexpr int kUnitKeys = FA3_TILE_K;
constexpr int kUnitWarps = kUnitKeys / kStepKeys;  // with more of them some take the next unit
constexpr int kBlockKeys = kWarps * kStepKeys;     // that the warps have in hand together
#if FA3_E4M3
constexpr int kElementBytes = 1;
constexpr int kScaleBytes = 2 * kLoadKeys * 4;  // of a head: its keys' scales, then its values'
#else
constexpr int kElementBytes = 2;
constexpr int kScaleBytes = 0;
#endif
constexpr int kRowBytes = kHeadDim * kElementBytes;  // in shared memory
constexpr int kTileBytes = kLoadKeys * kRowBytes;
constexpr int kValuesAt = kHeads * kTileBytes;  // of a load: keys, values, scales
constexpr int kScalesAt = 2 * kHeads * kTileBytes;
constexpr int kLoadBytes = kScalesAt + kHeads * kScaleBytes;
constexpr int kStageBytes = kLoads * kLoadBytes;
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kQuads = kHeadDim / 4;  // of four columns, of a row
// What the block does is kept in shared memory, where registers have no room for it meanwhile.
constexpr bool kKeptWork = FA3_DECODE_KEEPS_WORK(kHeadDim, kElementBytes);

extern __shared__ __align__(1024) unsigned char shared[];

// The least integer that is not below n / d, for n <= 2^22 and d > 0: no more units than a sequence
// can have. The product's error is less than 1 / d there, so `near` is n / d rounded down; or,
// where that is an integer, perhaps one less; or the integer that it comes close to from below.
__device__ __forceinline__ int quotient_up(int n, int d) {
  const int near = (int)((float)n * reciprocal_unit((float)d));
  return near + (near * d < n);
}

// What a block does: up to kRows rows, and a range of keys.
struct work {
  int batch, head;         // of keys; of several, which of such groups
  int part;                // the place of the result among partial ones; -1: it is whole
  int rank;                // of the block in its cluster
  int active;              // how many of the cluster's blocks have work
  int share;               // quads of columns that each of these puts together
  float share_reciprocal;  // by which it is found who has a quad
  int first_row, rows;
  fa3_sequence sequence;
  fa3_range seen;   // keys that any of the rows sees
  fa3_range units;  // of kUnitKeys keys, this block's
};

// This warp's steps of the block's units.
__device__ __forceinline__ int count_steps(const work &w) {
  constexpr int kTurns = kWarps > kUnitWarps ? kWarps / kUnitWarps : 1;
  const int units = w.units.end - w.units.begin;
  return kTurns == 1 ? units : (units + kTurns - 1 - (int)threadIdx.x / 32 / kUnitWarps) / kTurns;
}

// The units of some keys.
__device__ __forceinline__ fa3_range units_of(const fa3_range &keys) {
  return {keys.begin / kUnitKeys, (keys.end + kUnitKeys - 1) / kUnitKeys};
}

// From the first row on: how many there are, and the keys that they see.
__device__ __forceinline__ void find_rows(const fa3_decode_params &p, work &w) {
  const fa3_mask &mask = w.sequence.mask;
  w.rows = mask.queries <= p.most_queries
               ? min(kRows, mask.queries * (int)p.group.divisor - w.first_row)
               : 0;
  w.seen.begin = w.seen.end = 0;
  if (w.rows > 0) {
    w.seen.begin = fa3_visible_keys(&mask, divide(w.first_row, p.group)).begin;
    w.seen.end = fa3_visible_keys(&mask, divide(w.first_row + w.rows - 1, p.group)).end;
    w.seen.end = max(w.seen.end, w.seen.begin);
  }
}

// Where registers are full all of an append is awaited first, and keys are never dealt out.
constexpr bool kRegistersLeft = !kKeptWork;

// Whether an append may be under way when this block begins.
__device__ __forceinline__ bool begins_early(const fa3_decode_params &p) {
  return (int)blockIdx.x < p.early_blocks;
}

// Before anything is read, or written outside the block. Of an append under way all that is awaited
// is what it writes, later, where it is read: what came before it is there, for it let this kernel
// begin when it had awaited that. The fence keeps what the multiprocessor may still know of older
// contents away.
__device__ __forceinline__ void begin_grid(const fa3_decode_params &p) {
  if (kRegistersLeft && begins_early(p))
    fence_device();
  else
    wait_for_prior_grids();
}

// Before a step of keys is read: some of its rows may be appended just now.
__device__ __forceinline__ void await_append(const fa3_decode_params &p, const work &w, int key) {
  if (key + kStepKeys > w.sequence.mask.keys - p.appended) wait_for_prior_grids();
}

// `also`: lengths beside those of the sequences, or null; the sequence's is read together with
// them.
__device__ __forceinline__ work find_work(const fa3_decode_params &p, const int *also,
                                          int &also_of_sequence) {
  work w;
  const int tile = divide(blockIdx.x, p.splits), above = divide(tile, p.row_tiles);
  const int split = blockIdx.x - tile * p.splits.divisor;
  w.rank = split & (p.cluster - 1);
  w.part = p.partial != nullptr ? split >> (31 - __clz(p.cluster)) : -1;
  w.first_row = (tile - above * p.row_tiles.divisor) * kRows;
  w.batch = divide(above, p.heads_k);
  w.head = above - w.batch * p.heads_k.divisor;
  if (!p.lengths_known) begin_grid(p);  // else when it loads: what is before that takes a while
  if (also != nullptr) also_of_sequence = also[w.batch];

  w.sequence = fa3_find_sequence(&p.sequences, w.batch);
  find_rows(p, w);
  const fa3_range seen = units_of(w.seen);
  const int begin = p.split_units ? 0 : seen.begin;  // of the first split
  const int share =
      p.split_units ? p.split_units : divide(seen.end - begin + p.splits.divisor - 1, p.splits);
  w.units.begin = max(begin + split * share, seen.begin);
  w.units.end = min(begin + (split + 1) * share, seen.end);
  const int rest =
      seen.end - begin - (split - w.rank) * share;  // from the cluster's first split on
  w.active = rest > 0 ? min(quotient_up(rest, share), p.cluster) : 1;
  w.share = quotient_up(w.rows * kQuads, w.active);
  w.share_reciprocal = reciprocal_unit((float)w.share);
  return w;
}

__device__ __forceinline__ work find_work(const fa3_decode_params &p) {
  int nothing;
  return find_work(p, nullptr, nothing);
}

// Which of the cluster's blocks puts a quad together: quad / share. That is exact: with half a quad
// added a quotient is at least 0.5 / share away from any integer, far more than its error.
__device__ __forceinline__ int owner_of(const work &w, int quad) {
  return (int)(((float)quad + 0.5f) * w.share_reciprocal);
}

// A row of the block: which query and head it is.
struct row_place {
  int query;  // within the sequence
  int head;   // of all query heads
};

__device__ __forceinline__ row_place place_of_row(const fa3_decode_params &p, const work &w,
                                                  int row) {
  row_place place;
  place.query = divide(w.first_row + row, p.group);
  place.head = w.head * p.group.divisor + w.first_row + row - place.query * p.group.divisor;
  return place;
}

// The block's row that is number i of tile t's 8. Beyond the block's rows: there is none.
__device__ __forceinline__ int row_of_tile(const work &w, int t, int i) {
  if (kHeads == 1) return 8 * t + i;
  const int each = w.rows / kHeads;
  return i < each ? t * each + i : kRows;
}

#endif
