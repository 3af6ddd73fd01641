// New keys and values go into a cache, behind what each sequence has there; keys, and queries
// beside them, are turned by rotary embedding. A warp has a head of a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "append_params.h"
#include "codes.cuh"
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
    else if (p.kind == FA3_APPEND_E4M3)
      ((uint8_t *)to)[to_at + i] = ((const uint8_t *)from)[from_at + i];
    else
      ((uint16_t *)to)[to_at + i] = ((const uint16_t *)from)[from_at + i];
}

// The angle's cosine and sine for a pair of elements at a position; NaN where the tables have none.
__device__ __forceinline__ float2 find_angle(const fa3_append_params &p, int position, int pair) {
  if (position < 0 || position >= p.table_rows) return make_float2(NAN, NAN);
  return make_float2(load(p.cos.data, position * p.cos.stride_row + pair, p.table_kind),
                     load(p.sin.data, position * p.sin.stride_row + pair, p.table_kind));
}

// A head, its first elements turned by the angles of the position.
__device__ __forceinline__ void turn(const fa3_append_params &p, const void *from, int64_t from_at,
                                     void *to, int64_t to_at, int pairs, int dim, int position) {
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < pairs; i += 32) {
    const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? first + 1 : i + pairs;
    const float x = load(from, from_at + first, p.kind), y = load(from, from_at + second, p.kind);
    const float2 angle = find_angle(p, position, i);
    store(to, to_at + first, p.kind, x * angle.x - y * angle.y);
    store(to, to_at + second, p.kind, x * angle.y + y * angle.x);
  }
  copy(p, from, from_at, to, to_at, 2 * pairs, dim);
}

// An element of a head, turned.
__device__ __forceinline__ float turned(const fa3_append_params &p, const void *from, int64_t at,
                                        int pairs, int position, int i) {
  if (i >= 2 * pairs) return load(from, at + i, p.kind);
  const int pair = p.interleaved ? i / 2 : i % pairs;
  const int first = p.interleaved ? 2 * pair : pair,
            second = p.interleaved ? first + 1 : i % pairs + pairs;
  const float x = load(from, at + first, p.kind), y = load(from, at + second, p.kind);
  const float2 angle = find_angle(p, position, pair);
  return i == first ? x * angle.x - y * angle.y : x * angle.y + y * angle.x;
}

// Where the scale of a head of a cache's row is.
__device__ __forceinline__ float *find_scale(const fa3_scales &scales, int page, int row,
                                             int head) {
  const int block = scales.rows > 0 ? row / scales.rows : 0;
  return (float *)scales.data + page * scales.stride_batch +
         head / scales.heads_per_scale * scales.stride_head + block * scales.stride_block;
}

// A head, turned, becomes codes: of the scale that is there, or of one of its own, which is
// written: a normal number that its largest finite magnitude fits into.
__device__ __forceinline__ void quantise(const fa3_append_params &p, const fa3_scales &scales,
                                         float *scale, const void *from, int64_t from_at,
                                         uint8_t *to, int pairs, int dim, int position) {
  float divisor = scales.data == nullptr ? 1.0f : *scale;
  if (scales.rows == 1) {
    float largest = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < dim; i += 32) {
      const float x = fabsf(turned(p, from, from_at, pairs, position, i));
      if (x < INFINITY) largest = fmaxf(largest, x);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
    divisor = fmaxf(largest / 448.0f, 0x1p-126f);
    if ((threadIdx.x & 31) == 0) *scale = divisor;
  }
  if (divisor == 0.0f) divisor = 1.0f;  // times 0 every code is 0
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < dim; i += 32) {
    const float x = turned(p, from, from_at, pairs, position, i);
    to[i] = fabsf(x) == INFINITY ? 0x7f : (uint8_t)pack_codes(x / divisor, 0.0f, 0.0f, 0.0f);
  }
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
    const int dim = value ? p.head_dim_v : p.head_dim;
    if (p.quantised && !query) {
      const fa3_scales &scales = value ? p.value_scale : p.key_scale;
      quantise(p, scales, find_scale(scales, page, to_row, head), from.data, from_at,
               (uint8_t *)to.data + to_at, pairs, dim, position);
    } else {
      turn(p, from.data, from_at, to.data, to_at, pairs, dim, position);
    }
  }
}
