// How the decode kernels' warps bring rows of queries, keys and values to shared memory: each warp
// its own, so that no warp waits for another. Up to eight lanes copy a row; units of 16 bytes are
// swizzled, so that matrices are read without bank conflicts.
#ifndef FA3_DECODE_LOAD_CUH
#define FA3_DECODE_LOAD_CUH

#include "copy_async.cuh"
#include "decode_work.cuh"
#include "mma.cuh"

constexpr int kRowUnits = kRowBytes / 16;
constexpr int kLanesOfRow = kRowUnits < 8 ? kRowUnits : 8;
constexpr int kRowsAtOnce = 32 / kLanesOfRow;
constexpr int kRowsOfLane = kLoadKeys / kRowsAtOnce;
constexpr int kUnitElements = 16 / kElementBytes;

// Where unit `unit` of a row is in a tile. Of two neighbouring rows one has its first four units
// where the other has the next four: eight lanes may read four of each.
__device__ __forceinline__ uint32_t tile_offset(int row, int unit) {
  const int turn = (row >> 1 & 3) | (kRowUnits < 8 ? 0 : (row & 1) << 2);
  return row * kRowBytes + ((unit ^ turn) << 4);
}

// Where a row is: a page (or an entry of the batch) and the row in it. Page -1: there is no row.
struct place {
  int page, row;
};

// Of a load: this lane's rows, lane / kLanesOfRow + kRowsAtOnce j.
struct lane_rows {
  place rows[kRowsOfLane];
};

// Of the row number j of a lane, in so many neighbouring heads: the lane's units, from its first
// one at `from` on; zeros if the row is not `there`. `row` and `unit`: the lane's first.
template <int kCount>
__device__ __forceinline__ void load_row(const fa3_decode_input &tensor, const char *from, int dim,
                                         int row, int unit, int j, bool there, uint32_t tile) {
  const int near = kRowsAtOnce * j % 8;  // the swizzle is the same 8 rows on
  const uint32_t to = tile + tile_offset(row + near, unit) + (kRowsAtOnce * j - near) * kRowBytes;
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int h = 0; h < kRowUnits / kLanesOfRow; ++h)
      copy_async(to + n * kTileBytes + h * 128,
                 from + (n > 0 ? n * (uint64_t)tensor.stride_head * 16 : 0) + h * 128,
                 there && (unit + 8 * h) * kUnitElements < dim);
}

// The lane's units of its rows, from unit lane % kLanesOfRow on, of so many neighbouring heads;
// zeros where there is no row.
template <int kCount>
__device__ __forceinline__ void load_rows(const fa3_decode_input &tensor, int head, int dim,
                                          const lane_rows &places, uint32_t tile) {
  const int lane = threadIdx.x & 31, row = lane / kLanesOfRow, unit = lane % kLanesOfRow;
  const char *const base = tensor.data + ((uint64_t)head * tensor.stride_head + unit) * 16;
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
    const place at = places.rows[j];
    const uint32_t page = max(at.page, 0);
    const char *const from = base + ((uint64_t)page * tensor.stride_batch +
                                     (uint64_t)(uint32_t)at.row * tensor.stride_row) *
                                        16;
    load_row<kCount>(tensor, from, dim, row, unit, j, at.page >= 0, tile);
  }
}

// The same of neighbouring rows that are all there, from `first` on: only the first address has to
// be multiplied out.
template <int kCount>
__device__ __forceinline__ void load_near_rows(const fa3_decode_input &tensor, int head, int dim,
                                               const place &first, uint32_t tile) {
  const int lane = threadIdx.x & 31, row = lane / kLanesOfRow, unit = lane % kLanesOfRow;
  const char *from = tensor.data + ((uint64_t)head * tensor.stride_head + unit +
                                    (uint64_t)(uint32_t)first.page * tensor.stride_batch +
                                    (uint64_t)(uint32_t)(first.row + row) * tensor.stride_row) *
                                       16;
  const uint64_t step = (uint64_t)tensor.stride_row * (16 * kRowsAtOnce);
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
    load_row<kCount>(tensor, from, dim, row, unit, j, true, tile);
    from += step;
  }
}

// The places of some keys, `step` apart. A page that is not there is not read, nor is a row outside
// the sequence's memory, whatever its length says.
template <int kCount>
__device__ __forceinline__ void find_places(const fa3_decode_params &p, const work &w, int key,
                                            int step, place (&places)[kCount]) {
  if (p.sequences.page_table) {
    const int *const pages = fa3_find_page(&p.sequences, &w.sequence, 0);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int k = key + step * j, row = w.sequence.key_row + k, page = divide(row, p.page_size);
      const bool there = k >= w.seen.begin && k < w.seen.end && (unsigned)row < (unsigned)p.rows_k;
      const int found = there ? __ldg(pages + page) : -1;
      places[j] = {found < p.pages ? found : -1, row - page * (int)p.page_size.divisor};
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int k = key + step * j, row = w.sequence.key_row + k;
      const bool there = k >= w.seen.begin && k < w.seen.end && (unsigned)row < (unsigned)p.rows_k;
      places[j] = {there && w.sequence.key_batch < p.pages ? w.sequence.key_batch : -1, row};
    }
  }
}

// The keys and values at those places.
__device__ __forceinline__ void load_keys(const fa3_decode_params &p, const work &w,
                                          const lane_rows &places, uint32_t stage) {
  load_rows<kHeads>(p.key, w.head * kHeads, p.head_dim, places, stage);
  load_rows<kHeads>(p.value, w.head * kHeads, p.head_dim_v, places, stage + kValuesAt);
}

// Those of kLoadKeys neighbours from `key` on. The answer is where number lane % 16 of them is, if
// it is asked for.
__device__ __forceinline__ place load_neighbours(const fa3_decode_params &p, const work &w, int key,
                                                 uint32_t stage) {
  const int lane_row = (threadIdx.x & 31) / kLanesOfRow, number = threadIdx.x & 15;
  lane_rows places;
  // Most loads' rows are neighbours: of one page, and all of them there.
  const int row = w.sequence.key_row + key, page = divide(row, p.page_size);
  const int first = row - page * (int)p.page_size.divisor;
  if (key >= w.seen.begin && key + kLoadKeys <= w.seen.end && row >= 0 &&
      row + kLoadKeys <= p.rows_k && first + kLoadKeys <= (int)p.page_size.divisor) {
    const int found = p.sequences.page_table ? __ldg(fa3_find_page(&p.sequences, &w.sequence, page))
                                             : w.sequence.key_batch;
    if ((unsigned)found < (unsigned)p.pages) {
      load_near_rows<kHeads>(p.key, w.head * kHeads, p.head_dim, {found, first}, stage);
      load_near_rows<kHeads>(p.value, w.head * kHeads, p.head_dim_v, {found, first},
                             stage + kValuesAt);
      return {found, first + number};
    }
  }
  find_places(p, w, key + lane_row, kRowsAtOnce, places.rows);
  load_keys(p, w, places, stage);
  place one[1];
  find_places(p, w, key + number, 0, one);
  return one[0];
}

// Lengths, and of the page table the row with the block's number, on their way to the L2 cache
// before what was queued earlier is awaited. A block that begins early awaits nothing.
__device__ __forceinline__ void prefetch_sequences(const fa3_decode_params &p) {
  const fa3_sequences &all = p.sequences;
  const int row = blockIdx.x, entry = 32 * threadIdx.x;
  if (row >= p.batch || begins_early(p)) return;
  if (all.used_k != nullptr && row == 0 && entry < p.batch) prefetch_line(all.used_k + entry);
  if (all.page_table != nullptr && entry * (int64_t)p.page_size.divisor < all.seqlen_k)
    prefetch_line(all.page_table + row * all.page_table_stride + entry);
}

// The block's first keys and values, as many as its rings hold, on their way to the L2 cache:
// before what was queued earlier is awaited, which may still write them. The copies that follow
// read what is there then, for other multiprocessors write to that cache. A page table may be
// written meanwhile too, and is not read.
__device__ __forceinline__ void prefetch_keys(const fa3_decode_params &p, const work &w) {
  if (!p.lengths_known || p.sequences.page_table) return;
  const int lane = threadIdx.x & 31, steps = count_steps(w);
  const int key = w.units.begin * kUnitKeys + threadIdx.x / 32 * kStepKeys + lane % kLoadKeys;
  const fa3_decode_input &tensor = lane < kLoadKeys ? p.key : p.value;
  const int bytes = (lane < kLoadKeys ? p.head_dim : p.head_dim_v) * kElementBytes;
#pragma unroll
  for (int i = 0; i < kLoads * (kStages - 1); ++i) {
    const int k = key + i / kLoads * kBlockKeys + i % kLoads * kLoadKeys;
    const int row = w.sequence.key_row + k;
    if (i / kLoads >= steps || k < w.seen.begin || k >= w.seen.end || row >= p.rows_k) continue;
    const char *const from =
        tensor.data + ((uint64_t)(w.head * kHeads) * tensor.stride_head +
                       (uint64_t)(uint32_t)w.sequence.key_batch * tensor.stride_batch +
                       (uint64_t)(uint32_t)row * tensor.stride_row) *
                          16;
#pragma unroll
    for (int n = 0; n < kHeads; ++n)
#pragma unroll
      for (int at = 0; at < kRowBytes; at += 128)
        if (at < bytes) prefetch_line(from + n * (uint64_t)tensor.stride_head * 16 + at);
  }
}

#endif
