// Keys and values in pages of few rows, or in pages where a tile begins anywhere: row by row, by
// the threads of two warps. A third hears when copies have landed and tells the consumers; who has
// copies under way would wait for them at the fence.
#ifndef FA3_FORWARD_PAGE_ROWS_CUH
#define FA3_FORWARD_PAGE_ROWS_CUH

#include "copy_async.cuh"
#include "forward_load.cuh"
#include "forward_page_cursor.cuh"

// A warp copies a group of rows at a time, each by kUnits lanes, and of a tile every kRowLoaders-th
// group. Of a row's lanes each looks up the page of every kUnits-th of the warp's rows there.
constexpr int kGroupRows = 32 / kUnits;
constexpr int kGroups = kTileK / kGroupRows / kRowLoaders;
constexpr int kRowsOfLane = (kGroups + kUnits - 1) / kUnits;
constexpr int kLaneRows = 32 * kRowLoaders;  // from one of a lane's rows to the next
static_assert(kTileK % (kGroupRows * kRowLoaders) == 0, "groups of rows");

// A lane's rows of a tile of keys: their pages, or -1, and where the first is in its page.
struct row_places {
  int page[kRowsOfLane], row;
};

// What one of the warps has in hand.
struct row_loader {
  int part;             // of a tile's groups
  page_step lane_rows;  // from one of a lane's rows to the next
  int key_head;         // of its tile of queries
};

__device__ __forceinline__ row_places look_up_rows(const fa3_forward_params &params,
                                                   const row_loader &loader, const int *table,
                                                   int keys, page_cursor cursor) {
  row_places places;
  places.row = cursor.row;
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    places.page[i] = look_up(table, keys, cursor);
    move_forward(cursor, kLaneRows, loader.lane_rows, params.page_size);
  }
  return places;
}

template <bool kValues>
__device__ __forceinline__ barrier ring_copied(const layout &m, uint32_t use) {
  return {(kValues ? m.v_copied : m.k_copied).address + 8 * (use % kStages)};
}

// The warp's rows of a tile. `from` is the lane's part of the first row that there is.
template <bool kValues>
__device__ __forceinline__ void copy_rows(const fa3_forward_params &params, const layout &m,
                                          const row_loader &loader, const char *from,
                                          const row_places &places, uint32_t use) {
  constexpr int kTileChunks = kValues ? kChunksV : kChunks;
  constexpr uint32_t kNowhere = ~0u;
  const auto buffers = key_ring<kValues>(m);
  const fa3_paged_tensor &tensor = kValues ? params.paged_value : params.paged_key;
  const int lane = thread_again() & 31, unit = lane % kUnits;
  // The swizzle's pattern has eight rows: it is that of every other group, or of all.
  uint32_t to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    to[i] = ring_tile(buffers, use) +
            swizzled((loader.part + i * kRowLoaders) * kGroupRows + lane / kUnits, unit);
  uint32_t offsets[kRowsOfLane];  // where rows begin
  int row = places.row;
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    offsets[i] = (unsigned)places.page[i] >= params.pages
                     ? kNowhere
                     : places.page[i] * tensor.page_steps + row * tensor.row_steps +
                           loader.key_head * tensor.head_steps;
    row += loader.lane_rows.rows;
    if (row >= (int)params.page_size) row -= params.page_size;
  }
  ring_wait_empty(buffers, use);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const uint32_t offset = __shfl_sync(0xffffffff, offsets[i / kUnits], i % kUnits, kUnits);
    const char *begin = from + offset * (uint64_t)tensor.step;
#pragma unroll
    for (int c = 0; c < kTileChunks; ++c)
      copy_async(to[i % 2] + (i / 2 * 2 * kRowLoaders * kGroupRows + c * kTileK) * kRowBytes,
                 begin + c * kRowBytes,
                 offset != kNowhere && c * kChunk + unit * 8 < tensor.head_dim);
  }
  copy_async_arrive(ring_copied<kValues>(m, use).address);
}

// Part `part` of every tile of K, of V, or of both; then tiles of V run one behind those of K, as
// the consumers use them.
template <bool kKeys, bool kValues>
__device__ __forceinline__ void load_pages_by_rows(const fa3_forward_params &params,
                                                   const layout &m, int part) {
  constexpr bool kBoth = kKeys && kValues;
  const int lane = threadIdx.x & 31, page_size = params.page_size;
  const page_step tile = make_page_step(kTileK, page_size);
  row_loader loader = {part, make_page_step(kLaneRows, page_size), 0};
  const char *first_key = (const char *)params.paged_key.data + lane % kUnits * 16;
  const char *first_value = (const char *)params.paged_value.data + lane % kUnits * 16;
  asm volatile("" : "+l"(first_key), "+l"(first_value));
  uint32_t use_k = 0, use_v = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int begin = w.tiles.begin, end = w.tiles.end, keys = max(w.sequence.mask.keys, 0);
    const int *table = fa3_find_page(&params.sequences, &w.sequence, 0);
    const int row = (lane % kUnits * kRowLoaders + part) * kGroupRows + lane / kUnits;
    page_cursor cursor = find_cursor(page_size, w.sequence.key_row, max(end - 1, 0) * kTileK + row);
    loader.key_head = w.key_head;
    finish_work(m, t);
    row_places places = look_up_rows(params, loader, table, keys, cursor), before;
    for (int n = end - 1; n >= begin - 1; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (kKeys && n == min(begin, end - 1) && part == 0 && params.next_tile != nullptr &&
          lane == 0)
        barrier_arrive(m.work_wanted);
      if (kKeys && n >= begin) copy_rows<false>(params, m, loader, first_key, places, use_k++);
      move_back(cursor, kTileK, tile, page_size);
      const row_places next = look_up_rows(params, loader, table, keys, cursor);
      const int tile_v = kBoth ? n + 1 : n;
      if (kValues && tile_v >= begin && tile_v < end)
        copy_rows<true>(params, m, loader, first_value, kBoth ? before : places, use_v++);
      before = places;
      places = next;
      __syncwarp();
    }
  }
  copy_async_wait_all();
}

// The rows that threads have copied are there.
template <bool kValues>
__device__ __forceinline__ void report_copies(const layout &m, uint32_t use, bool leader) {
  barrier_wait(ring_copied<kValues>(m, use), use / kStages);
  fence_proxy_async();
  if (leader) barrier_arrive(ring_full(key_ring<kValues>(m), use));
}

// Loads Q, and reports K and V in the order in which the consumers use them.
__device__ __forceinline__ void load_queries_and_report(const fa3_forward_params &params,
                                                        const layout &m) {
  const bool leader = elect_one();
  uint32_t use_k = 0, use_v = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int begin = w.tiles.begin, end = w.tiles.end;
    load_queries_of(params, m, w, t, leader);
    finish_work(m, t);
    for (int n = end - 1; n >= begin - 1; --n) {
      if (n >= begin) report_copies<false>(m, use_k++, leader);
      if (n + 1 < end) report_copies<true>(m, use_v++, leader);
      __syncwarp();
    }
  }
}

#endif
