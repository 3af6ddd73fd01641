// Codes of keys and values become 16 bits ahead of the forward kernel, exactly: many blocks of that
// read them, and each would have to unpack them anew. Keys become of the queries' dtype, values
// float16. Their scales go beside them: one for each head, or for each row.
#include "codes.cuh"
#include "divide.cuh"
#include "unpack_params.h"

constexpr int kAtOnce = 4;  // rows of a thread, so that their latencies do not add up

// Where a key is: a page (or an entry of the batch) and the row in it. Page -1: nowhere in the
// cache, whatever the sequence's length or its pages say.
struct place {
  int page, row;
};

__device__ __forceinline__ place find_place(const fa3_decode_params &p, const fa3_sequence &of,
                                            int key) {
  const int row = of.key_row + key;
  if ((unsigned)row >= (unsigned)p.rows_k) return {-1, 0};
  if (!p.sequences.page_table) return {of.key_batch < p.pages ? of.key_batch : -1, row};
  const int number = divide(row, p.page_size);
  const int page = __ldg(fa3_find_page(&p.sequences, &of, number));
  return {page < p.pages ? page : -1, row - number * (int)p.page_size.divisor};
}

// Eight codes from column `column` on; zeros where there are none.
__device__ __forceinline__ uint2 load_codes(const fa3_decode_input &tensor, int head, int dim,
                                            const place &at, int column) {
  if (at.page < 0 || column >= dim) return make_uint2(0, 0);
  const uint64_t units = (uint64_t)(uint32_t)at.page * tensor.stride_batch +
                         (uint64_t)(uint32_t)at.row * tensor.stride_row +
                         (uint64_t)(uint32_t)head * tensor.stride_head;
  return *(const uint2 *)(tensor.data + units * 16 + column);
}

// A pair of float16 as one of bfloat16.
__device__ __forceinline__ uint32_t widen_range(uint32_t pair) {
  const float2 x = unpack_fp16(pair);
  return pack_bf16(x.x, x.y);
}

__device__ __forceinline__ void store_unpacked(uint16_t *to, const uint2 &codes, bool bf16) {
  uint32_t x[4];
  unpack_codes(codes.x, x[0], x[1]);
  unpack_codes(codes.y, x[2], x[3]);
  if (bf16)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = widen_range(x[i]);
  store_global_vector(to, x);
}

// NaN for infinity: what sees it is to be NaN.
__device__ __forceinline__ float scale_or_nan(const float *scale) {
  return fmaf(*scale, 0.0f, *scale);
}

// The scale of a head. A page, which stands for a sequence, has none of its own. An entry of the
// cache that is not there has no scale to read.
__device__ __forceinline__ float scale_of_key_head(const fa3_decode_params &p,
                                                   const fa3_scales &scales, const fa3_sequence &of,
                                                   int head) {
  const bool there = p.sequences.page_table || (unsigned)of.key_batch < (unsigned)p.pages;
  if (scales.data == nullptr || !there) return 1.0f;
  return scale_or_nan(scales.data + of.key_batch * scales.stride_batch +
                      head / scales.heads_per_scale * scales.stride_head);
}

// The scale of a row, of which so many share one; 0 if there is no such row.
__device__ __forceinline__ float scale_of_row(const fa3_scales &scales, const fa3_divisor &rows,
                                              const place &at, int head) {
  if (at.page < 0) return 0.0f;
  if (scales.data == nullptr) return 1.0f;
  const int block = scales.rows > 0 ? divide(at.row, rows) : 0;
  return scale_or_nan(scales.data + at.page * scales.stride_batch +
                      head / scales.heads_per_scale * scales.stride_head +
                      block * scales.stride_block);
}

// Of all rows of a tile, whether they are there or not: one for each thread.
__device__ __forceinline__ void store_row_scales(const fa3_unpack_params &params,
                                                 const fa3_sequence &of, int head, int64_t entry,
                                                 int begin, int end) {
  static_assert(FA3_UNPACK_THREADS == 2 * FA3_UNPACK_KEYS, "a thread for each scale");
  const int values = threadIdx.x / FA3_UNPACK_KEYS, row = begin + threadIdx.x % FA3_UNPACK_KEYS;
  place at = {-1, 0};
  if (row < end) at = find_place(params.cache.decode, of, row);
  const fa3_scales &scales = values ? params.cache.value_scale : params.cache.key_scale;
  const fa3_divisor &rows = values ? params.cache.value_scale_rows : params.cache.key_scale_rows;
  params.row_scales[(2 * entry + values) * params.scale_rows + row] =
      scale_of_row(scales, rows, at, head);
}

extern "C" __global__ void __launch_bounds__(FA3_UNPACK_THREADS)
    unpack(const __grid_constant__ fa3_unpack_params params) {
  const fa3_decode_params &p = params.cache.decode;
  wait_for_prior_grids();
  let_next_grid_launch();
  const int tile = divide(blockIdx.x, p.heads_k);
  const int head = blockIdx.x - tile * (int)p.heads_k.divisor;
  const fa3_sequence sequence = fa3_find_sequence(&p.sequences, blockIdx.y);
  const fa3_mask &mask = sequence.mask;
  if (mask.queries <= params.cache.few_queries) return;
  const int64_t entry = (int64_t)blockIdx.y * (int)p.heads_k.divisor + head;
  if (params.head_scales && tile == 0 && threadIdx.x == 0)
    params.head_scales[entry] = {scale_of_key_head(p, params.cache.key_scale, sequence, head),
                                 scale_of_key_head(p, params.cache.value_scale, sequence, head)};
  const bool bf16 = params.cache.query == FA3_QUERY_BF16;
  // Of a tile that any query sees the products read all.
  const int begin = tile * FA3_UNPACK_KEYS, end = min(begin + FA3_UNPACK_KEYS, mask.keys);
  if (end <= fa3_visible_keys(&mask, 0).begin ||
      begin >= fa3_visible_keys(&mask, mask.queries - 1).end)
    return;
  if (params.row_scales) store_row_scales(params, sequence, head, entry, begin, end);
  const int step = FA3_UNPACK_THREADS / params.row_threads;
  const int column = 8 * (threadIdx.x & (params.row_threads - 1));
  uint16_t *const key = params.key + entry * params.rows * p.head_dim + column;
  uint16_t *const value = params.value + entry * params.rows * p.head_dim_v + column;
#pragma unroll 1
  for (int row = begin + (int)threadIdx.x / params.row_threads; row < end; row += kAtOnce * step) {
    uint2 keys[kAtOnce], values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      place at = {-1, 0};
      if (row + i * step < end) at = find_place(p, sequence, row + i * step);
      keys[i] = load_codes(p.key, head, p.head_dim, at, column);
      values[i] = load_codes(p.value, head, p.head_dim_v, at, column);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int to = row + i * step;
      if (to >= end) break;
      if (column < p.head_dim) store_unpacked(key + (int64_t)to * p.head_dim, keys[i], bf16);
      if (column < p.head_dim_v)
        store_unpacked(value + (int64_t)to * p.head_dim_v, values[i], false);
    }
  }
}
