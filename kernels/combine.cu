// Partial results of attention become one: output = sum of output_i * exp(lse_i - lse), where lse
// is the logarithm of the sum of exp(lse_i). A warp has a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "combine_params.h"
#include "registers.cuh"

__device__ __forceinline__ float reduce_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max_nan(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

__device__ __forceinline__ float reduce_add(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

__device__ __forceinline__ void store(const fa3_combine_params &p, int64_t at, float x) {
  if (p.kind == FA3_COMBINE_FLOAT32)
    ((float *)p.output)[at] = x;
  else if (p.kind == FA3_COMBINE_FLOAT16)
    ((__half *)p.output)[at] = __float2half_rn(x);
  else
    ((__nv_bfloat16 *)p.output)[at] = __float2bfloat16_rn(x);
}

// What an average counts for, against the greatest.
__device__ __forceinline__ float weight_of(const fa3_combine_params &p, int64_t at, int split,
                                           float top) {
  if (split >= p.splits) return 0.0f;
  const float lse = p.partial_lse[at + split * p.partial_lse_strides.split];
  return lse == -INFINITY ? 0.0f : exp2_unit((lse - top) * 1.44269504f);
}

extern "C" __global__ void __launch_bounds__(FA3_COMBINE_THREADS)
    combine(const __grid_constant__ fa3_combine_params p) {
  const int lane = threadIdx.x & 31, batch = blockIdx.y;
  const int64_t index = (int64_t)blockIdx.x * FA3_COMBINE_ROWS + threadIdx.x / 32;
  const int query = (int)(index / p.heads), head = (int)(index % p.heads);
  wait_for_prior_grids();
  const int first = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
  const int queries = p.used_q         ? p.used_q[batch]
                      : p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - first
                                       : p.seqlen_q;
  if (query >= queries) return;
  auto offset = [&](const fa3_combine_strides &strides, int row) {
    return batch * strides.batch + (int64_t)row * strides.row + head * strides.head;
  };

  const int64_t lse_at = offset(p.partial_lse_strides, query);
  float top = -INFINITY;
  for (int s = lane; s < p.splits; s += 32)
    top = max_nan(top, p.partial_lse[lse_at + s * p.partial_lse_strides.split]);
  top = reduce_max(top);
  float sink = -INFINITY;
  if (p.sink != nullptr) {
    sink = p.sink[head];
    top = max_nan(top, sink);
  }
  float sum = 0.0f;
  for (int s = lane; s < p.splits; s += 32) sum += weight_of(p, lse_at, s, top);
  sum = reduce_add(sum);
  if (sink != -INFINITY) sum += exp2_unit((sink - top) * 1.44269504f);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;

  const float *const partial = p.partial + offset(p.partial_strides, query);
  const int64_t output = offset(p.output_strides, first + query);
  for (int column = lane; column - lane < p.head_dim; column += 128) {
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int begin = 0; begin < p.splits; begin += 32) {
      const float weight = weight_of(p, lse_at, begin + lane, top);
      const int end = min(p.splits - begin, 32);
#pragma unroll 8
      for (int s = 0; s < end; ++s) {
        const float w = __shfl_sync(0xffffffff, weight, s);
        const float *const from = partial + (begin + s) * p.partial_strides.split + column;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool read = w != 0.0f && column + 32 * i < p.head_dim;
          x[i] += read ? w * from[32 * i] : 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + 32 * i < p.head_dim) store(p, output + column + 32 * i, x[i] * factor);
  }
  if (lane == 0 && p.lse != nullptr)
    p.lse[offset(p.lse_strides, first + query)] =
        sum == 0.0f ? -INFINITY : fmaf(log2_unit(sum), 0.69314718f, top);
}
