// The forward kernel's loading warps where key and value are a cache in pages. Three of them share
// each tile of K and of V, as a warp issues a copy in about 60 clocks, too slowly for small pages;
// or one loads K, and one V (kPageLoaders).
//
// The copy engine takes boxes of rows that are in one page: as many rows as divide both a page and
// a tile. Where that is too few, threads copy row by row. What lies beyond the sequence's end, or
// in a page that is not there, counts as zeros.
#ifndef FA3_FORWARD_PAGES_CUH
#define FA3_FORWARD_PAGES_CUH

#include "copy_async.cuh"
#include "forward_load.cuh"

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

// Threads copy rows in groups: those that a warp copies at a time.
constexpr int kGroupRows = 32 / kUnits;
constexpr int kMostGroups = (kTileK / kGroupRows + kPageLoaders - 1) / kPageLoaders;  // of a warp
// Of these groups' rows lane i looks up number i, i + 32 and so on.
constexpr int kRowsOfLane = (kMostGroups * kGroupRows + 31) / 32;

// What a warp needs to know of tile n: the places of its boxes, or of its rows.
template <bool kByThreads, int kPlaces>
__device__ __forceinline__ void look_up(const fa3_forward_params &params, const work &w, int part,
                                        int n, paged_row (&places)[kPlaces]) {
#pragma unroll
  for (int j = 0; j < kPlaces; ++j) {
    const int i = j * 32 + (thread_again() & 31);
    const int row = kByThreads
                        ? (part + i / kGroupRows * kPageLoaders) * kGroupRows + i % kGroupRows
                        : (part + i * kPageLoaders) * params.box;
    places[j] = find_paged_row(params, w, n * kTileK + row);
  }
}

// Where a row begins in memory, or null.
__device__ __forceinline__ const uint16_t *find_address(const fa3_forward_params &params,
                                                        const work &w,
                                                        const fa3_paged_tensor &tensor,
                                                        paged_row place) {
  if ((unsigned)place.page >= params.pages) return nullptr;
  return (const uint16_t *)tensor.data + place.page * tensor.stride_page +
         place.row * tensor.stride_row + w.key_head * tensor.stride_head;
}

template <bool kValues>
__device__ __forceinline__ auto key_ring(const layout &m) {
  if constexpr (kValues)
    return m.v;
  else
    return m.k;
}

// What one of the warps has in hand.
struct page_loader {
  bool keys, values;  // that it loads
  int part;           // of their boxes, or groups of rows, each kPageLoaders-th from this on
  int boxes;          // that makes so many boxes
  bool leader;        // the thread that talks to the copy engine
  uint32_t landed;    // tiles of V of which it has cleared rows
  barrier under_way;  // of the buffer that its threads' latest copies fill; at 0: none
};

// The copy engine loads the warp's boxes of tile n. Lane i has the place of the i-th. There is no
// page -1, nor one beyond the last: the copy engine writes zeros, and counts them.
template <bool kValues>
__device__ __forceinline__ void load_boxes(const fa3_forward_params &params, const layout &m,
                                           const work &w, page_loader &loader, paged_row place,
                                           int n, uint32_t use) {
  constexpr int kTileChunks = kValues ? kChunksV : kChunks;
  const auto buffers = key_ring<kValues>(m);
  const uint32_t to = ring_tile(buffers, use) + loader.part * params.box * kRowBytes;
  const barrier full = ring_full(buffers, use);
  const int head = w.key_head, left = w.sequence.mask.keys - n * kTileK;
  const bool overrun = kValues && left < kTileK;
  const barrier landing = overrun ? m.v_landed : full;
  ring_wait_empty(buffers, use);
  if (loader.leader) barrier_expect(landing, loader.boxes * params.box * kTileChunks * kRowBytes);
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < loader.boxes; ++i) {
    const int page = __shfl_sync(0xffffffff, place.page, i);
    const int row = __shfl_sync(0xffffffff, place.row, i);
    if (loader.leader) {
#pragma unroll
      for (int c = 0; c < kTileChunks; ++c)
        tma_load_4d(to + (c * kTileK + i * kPageLoaders * params.box) * kRowBytes,
                    kValues ? &params.value : &params.key, landing.address, c * kChunk, row, head,
                    page);
    }
  }
  __syncwarp();
  if (overrun) {
    barrier_wait(m.v_landed, loader.landed++);
    clear_rows<kTileChunks, kTileK, kRowBytes>(ring_tile(buffers, use), left);
    if (loader.leader) barrier_arrive(full);
  }
}

// The consumers hear of what threads have copied, but for the latest kPending buffers.
template <int kPending>
__device__ __forceinline__ void report_copies(page_loader &loader) {
  if (loader.under_way.address == 0) return;
  copy_async_wait<kPending>();
  fence_proxy_async();
  __syncwarp();
  barrier_arrive_warp(loader.under_way);
  loader.under_way = {0};
}

// The warp's threads load its groups of rows of a tile: a few lanes copy each row. Copies of a
// buffer land while those of the next one are made.
template <bool kValues>
__device__ __forceinline__ void load_rows(const fa3_forward_params &params, const layout &m,
                                          const work &w, page_loader &loader,
                                          const paged_row (&places)[kRowsOfLane], uint32_t use) {
  constexpr int kTileChunks = kValues ? kChunksV : kChunks;
  const auto buffers = key_ring<kValues>(m);
  const fa3_paged_tensor &tensor = kValues ? params.paged_value : params.paged_key;
  const int unit = (thread_again() & 31) % kUnits, in_group = (thread_again() & 31) / kUnits;
  const uint32_t to = ring_tile(buffers, use);
  // Consumers may wait for the buffer before until they free this one.
  if (ring_is_taken(buffers, use)) report_copies<0>(loader);
  ring_wait_empty(buffers, use);
#pragma unroll
  for (int j = 0; j < kRowsOfLane; ++j) {
    const uint16_t *from = find_address(params, w, tensor, places[j]);
#pragma unroll
    for (int i = 0; i < 32 && j * 32 + i < kMostGroups * kGroupRows; i += kGroupRows) {
      const int row =
          (loader.part + (j * 32 + i) / kGroupRows * kPageLoaders) * kGroupRows + in_group;
      const uint16_t *x = (const uint16_t *)__shfl_sync(0xffffffff, (uint64_t)from, i + in_group);
      if (row >= kTileK) continue;
#pragma unroll
      for (int c = 0; c < kTileChunks; ++c) {
        const int column = c * kChunk + unit * 8;
        copy_async(to + c * kTileK * kRowBytes + swizzled(row, unit), x + column,
                   x != nullptr && column < tensor.head_dim);
      }
    }
  }
  copy_async_commit();
  report_copies<1>(loader);
  loader.under_way = ring_full(buffers, use);
}

// Where a warp loads both, tiles of V run one behind those of K, as the consumers use them.
template <bool kByThreads>
__device__ __forceinline__ void load_pages_by(const fa3_forward_params &params, const layout &m,
                                              int warp) {
  constexpr bool kShared = kPageLoaders > 1;
  constexpr int kPlaces = kByThreads ? kRowsOfLane : 1;
  const int part = kShared ? min(warp, 2) : 0, step = kPageLoaders * params.box;
  const int boxes = kByThreads ? 0 : max(kTileK - part * params.box + step - 1, 0) / step;
  page_loader loader = {
      kShared || warp == 0, kShared || warp > 0, part, boxes, elect_one(), 0, {0}};
  uint32_t use_k = 0, use_v = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int begin = w.tiles.begin, end = w.tiles.end;
    paged_row places[kPlaces], before[kPlaces], next[kPlaces];
    look_up<kByThreads>(params, w, part, end - 1, places);
    for (int n = end - 1; n >= begin - 1; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (n == min(begin, end - 1) && warp == 0 && params.next_tile != nullptr && loader.leader)
        barrier_arrive(m.work_wanted);
      if (n >= begin && loader.keys) {
        if constexpr (kByThreads)
          load_rows<false>(params, m, w, loader, places, use_k);
        else
          load_boxes<false>(params, m, w, loader, places[0], n, use_k);
        ++use_k;
      }
      look_up<kByThreads>(params, w, part, n - 1, next);
      if (kShared && n == end - 1 && part == 1) load_queries_of(params, m, w, t, loader.leader);
      const int tile_v = kShared ? n + 1 : n;
      if (loader.values && tile_v >= begin && tile_v < end) {
        if constexpr (kByThreads)
          load_rows<true>(params, m, w, loader, kShared ? before : places, use_v);
        else
          load_boxes<true>(params, m, w, loader, kShared ? before[0] : places[0], tile_v, use_v);
        ++use_v;
      }
#pragma unroll
      for (int j = 0; j < kPlaces; ++j) {
        before[j] = places[j];
        places[j] = next[j];
      }
      __syncwarp();
    }
    if (kByThreads) report_copies<0>(loader);
    asm volatile("" : "+r"(t));  // the slot is looked up again, not kept
    finish_work(m, t);
  }
}

// For warps 0, 1 and 3. Warp 1 loads Q, and its part of K and V.
__device__ __forceinline__ void load_pages(const fa3_forward_params &params, const layout &m,
                                           int warp) {
  if (kPageLoaders == 1 && warp == 1)
    load_queries(params, m);
  else if (params.box > 0)
    load_pages_by<false>(params, m, warp);
  else
    load_pages_by<true>(params, m, warp);
}

#endif
