// How the decode kernel's warps bring rows of queries, keys and values to shared memory: each warp
// its own, so that no warp waits for another. Four rows at a time, eight lanes along each; units of
// 16 bytes are swizzled as the copy engine would, so that matrices are read without bank conflicts.
#ifndef FA3_DECODE_LOAD_CUH
#define FA3_DECODE_LOAD_CUH

#include "decode_work.cuh"
#include "mma.cuh"

constexpr int kRowsOfLane = kStepKeys / 4;

// Where unit `unit` of a row is in a tile.
__device__ __forceinline__ uint32_t tile_offset(int row, int unit) {
  return row * kRowBytes + ((unit ^ (row & 7)) << 4);
}

// Where this lane's rows are, lane / 8 + 4j of a step: a page (or an entry of the batch) and the
// row in it. Page -1: there is no row.
struct lane_rows {
  int page[kRowsOfLane];
  int inside[kRowsOfLane];
};

// The lane's units of its rows, from unit lane % 8 on; zeros where there is no row.
__device__ __forceinline__ void load_rows(const fa3_decode_input &tensor, int head, int dim,
                                          const lane_rows &rows, uint32_t tile) {
  const int lane = threadIdx.x & 31, row = lane / 8, unit = lane & 7;
  const char *const base = tensor.data + ((uint64_t)head * tensor.stride_head + unit) * 16;
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
    const uint32_t page = max(rows.page[j], 0);
    const char *const from = base + ((uint64_t)page * tensor.stride_batch +
                                     (uint64_t)(uint32_t)rows.inside[j] * tensor.stride_row) *
                                        16;
    const uint32_t to = tile + tile_offset(row + 4 * (j & 1), unit) + j / 2 * 8 * kRowBytes;
#pragma unroll
    for (int h = 0; h < kHeadDim / 64; ++h)
      copy_async(to + h * 128, from + h * 128, rows.page[j] >= 0 && (unit + 8 * h) * 8 < dim);
  }
}

__device__ __forceinline__ void load_queries(const fa3_decode_params &p, const work &w,
                                             uint32_t tile) {
  lane_rows rows;
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
    const int row = (threadIdx.x & 31) / 8 + 4 * j;
    const row_place place = place_of_row(p, w, row);
    rows.page[j] = row < w.rows ? place.head : -1;
    rows.inside[j] = w.sequence.query_row + place.query;
  }
  // A head in the place of a page.
  fa3_decode_input query = p.query;
  query.stride_batch = p.query.stride_head;
  query.stride_head = p.query.stride_batch;
  load_rows(query, w.sequence.query_batch, p.head_dim, rows, tile);
}

// The rows of the step at `key`. A page that is not there is not read, nor is a row past the
// sequence's memory, whatever its length says.
__device__ __forceinline__ lane_rows find_cache_rows(const fa3_decode_params &p, const work &w,
                                                     int key) {
  lane_rows rows;
  key += (threadIdx.x & 31) / 8;
  if (p.sequences.page_table) {
    const int *const pages = fa3_find_page(&p.sequences, &w.sequence, 0);
#pragma unroll
    for (int j = 0; j < kRowsOfLane; ++j) {
      const int k = key + 4 * j, row = w.sequence.key_row + k, page = divide(row, p.page_size);
      const bool there = k >= w.seen.begin && k < w.seen.end && row < p.rows_k;
      rows.inside[j] = row - page * p.page_size.divisor;
      const int found = there ? __ldg(pages + page) : -1;
      rows.page[j] = found < p.pages ? found : -1;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRowsOfLane; ++j) {
      const int k = key + 4 * j, row = w.sequence.key_row + k;
      const bool there = k >= w.seen.begin && k < w.seen.end && row < p.rows_k;
      rows.page[j] = there ? w.sequence.key_batch : -1;
      rows.inside[j] = row;
    }
  }
  return rows;
}

// The keys and values of a step, as one group of copies.
__device__ __forceinline__ void load_step(const fa3_decode_params &p, const work &w,
                                          const lane_rows &rows, uint32_t stage) {
  load_rows(p.key, w.head, p.head_dim, rows, stage);
  load_rows(p.value, w.head, p.head_dim_v, rows, stage + kTileBytes);
}

#endif
