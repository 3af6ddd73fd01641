// Keys dealt out: the tiles of all sequences stand one behind the other, each as long as the keys
// that it sees, and are cut into shares of the same length. So no block waits for another one's
// long sequence. A share's first and last tile may be parts of one that others have the rest of:
// combine.cu puts these together.
#ifndef FA3_FORWARD_DEAL_CUH
#define FA3_FORWARD_DEAL_CUH

#include "forward_work.cuh"

// Only the variants with code for pages deal keys out, and those for unpacked codes.
__device__ __forceinline__ bool keys_are_dealt(const fa3_forward_params &params) {
  return FA3_SPLITS && params.deal.shares > 0;
}

#if FA3_SPLITS
// A share is so many units. A unit is a tile of keys, or stands for what a tile takes beside its
// keys. The tiles of a team lie side by side: blocks of rows of a head, which read the same keys,
// and neighbouring heads.
//
// What is left of a share is in shared memory: the scheduling warp has few registers.
struct deal {
  int unit, end;
  int batch, before;  // a sequence, and the units ahead of it
  int share;          // units of each
  int of_tile;        // units that a tile counts for at least
  // What was taken last.
  fa3_tile tile;
  int part;         // as work::part
  fa3_range tiles;  // of keys
};
static_assert(sizeof(deal) <= kDealBytes, "room for it");

__device__ __forceinline__ deal &deal_of_block(void) {
  constexpr layout from_shared = lay_out(0);
  return *(deal *)(shared + from_shared.deal);
}

// Of one sequence.
struct sequence_units {
  fa3_range keys;  // tiles of keys that any row sees: one at least, for a result that is nothing
  int blocks;      // of rows, of a head
  int tiles;       // of those of a team
  int of_tile;     // units
};

__device__ __forceinline__ sequence_units count_units(const fa3_forward_params &params, int batch) {
  const fa3_mask mask = fa3_find_sequence(&params.sequences, batch).mask;
  sequence_units s;
  s.keys = fa3_visible_tiles(&mask, 0, mask.queries, kTileK);
  s.keys.end = max(s.keys.end, s.keys.begin + 1);
  s.blocks = 0;
  if (mask.queries > params.few_queries)
    s.blocks = (mask.queries + params.tile_queries - 1) / params.tile_queries;
  s.tiles = s.blocks * params.tiles.heads / params.deal.team;
  s.of_tile = s.keys.end - s.keys.begin + FA3_FORWARD_TILE_UNITS;
  return s;
}

// The sum over lanes up to this one.
__device__ __forceinline__ int sum_before(int x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, x, step);
    if ((int)(threadIdx.x & 31) >= step) x += before;
  }
  return x;
}

// Finds the block's share. The whole warp comes here. To cut a tile costs some units: where it
// saves no more, all tiles count as much as the longest one, and none is cut.
__device__ __forceinline__ void begin_deal(const fa3_forward_params &params) {
  const int lane = threadIdx.x & 31, batches = params.tiles.batches;
  const int each = (batches + 31) / 32;
  const int first = lane * each, last = min(first + each, batches);
  int tiles = 0, units = 0, longest = 0;
  for (int b = first; b < last; ++b) {
    const sequence_units s = count_units(params, b);
    tiles += s.tiles;
    units += s.tiles * s.of_tile;
    if (s.tiles > 0) longest = max(longest, s.of_tile);
  }
  const int teams = params.deal.shares / params.deal.team;
  longest = __reduce_max_sync(0xffffffff, longest);
  int before = sum_before(units), all = __shfl_sync(0xffffffff, before, 31);
  int share = (all + teams - 1) / teams;
  const int tiles_before = sum_before(tiles), all_tiles = __shfl_sync(0xffffffff, tiles_before, 31);
  const int whole = (all_tiles + teams - 1) / teams * longest;
  const bool uncut = whole <= share + FA3_FORWARD_CUT_UNITS;
  if (uncut) {
    units = tiles * longest;
    before = tiles_before * longest;
    all = all_tiles * longest;
    share = whole;
  }
  before -= units;
  const int unit = min((int)blockIdx.x / params.deal.team * share, all);
  const unsigned begun = __ballot_sync(0xffffffff, units > 0 && before <= unit);
  if (lane == (begun ? 31 - __clz(begun) : 0)) {
    deal &d = deal_of_block();
    d.unit = unit;
    d.end = min(unit + share, all);
    d.batch = first;
    d.before = before;
    d.share = share;
    d.of_tile = uncut ? longest : 0;
    params.deal.begun[blockIdx.x].count = 0;
  }
  __syncwarp();
}

// Of the block's share, the next tile's part: false where there is none. A tile that goes on in the
// next shares is told to combine.cu by the one it begins in. By one thread.
__device__ __forceinline__ bool take_piece(const fa3_forward_params &params) {
  deal &d = deal_of_block();
  if (d.unit >= d.end) return false;
  sequence_units s;
  for (;; ++d.batch) {
    if (d.batch >= params.tiles.batches) return false;
    s = count_units(params, d.batch);
    s.of_tile = max(s.of_tile, d.of_tile);
    if (d.unit - d.before < s.tiles * s.of_tile) break;
    d.before += s.tiles * s.of_tile;
  }
  const int number = blockIdx.x, team = params.deal.team, extra = FA3_FORWARD_TILE_UNITS;
  const int index = (d.unit - d.before) / s.of_tile;
  const int start = d.before + index * s.of_tile;  // unit
  const int unit = d.unit, end = min(start + s.of_tile, d.end);
  const int begin = max(unit - start - extra, 0);
  d.unit = end;
  d.tiles.begin = s.keys.begin + begin;
  d.tiles.end = s.keys.begin + end - start - extra;
  if (d.tiles.begin >= d.tiles.end) return false;  // nothing but a beginning: for the next share
  const int in_sequence = index * team + number % team;
  d.tile.batch = d.batch;
  d.tile.head = in_sequence / s.blocks;
  d.tile.block = in_sequence - d.tile.head * s.blocks;
  d.part = kWhole;
  if (begin == 0 && end == start + s.of_tile) return true;
  const int query = d.tile.block * params.tile_queries;
  d.part =
      (params.tile_queries * (2 * number + (begin == 0)) - query - d.tile.head) * params.tile_heads;
  if (begin == 0)
    params.deal.begun[number] = {d.batch, d.tile.head, query,
                                 (start + s.of_tile - 1) / d.share - number / team + 1};
  return true;
}

__device__ __forceinline__ void schedule_deal(const fa3_forward_params &params, const layout &m) {
  begin_deal(params);
  if ((threadIdx.x & 31) != 0) return;
  const deal &d = deal_of_block();
  uint32_t done = 0;
  for (; take_piece(params); ++done) {
    work &w = work_of(done);
    ring_wait_empty(m.work, done);
    find_work(params, d.tile, w);
    w.part = d.part;
    limit_tiles(w, d.tiles);
    barrier_arrive(ring_full(m.work, done));
  }
  ring_wait_empty(m.work, done);
  work_of(done).last = true;
  barrier_arrive(ring_full(m.work, done));
}

#else
__device__ __forceinline__ void schedule_deal(const fa3_forward_params &, const layout &) {
}
#endif

#endif
