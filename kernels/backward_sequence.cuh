// One sequence of the batch, and how a gradient is stored: for all the backward kernels.
#ifndef FA3_BACKWARD_SEQUENCE_CUH
#define FA3_BACKWARD_SEQUENCE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backward_params.h"
#include "registers.cuh"

// Not an instruction: what is in memory is read again, instead of being kept in registers that are
// few.
__device__ __forceinline__ void forget_memory(void) {
  asm volatile("" ::: "memory");
}

struct backward_sequence {
  fa3_mask mask;
  int query_row, key_row;      // its first rows in the tensors
  int query_batch, key_batch;  // as coordinates of the tensors
  int slot;                    // of its first block of rows
};

__device__ __forceinline__ backward_sequence find_sequence(const fa3_backward_sequences &p, int b) {
  backward_sequence s;
  s.query_row = p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0;
  s.key_row = p.cu_seqlens_k ? p.cu_seqlens_k[b] : 0;
  s.slot = fa3_backward_slot(&p, b, s.query_row);
  const int queries = p.used_q         ? p.used_q[b]
                      : p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - s.query_row
                                       : p.seqlen_q;
  int keys = p.used_k         ? p.used_k[b]
             : p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - s.key_row
                              : p.seqlen_k;
  if (p.leftpad_k) {
    s.key_row += p.leftpad_k[b];
    keys -= p.leftpad_k[b];
  }
  const int64_t diagonal = p.diagonal ? p.diagonal[b] : keys - queries;
  s.mask = fa3_make_mask(queries, keys, diagonal, p.window_left, p.window_right);
  s.query_batch = p.cu_seqlens_q ? 0 : b;
  s.key_batch = p.cu_seqlens_k ? 0 : b;
  return s;
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
#if FA3_BF16
  return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
#else
  return __half22float2(*(const __half2 *)&pair);
#endif
}

// Eight neighbouring columns of a row, beginning at a multiple of eight, are stored or added to
// what is there.
__device__ __forceinline__ void store_gradient(const fa3_gradient &g, int batch, int64_t row,
                                               int head, int column, float (&x)[8]) {
  if (column >= g.head_dim) return;
  const int64_t at = batch * g.stride_batch + row * g.stride_row + head * g.stride_head + column;
  if (g.is_float) {
    float *to = (float *)g.data + at;
    if (g.vectors) {
      float4 low = make_float4(x[0], x[1], x[2], x[3]), high = make_float4(x[4], x[5], x[6], x[7]);
      if (g.accumulate) {
        const float4 a = ((const float4 *)to)[0], b = ((const float4 *)to)[1];
        low.x += a.x, low.y += a.y, low.z += a.z, low.w += a.w;
        high.x += b.x, high.y += b.y, high.z += b.z, high.w += b.w;
      }
      ((float4 *)to)[0] = low;
      ((float4 *)to)[1] = high;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = g.accumulate ? to[i] + x[i] : x[i];
    }
    return;
  }
  uint16_t *to = (uint16_t *)g.data + at;
  uint32_t pairs[4];
  if (g.accumulate) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 old =
          unpack_pair(g.vectors ? ((const uint32_t *)to)[i] : to[2 * i] | to[2 * i + 1] << 16);
      x[2 * i] += old.x, x[2 * i + 1] += old.y;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = pack_pair(x[2 * i], x[2 * i + 1]);
  if (g.vectors) {
    *(uint4 *)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = (uint16_t)pairs[i];
      to[2 * i + 1] = (uint16_t)(pairs[i] >> 16);
    }
  }
}

#endif
