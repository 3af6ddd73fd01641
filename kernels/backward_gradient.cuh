// How eight elements of a gradient are stored: for all the backward kernels.
#ifndef FA3_BACKWARD_GRADIENT_CUH
#define FA3_BACKWARD_GRADIENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backward_params.h"
#include "registers.cuh"

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
