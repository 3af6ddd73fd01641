// Keys dealt out evenly: the units of all sequences and row tiles in a row are cut into as many
// neighbouring parts as there are teams of blocks, wherever that falls. So every block has as much
// to do as any other, however far lengths are apart. A team has a block for each key head: they go
// through the same keys side by side, whose heads are neighbours in memory. To begin with a tile
// takes time too, so before its units come `piece_units` others that stand for nothing else. A tile
// of rows whose keys are several teams' has partial results, which combine.cu puts together.
#ifndef FA3_DECODE_DEAL_CUH
#define FA3_DECODE_DEAL_CUH

#include "decode_work.cuh"

// What is left of a team's part: units `unit` to `end` of all. Sequence `batch` has its first at
// `before`. In shared memory, so that it takes no registers meanwhile.
struct alignas(16) deal {
  int unit, end;
  int batch, before;
  int share;       // units of a team
  int team, head;  // the block's, found once
};

// Of a deal, and of a sum for each warp behind it.
__host__ __device__ constexpr int deal_bytes(int warps) {
  return sizeof(deal) + warps * 4;
}

// Of one sequence, each of its tiles: the units that any of its rows sees, one at least, so that
// some block says that there is nothing. And its tiles of rows, of a key head.
struct sequence_units {
  fa3_range units;
  int row_tiles;
  int all;  // units of all tiles
};

__device__ __forceinline__ sequence_units count_units(const fa3_decode_params &p,
                                                      const fa3_mask &mask) {
  sequence_units s;
  const int queries = max(mask.queries, 0);
  s.row_tiles = (queries * (int)p.group.divisor + kRows - 1) / kRows;
  s.units.begin = max(fa3_visible_keys(&mask, 0).begin, 0) / kUnitKeys;
  const int end = (fa3_visible_keys(&mask, mask.queries - 1).end + kUnitKeys - 1) / kUnitKeys;
  s.units.end = s.units.begin + min(max(end - s.units.begin, 1), p.most_units);
  s.all = (s.units.end - s.units.begin + p.piece_units) * s.row_tiles;
  return s;
}

__device__ __forceinline__ int units_of_sequence(const fa3_decode_params &p, int batch) {
  return count_units(p, fa3_find_sequence(&p.sequences, batch).mask).all;
}

// The team's part. All threads of the block come here, and see it behind the barrier.
template <int kWarpsOfBlock>
__device__ __forceinline__ void begin_deal(const fa3_decode_params &p, deal *d) {
  constexpr int kThreadsOfBlock = 32 * kWarpsOfBlock;
  int *const of_warps = (int *)(d + 1);
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  begin_grid(p);
  const int each = (p.batch + kThreadsOfBlock - 1) / kThreadsOfBlock;
  const int first = threadIdx.x * each;
  // As many turns in each thread: after a loop that some leave before others the assembler takes a
  // warp's threads to be apart (docs/notes/hopper-forward.md).
  int mine = 0;
  for (int i = 0; i < each; ++i)
    if (first + i < p.batch) mine += units_of_sequence(p, first + i);
  int before = mine;  // of threads up to this one
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += x;
  }
  if (lane == 31) of_warps[warp] = before;
  if (threadIdx.x == 0) *d = deal{0, 0, 0, 0, 1, 0, 0};
  if (threadIdx.x == 0 && p.begun != nullptr) p.begun[blockIdx.x].count = 0;
  __syncthreads();
  int all = 0;
  before -= mine;
#pragma unroll
  for (int i = 0; i < kWarpsOfBlock; ++i) {
    before += i < warp ? of_warps[i] : 0;
    all += of_warps[i];
  }
  const int teams = divide(gridDim.x, p.heads_k), share = (all + teams - 1) / teams;
  const int team = divide(blockIdx.x, p.heads_k), head = blockIdx.x - team * p.heads_k.divisor;
  const int unit = team * share;
  for (int i = 0; i < each; ++i) {
    const int b = first + i, units = b < p.batch ? units_of_sequence(p, b) : 0;
    if (unit >= before && unit < before + units)
      *d = deal{unit, min(unit + share, all), b, before, share, team, head};
    before += units;
  }
  __syncthreads();
}

// The next tile's part of what is left; no rows where there is none. By all threads alike, or by
// the first alone.
__device__ __forceinline__ void take_piece(const fa3_decode_params &p, deal &d, work &w) {
  w.rows = w.rank = 0;
  w.active = 1;  // nothing is sent
  w.share = FA3_DECODE_ROWS * kQuads;
  if (d.unit >= d.end) return;
  w.batch = d.batch;
  w.sequence = fa3_find_sequence(&p.sequences, w.batch);
  sequence_units s = count_units(p, w.sequence.mask);
  while (d.unit - d.before >= s.all) {
    d.before += s.all;
    w.batch = ++d.batch;
    w.sequence = fa3_find_sequence(&p.sequences, w.batch);
    s = count_units(p, w.sequence.mask);
  }
  const int units = s.units.end - s.units.begin, span = p.piece_units + units;
  const int tile = (d.unit - d.before) / span, first = d.unit - d.before - tile * span;
  const int count = min(span - first, d.end - d.unit);
  const int begin = max(first - p.piece_units, 0), end = first + count - p.piece_units;
  if (begin >= end) return;  // nothing but a beginning: it is left to the next block
  w.head = d.head;
  w.first_row = tile * kRows;
  find_rows(p, w);
  const fa3_range seen = units_of(w.seen);
  w.units.begin = max(s.units.begin + begin, seen.begin);
  w.units.end = min(s.units.begin + end, seen.end);
  const bool whole = begin == 0 && end == units;
  const int block = d.team * (int)p.heads_k.divisor + d.head;
  w.part = whole ? -1 : 2 * block + (begin == 0);
  if (begin == 0 && threadIdx.x == 0) {
    fa3_combine_parts parts = {0, 0};
    if (!whole) {
      parts.block = block;
      parts.count = (d.unit - first + span - 1) / d.share - d.team + 1;
    }
    // From query 0 on, for there is one tile of a sequence's rows then.
    if (p.begun != nullptr && !whole) p.begun[block] = {w.batch, w.head, 0, parts.count};
    if (p.parts != nullptr)
      p.parts[((int64_t)w.batch * p.heads_k.divisor + w.head) * p.row_tiles.divisor + tile] = parts;
  }
  d.unit += count;
}

// The same by all threads, with what is left in shared memory.
__device__ __forceinline__ work take_piece(const fa3_decode_params &p, deal *left) {
  deal d = *left;
  work w;
  take_piece(p, d, w);
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) *left = d;
  return w;
}

// Whether nothing follows what was taken last.
__device__ __forceinline__ bool deal_ends(const deal *d) {
  return d->unit >= d->end;
}

#endif
