// The forward kernel's loading warps where key and value are a cache in pages: one for K, one for
// V.
//
// The copy engine takes boxes of rows that are in one page: as many rows as divide both a page and
// a tile. Where that is too few, threads copy row by row. What lies beyond the sequence's end, or
// in a page that is not there, counts as zeros.
#ifndef FA3_FORWARD_PAGES_CUH
#define FA3_FORWARD_PAGES_CUH

#include "copy_async.cuh"
#include "forward_work.cuh"

// Where a row of a sequence is: its page, or -1, and its row there.
struct paged_row {
  int page, row;
};

// To be called early: the table is far away.
__device__ __forceinline__ paged_row find_paged_row(const fa3_forward_params &params, const work &w,
                                                    int in_sequence) {
  paged_row found = {-1, 0};
  if (in_sequence >= 0 && in_sequence < w.sequence.mask.keys) {
    const unsigned row = w.sequence.key_row + in_sequence, index = row / params.page_size;
    found.page = __ldg(fa3_find_page(&params.sequences, &w.sequence, index));
    found.row = row - index * params.page_size;
  }
  return found;
}

// Lane i has the place of box i of the tile. There is no page -1, nor one beyond the last: the copy
// engine writes zeros, and counts them.
template <int kTileChunks>
__device__ __forceinline__ void load_boxes(const fa3_forward_params &params, const work &w,
                                           const fa3_tensor_map &map, paged_row place, uint32_t to,
                                           barrier full, bool leader) {
  const int boxes = kTileK / params.box, head = w.key_head;
#pragma unroll 4
  for (int i = 0; i < boxes; ++i) {
    const int page = __shfl_sync(0xffffffff, place.page, i);
    const int row = __shfl_sync(0xffffffff, place.row, i);
    if (leader) {
#pragma unroll
      for (int c = 0; c < kTileChunks; ++c)
        tma_load_4d(to + (c * kTileK + i * params.box) * kRowBytes, &map, full.address, c * kChunk,
                    row, head, page);
    }
  }
}

// Of a tile that threads copy, lane i looks up rows i, i + 32 and so on: this many.
constexpr int kRowsOfLane = (kTileK + 31) / 32;

// Where a row begins in memory, or null.
__device__ __forceinline__ const uint16_t *find_address(const fa3_forward_params &params,
                                                        const work &w,
                                                        const fa3_paged_tensor &tensor,
                                                        int in_sequence) {
  const paged_row place = find_paged_row(params, w, in_sequence);
  if ((unsigned)place.page >= params.pages) return nullptr;
  return (const uint16_t *)tensor.data + place.page * tensor.stride_page +
         place.row * tensor.stride_row + w.key_head * tensor.stride_head;
}

// Each row is copied by a few lanes.
template <int kTileChunks>
__device__ __forceinline__ void copy_rows(const uint16_t *const (&from)[kRowsOfLane], int head_dim,
                                          uint32_t to) {
  constexpr int kAtOnce = 32 / kUnits;
  const int unit = (thread_again() & 31) % kUnits, first = (thread_again() & 31) / kUnits;
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
#pragma unroll
    for (int i = 0; i < 32 && j * 32 + i < kTileK; i += kAtOnce) {
      const uint16_t *x = (const uint16_t *)__shfl_sync(0xffffffff, (uint64_t)from[j], i + first);
#pragma unroll
      for (int c = 0; c < kTileChunks; ++c) {
        const int column = c * kChunk + unit * 8;
        copy_async(to + c * kTileK * kRowBytes + swizzled(j * 32 + i + first, unit), x + column,
                   x != nullptr && column < head_dim);
      }
    }
  }
}

template <bool kValues>
__device__ __forceinline__ auto key_ring(const layout &m) {
  if constexpr (kValues)
    return m.v;
  else
    return m.k;
}

// Of the two warps one says when the last keys are about to be loaded: what the scheduling warp
// does now is done when they are used.
template <bool kValues>
__device__ __forceinline__ void want_work(const fa3_forward_params &params, const layout &m,
                                          bool leader) {
  if (!kValues && params.next_tile != nullptr && leader) barrier_arrive(m.work_wanted);
}

template <bool kValues>
__device__ __forceinline__ void load_by_boxes(const fa3_forward_params &params, const layout &m) {
  constexpr int kTileChunks = kValues ? kChunksV : kChunks;
  const auto buffers = key_ring<kValues>(m);
  const bool leader = elect_one();
  uint32_t use = 0, landed = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    int n = w.tiles.end - 1;
    if (n < w.tiles.begin) want_work<kValues>(params, m, leader);
    const int of_lane = (thread_again() & 31) * params.box;
    paged_row place = find_paged_row(params, w, n * kTileK + of_lane);
    for (; n >= w.tiles.begin; --n, ++use) {
      if (n == w.tiles.begin) want_work<kValues>(params, m, leader);
      const uint32_t to = ring_tile(buffers, use);
      const barrier full = ring_full(buffers, use);
      ring_wait_empty(buffers, use);
      const int left = w.sequence.mask.keys - n * kTileK;
      const barrier landing = kValues && left < kTileK ? m.v_landed : full;
      if (leader) barrier_expect(landing, kValues ? kVBytes : kKBytes);
      __syncwarp();
      load_boxes<kTileChunks>(params, w, kValues ? params.value : params.key, place, to, landing,
                              leader);
      if (kValues && left < kTileK) {
        barrier_wait(m.v_landed, landed++);
        clear_rows<kTileChunks, kTileK, kRowBytes>(to, left);
        if (leader) barrier_arrive(full);
      }
      place = find_paged_row(params, w, (n - 1) * kTileK + (thread_again() & 31) * params.box);
      __syncwarp();
    }
    asm volatile("" : "+r"(t));  // the slot is looked up again, not kept
    finish_work(m, t);
  }
}

template <bool kValues>
__device__ __forceinline__ void load_by_threads(const fa3_forward_params &params, const layout &m) {
  constexpr int kTileChunks = kValues ? kChunksV : kChunks;
  const fa3_paged_tensor &tensor = kValues ? params.paged_value : params.paged_key;
  const auto buffers = key_ring<kValues>(m);
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    int n = w.tiles.end - 1;
    if (n < w.tiles.begin) want_work<kValues>(params, m, elect_one());
    const uint16_t *from[kRowsOfLane];
#pragma unroll
    for (int j = 0; j < kRowsOfLane; ++j)
      from[j] = find_address(params, w, tensor, n * kTileK + j * 32 + (thread_again() & 31));
    for (; n >= w.tiles.begin; --n, ++use) {
      if (n == w.tiles.begin) want_work<kValues>(params, m, elect_one());
      ring_wait_empty(buffers, use);
      copy_rows<kTileChunks>(from, tensor.head_dim, ring_tile(buffers, use));
#pragma unroll
      for (int j = 0; j < kRowsOfLane; ++j)
        from[j] =
            find_address(params, w, tensor, (n - 1) * kTileK + j * 32 + (thread_again() & 31));
      copy_async_wait_all();
      fence_proxy_async();
      __syncwarp();
      barrier_arrive_warp(ring_full(buffers, use));
    }
    asm volatile("" : "+r"(t));  // the slot is looked up again, not kept
    finish_work(m, t);
  }
}

template <bool kValues>
__device__ __forceinline__ void load_pages(const fa3_forward_params &params, const layout &m) {
  if (params.box > 0)
    load_by_boxes<kValues>(params, m);
  else
    load_by_threads<kValues>(params, m);
}

#endif
