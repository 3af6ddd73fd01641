// Keys and values in pages, by the copy engine: boxes of rows that are in one page, as many rows as
// divide both a page and a tile. What lies beyond the sequence's end, or in a page that is not
// there, counts as zeros.
#ifndef FA3_FORWARD_PAGE_BOXES_CUH
#define FA3_FORWARD_PAGE_BOXES_CUH

#include "forward_load.cuh"
#include "forward_page_cursor.cuh"

// Where a row is: its page, or -1, and its row there.
struct paged_row {
  int page, row;
};

// What one of the warps has in hand.
struct box_loader {
  int part, boxes;  // so many boxes of a tile, each kPageLoaders-th from this on
  bool leader;      // the thread that talks to the copy engine
  int key_head;     // of its tile of queries
  uint32_t landed;  // tiles of V of which it has cleared rows
};

// The warp's boxes of a tile, of which `left` rows are the sequence's. Lane i has the place of the
// i-th. There is no page -1, nor one beyond the last: the copy engine writes zeros, and counts
// them.
template <bool kValues>
__device__ __forceinline__ void load_boxes(const fa3_forward_params &params, const layout &m,
                                           box_loader &loader, paged_row place, int left,
                                           uint32_t use) {
  constexpr int kTileChunks = kValues ? kChunksV : kChunks;
  const auto buffers = key_ring<kValues>(m);
  const int box_bytes = params.box * kRowBytes;
  uint32_t to = ring_tile(buffers, use) + loader.part * box_bytes;
  const barrier full = ring_full(buffers, use);
  const bool overrun = kValues && left < kTileK;
  const barrier landing = overrun ? m.v_landed : full;
  ring_wait_empty(buffers, use);
  if (loader.leader) barrier_expect(landing, loader.boxes * kTileChunks * box_bytes);
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < loader.boxes; ++i) {
    const int page = __shfl_sync(0xffffffff, place.page, i);
    const int row = __shfl_sync(0xffffffff, place.row, i);
    if (loader.leader) {
#pragma unroll
      for (int c = 0; c < kTileChunks; ++c)
        tma_load_4d(to + c * kTileK * kRowBytes, kValues ? &params.value : &params.key,
                    landing.address, c * kChunk, row, loader.key_head, page);
    }
    to += kPageLoaders * box_bytes;
  }
  __syncwarp();
  if (overrun) {
    barrier_wait(m.v_landed, loader.landed++);
    clear_rows<kTileChunks, kTileK, kRowBytes>(ring_tile(buffers, use), left);
    if (loader.leader) barrier_arrive(full);
  }
}

// Part `part` of every tile of K, of V, or of both; then tiles of V run one behind those of K, as
// the consumers use them, and part 1 loads Q.
template <bool kKeys, bool kValues>
__device__ __forceinline__ void load_pages_by_boxes(const fa3_forward_params &params,
                                                    const layout &m, int part) {
  constexpr bool kBoth = kKeys && kValues;
  const int page_size = params.page_size;
  const page_step tile = make_page_step(kTileK, page_size);
  const int boxes = (kTileK / params.box - part + kPageLoaders - 1) / kPageLoaders;
  box_loader loader = {part, boxes, elect_one(), 0, 0};
  uint32_t use_k = 0, use_v = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int begin = w.tiles.begin, end = w.tiles.end, keys = max(w.sequence.mask.keys, 0);
    const int *table = fa3_find_page(&params.sequences, &w.sequence, 0);
    const int row = (part + (threadIdx.x & 31) * kPageLoaders) * params.box;
    page_cursor cursor = find_cursor(page_size, w.sequence.key_row, max(end - 1, 0) * kTileK + row);
    paged_row place = {look_up(table, keys, cursor), cursor.row}, before;
    loader.key_head = w.key_head;
    for (int n = end - 1; n >= begin - 1; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (kKeys && n == min(begin, end - 1) && part == 0 && params.next_tile != nullptr &&
          loader.leader)
        barrier_arrive(m.work_wanted);
      if (kKeys && n >= begin) load_boxes<false>(params, m, loader, place, kTileK, use_k++);
      move_back(cursor, kTileK, tile, page_size);
      const paged_row next = {look_up(table, keys, cursor), cursor.row};
      if (kBoth && n == end - 1 && part == 1) load_queries_of(params, m, w, t, loader.leader);
      const int tile_v = kBoth ? n + 1 : n;
      if (kValues && tile_v >= begin && tile_v < end)
        load_boxes<true>(params, m, loader, kBoth ? before : place, keys - tile_v * kTileK,
                         use_v++);
      before = place;
      place = next;
      __syncwarp();
    }
    asm volatile("" : "+r"(t));  // the slot is looked up again, not kept
    finish_work(m, t);
  }
}

#endif
