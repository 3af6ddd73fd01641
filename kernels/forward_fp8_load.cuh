// The FP8 forward kernel's loading warp.
#ifndef FA3_FORWARD_FP8_LOAD_CUH
#define FA3_FORWARD_FP8_LOAD_CUH

#include "forward_fp8_work.cuh"

#include "forward_queries.cuh"
#if FA3_PAGES
#include "forward_page_cursor.cuh"
#endif

__device__ __forceinline__ void load_queries(const fa3_forward_params &params, const layout &m,
                                             uint32_t t, const work &w, bool leader) {
  const int step = params.queries_per_warpgroup;
  for (int i = 0; i < kWarpgroups; ++i) {
    const auto q = ring_beside(m.q, i);
    const barrier full = ring_full(q, t);
    ring_claim(q, t);
    if (leader) {
      barrier_expect(full, step * params.tile_heads * kHeadDim);
#pragma unroll
      for (int c = 0; c < kCodeChunks; ++c)
        tma_load_5d(ring_tile(q, t) + c * kRows * kCodes, &params.query, full.address, c * kCodes,
                    0, w.sequence.query_row + w.first + i * step, w.head, w.sequence.query_batch);
    }
    __syncwarp();
  }
}

// Whether a tile's scales are fetched while the tile before is loaded. Else they are, a chain of
// two loads, when there is room for the tile: late, but faster at head dim 128
// (docs/notes/hopper-fp8.md).
constexpr bool kScalesAhead = kHeadDim != 128;

// The scale of tile n of keys and that of its values, where each has one.
__device__ __forceinline__ float2 tile_scales(const fa3_forward_fp8_params &params, const work &w,
                                              int head, int n) {
  const int *starts = params.forward.sequences.cu_seqlens_k;
  const int entry = starts ? w.batch : w.sequence.key_batch;
  const int row = left_pad(params.forward, w) + n * kTileK;
  return {scale_of(params.key_scale, entry, head, row, starts),
          scale_of(params.value_scale, entry, head, row, starts)};
}

// Those of each key of tile n, for the consumers; by the whole warp. A value's is a share of the
// greatest of the tile, which is the tile's scale then.
__device__ __forceinline__ void store_mixed_scales(const fa3_forward_fp8_params &params,
                                                   uint32_t to, const work &w, int head, int n) {
  const int *starts = params.forward.sequences.cu_seqlens_k;
  const int entry = starts ? w.batch : w.sequence.key_batch, lane = threadIdx.x & 31;
  const int row = left_pad(params.forward, w) + n * kTileK;
  const int rows = w.sequence.mask.keys - n * kTileK;
  float greatest = 0.0f;
  for (int j = lane; j < kTileK; j += 32)
    if (j < rows)
      greatest = max_nan(greatest, scale_of(params.value_scale, entry, head, row + j, starts));
#pragma unroll
  for (int i = 16; i > 0; i /= 2)
    greatest = max_nan(greatest, __shfl_xor_sync(0xffffffff, greatest, i));
  const float inverse = greatest == 0.0f ? 0.0f : reciprocal_unit(greatest);
  for (int j = lane; j < kTileK; j += 32) {
    float key = 1.0f, value = 0.0f;
    if (j < rows) {
      key = scale_of(params.key_scale, entry, head, row + j, starts);
      value = scale_of(params.value_scale, entry, head, row + j, starts) * inverse;
    }
    store_shared_pair(to + 8 + 8 * j, key, value);
  }
  if (lane == 0) store_shared_pair(to, 1.0f, greatest);
}

// What the warps that transpose V know of a tile: the sequence's keys from the tile's first on, or
// that there is no tile any more.
constexpr int kNoTile = -1;

__device__ __forceinline__ void set_keys(const layout &m, uint32_t tile, int keys) {
  store_shared_float(m.v_keys + tile % kStages * 4, __int_as_float(keys));
}

__device__ __forceinline__ int keys_of(const layout &m, uint32_t tile) {
  return __float_as_int(load_shared_float(m.v_keys + tile % kStages * 4));
}

// Where a tile of keys is.
#if FA3_PAGES
// In boxes of rows that are in one page, as many rows as divide both a page and a tile: lane i
// knows of the i-th. What lies beyond the sequence's end, or in a page that is not there, counts as
// zeros.
struct key_tile {
  page_cursor cursor;
  int page;  // or -1
};

__device__ __forceinline__ void find_page(const fa3_forward_params &params, const work &w,
                                          key_tile &tile) {
  tile.page = look_up(fa3_find_page(&params.sequences, &w.sequence, 0),
                      max(w.sequence.mask.keys, 0), tile.cursor);
}

__device__ __forceinline__ key_tile find_key_tile(const fa3_forward_params &params, const work &w,
                                                  int n) {
  const int key = n * kTileK + (threadIdx.x & 31) * params.box;
  key_tile tile = {find_cursor(params.page_size, w.sequence.key_row, key), -1};
  find_page(params, w, tile);
  return tile;
}

// To the tile before, while this one is on its way: the page table is far away.
__device__ __forceinline__ void move_back(const fa3_forward_params &params, const work &w,
                                          const page_step &step, key_tile &tile) {
  move_back(tile.cursor, kTileK, step, params.page_size);
  find_page(params, w, tile);
}

// A chunk of its columns, of K or V.
__device__ __forceinline__ void load_chunk(const fa3_forward_params &params,
                                           const fa3_tensor_map &map, const work &w,
                                           const key_tile &tile, int n, int head, int column,
                                           uint32_t to, barrier full, bool leader) {
#pragma unroll 4
  for (int i = 0; i < kTileK / params.box; ++i) {
    const int page = __shfl_sync(0xffffffff, tile.page, i);
    const int row = __shfl_sync(0xffffffff, tile.cursor.row, i);
    if (leader) tma_load_4d(to, &map, full.address, column, row, head, page);
    to += params.box * kCodes;
  }
}
#else
struct page_step {};
struct key_tile {};

__device__ __forceinline__ page_step make_page_step(int, unsigned) {
  return {};
}

__device__ __forceinline__ key_tile find_key_tile(const fa3_forward_params &, const work &, int) {
  return {};
}

__device__ __forceinline__ void move_back(const fa3_forward_params &, const work &,
                                          const page_step &, key_tile &) {
}

__device__ __forceinline__ void load_chunk(const fa3_forward_params &params,
                                           const fa3_tensor_map &map, const work &w,
                                           const key_tile &, int n, int head, int column,
                                           uint32_t to, barrier full, bool leader) {
  if (leader)
    tma_load_4d(to, &map, full.address, column, w.sequence.key_row + n * kTileK, head,
                w.sequence.key_batch);
}
#endif

__device__ __forceinline__ void load(const fa3_forward_fp8_params &fp8, const layout &m) {
  const fa3_forward_params &params = fp8.forward;
  const bool leader = elect_one();
  const page_step tile_step = make_page_step(kTileK, params.page_size);
  uint32_t used = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int head = w.key_head;
    const int begin = w.tiles.begin, end = w.tiles.end;
    if (begin >= end) {
      if (params.next_tile != nullptr && leader) barrier_arrive(m.work_wanted);
      load_queries(params, m, t, w, leader);
    }
#if FA3_TRANSPOSED
    const int first =
        fa3_first_transposed(&fp8.transposed, params.sequences.cu_seqlens_k, w.batch, kTileK);
#endif
    key_tile tile = find_key_tile(params, w, max(end - 1, 0));
    const bool mixed = mixed_scales(fp8, w);
    float2 scales = {};  // of the tile in hand or, where it may be so, of the next
    if (!kHeadScales && kScalesAhead && !mixed && begin < end)
      scales = tile_scales(fp8, w, head, end - 1);
    for (int n = end - 1; n >= begin; --n) {
      // Almost the last keys: what the scheduling warp does now is done when they are used.
      if (n == min(begin + 1, end - 1) && params.next_tile != nullptr && leader)
        barrier_arrive(m.work_wanted);
      ring_wait_empty(m.k, used);
      const uint32_t to = m.scales + used % kScaleSlots * kScaleBytes;
      if (mixed) {
        store_mixed_scales(fp8, to, w, head, n);
      } else if (!kHeadScales) {
        if (!kScalesAhead) scales = tile_scales(fp8, w, head, n);
        if ((threadIdx.x & 31) == 0) store_shared_pair(to, scales.x, scales.y);
      }
      __syncwarp();
      if (leader) barrier_expect(ring_full(m.k, used), kKBytes);
#pragma unroll
      for (int c = 0; c < kCodeChunks; ++c)
        load_chunk(params, params.key, w, tile, n, head, c * kCodes,
                   ring_tile(m.k, used) + c * kTileK * kCodes, ring_full(m.k, used), leader);
      __syncwarp();
      if (!kHeadScales && kScalesAhead && !mixed && n > begin)
        scales = tile_scales(fp8, w, head, n - 1);
#if FA3_TRANSPOSED
      // All so far was the caller's; this is made by the kernel before.
      if (used == 0) wait_for_prior_grids();
      ring_claim(m.v_transposed, used);
      if (leader) {
        const barrier full = ring_full(m.v_transposed, used);
        barrier_expect(full, kVBytes);
        bulk_load(ring_tile(m.v_transposed, used),
                  fa3_transposed_tile(&fp8.transposed, first + n, head, kVBytes), kVBytes,
                  full.address);
      }
      __syncwarp();
#else
#pragma unroll
      for (int c = 0; c < kCodeChunks; ++c) {
        const uint32_t use = used * kCodeChunks + c;
        ring_claim(m.v, use);
        if (leader) {
          if (kTellsKeys && c == 0) set_keys(m, used, w.sequence.mask.keys - n * kTileK);
          barrier_expect(ring_full(m.v, use), kVChunkBytes);
        }
        load_chunk(params, params.value, w, tile, n, head, c * kCodes, ring_tile(m.v, use),
                   ring_full(m.v, use), leader);
        __syncwarp();
      }
#endif
      move_back(params, w, tile_step, tile);
      ++used;
      // Q of the tile before is in use for longer than its last K.
      if (n == end - 1) load_queries(params, m, t, w, leader);
    }
    asm volatile("" : "+r"(t));  // the barrier is found anew, not kept in registers
    finish_work(m, t);
  }
#if FA3_TRANSPOSED
  wait_for_prior_grids();  // if there was nothing to load, only now
#else
  if (!kTellsKeys) return;
  ring_claim(m.v, used * kCodeChunks);
  if (leader) {
    set_keys(m, used, kNoTile);
    barrier_arrive(ring_full(m.v, used * kCodeChunks));
  }
#endif
}

#endif
