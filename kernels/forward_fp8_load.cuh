// The FP8 forward kernel's producing warps: one loads Q, K and V, two transpose V.
#ifndef FA3_FORWARD_FP8_LOAD_CUH
#define FA3_FORWARD_FP8_LOAD_CUH

#include "forward_fp8_work.cuh"

__device__ __forceinline__ void load_queries(const fa3_forward_params &params, const layout &m,
                                             uint32_t t, const work &w, bool leader) {
  const int step = params.queries_per_warpgroup;
  for (int i = 0; i < kWarpgroups; ++i) {
    const auto q = ring_beside(m.q, i);
    const barrier full = ring_full(q, t);
    ring_wait_empty(q, t);
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

__device__ __forceinline__ void load(const fa3_forward_fp8_params &fp8, const layout &m) {
  const fa3_forward_params &params = fp8.forward;
  const bool leader = elect_one();
  uint32_t used = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    const int head = params.tile_heads == 1 ? w.head / params.group : w.head;
    const int begin = w.tiles.begin, end = w.tiles.end;
    if (begin >= end) {
      if (params.next_tile != nullptr && leader) barrier_arrive(m.work_wanted);
      load_queries(params, m, t, w, leader);
    }
    const bool mixed = mixed_scales(fp8, w);
    float2 scales = {};  // of the tile in hand or, where it may be so, of the next
    if (!kHeadScales && kScalesAhead && !mixed && begin < end)
      scales = tile_scales(fp8, w, head, end - 1);
    for (int n = end - 1; n >= begin; --n) {
      // The last keys: what the scheduling warp does now is done when they are used.
      if (n == begin && params.next_tile != nullptr && leader) barrier_arrive(m.work_wanted);
      const int row = w.sequence.key_row + n * kTileK;
      ring_wait_empty(m.k, used);
      const uint32_t to = m.scales + used % kScaleSlots * kScaleBytes;
      if (mixed) {
        store_mixed_scales(fp8, to, w, head, n);
      } else if (!kHeadScales) {
        if (!kScalesAhead) scales = tile_scales(fp8, w, head, n);
        if ((threadIdx.x & 31) == 0) store_shared_pair(to, scales.x, scales.y);
      }
      __syncwarp();
      if (leader) {
        const barrier full = ring_full(m.k, used);
        barrier_expect(full, kKBytes);
#pragma unroll
        for (int c = 0; c < kCodeChunks; ++c)
          tma_load_4d(ring_tile(m.k, used) + c * kTileK * kCodes, &params.key, full.address,
                      c * kCodes, row, head, w.sequence.key_batch);
      }
      __syncwarp();
      if (!kHeadScales && kScalesAhead && !mixed && n > begin)
        scales = tile_scales(fp8, w, head, n - 1);
#pragma unroll
      for (int c = 0; c < kCodeChunks; ++c) {
        const uint32_t use = used * kCodeChunks + c;
        ring_wait_empty(m.v, use);
        if (leader) {
          const barrier full = ring_full(m.v, use);
          barrier_expect(full, kVChunkBytes);
          tma_load_4d(ring_tile(m.v, use), &params.value, full.address, c * kCodes, row, head,
                      w.sequence.key_batch);
        }
        __syncwarp();
      }
      ++used;
      // Q of the tile before is in use for longer than its last K.
      if (n == end - 1) load_queries(params, m, t, w, leader);
    }
    finish_work(m, t);
  }
}

// Where the swizzle puts a row's 16 bytes number 0; number u lies at that address ^ 16 u.
template <int kBytes>
__device__ __forceinline__ uint32_t swizzled_row(int row) {
  return row * kBytes + ((kBytes == 128  ? row & 7
                          : kBytes == 64 ? row >> 1 & 3
                                         : row >> 2 & 1)
                         << 4);
}

// V^T, for a part of the rows that a chunk of V makes. The second product takes it as it takes K:
// along a row, key by key.
//
// A warp reads 32 keys of 16 columns: transposed as pairs of bytes, they leave a thread keys 2q and
// 2q + 1 of columns 2c and 2c + 1 (q = lane % 4, c = lane / 4), and of 8, 16 and 24 keys on. Two
// registers, bytes exchanged, hold keys 2q, 2q + 1, 2q + 8 and 2q + 9 of one column each: 16 keys
// in this order side by side are just what P, in the layout that the first product leaves, is
// multiplied by. Half of the lanes take the odd column first, so that eight rows that are stored
// together lie in different banks.
//
// `keys` are those of the sequence in this tile of V: beyond them there may be anything, and 0 *
// NaN would be NaN, so zeros are stored in their place.
__device__ __forceinline__ void transpose_chunk(uint32_t to, uint32_t from, int part, int keys) {
  const int lane = threadIdx.x & 31, matrix = lane >> 3, c = lane & 7;
  const uint32_t first_column = lane < 16 ? 0x6420 : 0x7531, second_column = first_column ^ 0x1111;
  const uint32_t read = from + swizzled_row<kCodes>(lane);
  const int column = 2 * c + ((c >> 2) ^ (matrix & 1));
  const uint32_t write = (to + swizzled_row<kKeys>(column)) ^ (matrix >> 1) << 4;
  constexpr int kSteps = kTileK / 32, kUnits = kSteps * (kCodes / 16 / kTransposers);
  const int first = part * (kCodes / kTransposers);
  const uint32_t read_part = read ^ first, write_part = write + first * kKeys;
  const auto load_unit = [&](int i, uint32_t(&x)[4]) {
    load_matrices_transposed((read_part ^ i / kSteps * 16) + i % kSteps * 32 * kCodes, x);
  };
  const auto store_unit = [&](int i, const uint32_t(&x)[4]) {
    const int row = i / kSteps * 16, key = i % kSteps * 32;
    store_matrices((write_part ^ key % kKeys) + (row + key / kKeys * kHeadDimV) * kKeys,
                   __byte_perm(x[0], x[1], first_column), __byte_perm(x[0], x[1], second_column),
                   __byte_perm(x[2], x[3], first_column), __byte_perm(x[2], x[3], second_column));
  };
  if (keys < kTileK) {
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i) {
      uint32_t x[4];
      load_unit(i, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int left = keys - (i % kSteps * 32 + 8 * j + 2 * (lane & 3));
        x[j] &= left > 1 ? 0xffffffff : left == 1 ? 0xffff : 0;
      }
      store_unit(i, x);
    }
    return;
  }
  // Loads run ahead of stores, as many as there are registers for.
  constexpr int kAhead = kWarpgroups == 3 ? 2 : kTileK > 128 ? 3 : 4;
  uint32_t x[kAhead][4];
#pragma unroll
  for (int i = 0; i < kUnits + kAhead - 1; ++i) {
    if (i < kUnits) load_unit(i, x[i % kAhead]);
    if (i >= kAhead - 1) store_unit(i - (kAhead - 1), x[(i - (kAhead - 1)) % kAhead]);
  }
}

__device__ __forceinline__ void transpose_values(const layout &m, int part) {
  uint32_t used = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    for (int n = w.tiles.end - 1; n >= w.tiles.begin; --n, ++used) {
      ring_wait_empty(m.v_transposed, used);
#pragma unroll 1
      for (int c = 0; c < kCodeChunks; ++c) {
        const uint32_t use = used * kCodeChunks + c;
        ring_wait_full(m.v, use);
        transpose_chunk(ring_tile(m.v_transposed, used) + c * kCodes * kKeys, ring_tile(m.v, use),
                        part, w.sequence.mask.keys - n * kTileK);
        __syncwarp();
        ring_release(m.v, use);
      }
      fence_proxy_async();
      __syncwarp();
      barrier_arrive_warp(ring_full(m.v_transposed, used));
    }
    finish_work(m, t);
  }
}

#endif
