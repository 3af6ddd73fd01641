// New keys and values go into a cache, behind what each sequence has there; keys, and queries
// beside them, are turned by rotary embedding. A warp has a head of a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "append_params.h"
#include "registers.cuh"

__device__ __forceinline__ float load(const void *data, int64_t i, int kind) {
  return kind == FA3_APPEND_FLOAT32   ? ((const float *)data)[i]
         : kind == FA3_APPEND_FLOAT16 ? __half2float(((const __half *)data)[i])
                                      : __bfloat162float(((const __nv_bfloat16 *)data)[i]);
}

__device__ __forceinline__ void store(void *data, int64_t i, int kind, float x) {
  if (kind == FA3_APPEND_FLOAT32)
    ((float *)data)[i] = x;
  else if (kind == FA3_APPEND_FLOAT16)
    ((__half *)data)[i] = __float2half_rn(x);
  else
    ((__nv_bfloat16 *)data)[i] = __float2bfloat16_rn(x);
}

__device__ __forceinline__ int64_t offset(const fa3_append_tensor &tensor, int batch, int row,
                                          int head) {
  return batch * tensor.stride_batch + row * tensor.stride_row + head * tensor.stride_head;
}

// Elements from `first` on, as they are.
__device__ __forceinline__ void copy(const fa3_append_params &p, const void *from, int64_t from_at,
                                     void *to, int64_t to_at, int first, int dim) {
#pragma unroll 1
  for (int i = first + (threadIdx.x & 31); i < dim; i += 32)
    if (p.kind == FA3_APPEND_FLOAT32)
      ((uint32_t *)to)[to_at + i] = ((const uint32_t *)from)[from_at + i];
    else
      ((uint16_t *)to)[to_at + i] = ((const uint16_t *)from)[from_at + i];
}

// A head, its first elements turned by the angles of the position.
__device__ __forceinline__ void turn(const fa3_append_params &p, const void *from, int64_t from_at,
                                     void *to, int64_t to_at, int pairs, int dim, int position) {
  const bool known = position >= 0 && position < p.table_rows;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < pairs; i += 32) {
    const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? first + 1 : i + pairs;
    const float x = load(from, from_at + first, p.kind), y = load(from, from_at + second, p.kind);
    const float c = known ? load(p.cos.data, position * p.cos.stride_row + i, p.table_kind) : NAN;
    const float s = known ? load(p.sin.data, position * p.sin.stride_row + i, p.table_kind) : NAN;
    store(to, to_at + first, p.kind, x * c - y * s);
    store(to, to_at + second, p.kind, x * s + y * c);
  }
  copy(p, from, from_at, to, to_at, 2 * pairs, dim);
}

extern "C" __global__ void __launch_bounds__(FA3_APPEND_THREADS)
    append(const __grid_constant__ fa3_append_params p) {
  const int batch = blockIdx.y, row = blockIdx.x;
  wait_for_prior_grids();
  const fa3_sequence sequence = fa3_find_sequence(&p.sequences, batch);
  if (row >= sequence.mask.queries) return;
  const int from_row = sequence.query_row + row;
  const int key = sequence.mask.keys + row;
  const int position = p.positions ? p.positions[sequence.query_batch * p.positions_stride_batch +
                                                 from_row * p.positions_stride_row]
                                   : key;
  int to_row = sequence.key_row + key, page = sequence.key_batch;
  bool room = to_row >= 0 && to_row < p.rows_k;
  if (room && p.page_table) {
    page = p.page_table[batch * p.page_table_stride + to_row / p.page_size];
    to_row %= p.page_size;
  }
  room = room && page >= 0 && page < p.pages;
  const int heads = 2 * p.heads_k + p.heads_q;
#pragma unroll 1
  for (int h = threadIdx.x / 32; h < heads; h += FA3_APPEND_WARPS) {
    const bool value = h >= p.heads_k && h < 2 * p.heads_k, query = h >= 2 * p.heads_k;
    if (!query && !room) continue;
    const fa3_append_tensor &from = query ? p.query : value ? p.new_value : p.new_key;
    const fa3_append_tensor &to = query ? p.rotated_query : value ? p.value : p.key;
    const int head = query ? h - 2 * p.heads_k : value ? h - p.heads_k : h;
    const int64_t from_at = offset(from, sequence.query_batch, from_row, head);
    const int64_t to_at =
        query ? offset(to, sequence.query_batch, from_row, head) : offset(to, page, to_row, head);
    const int pairs = value ? 0 : p.pairs;
    turn(p, from.data, from_at, to.data, to_at, pairs, value ? p.head_dim_v : p.head_dim, position);
  }
}
