// The slow path for tensors that the copy engine can't take (a stride that is 0 or no multiple of
// 16 bytes, an unaligned start, logits of the sink in 16 bits): inputs are made contiguous in the
// workspace before the attention kernel runs, outputs are put in their place after it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "strided_params.h"

extern "C" __global__ void __launch_bounds__(FA3_STRIDED_THREADS)
    copy_strided(const __grid_constant__ fa3_copy_params p) {
  const int batch = blockIdx.y;
  const int64_t first = p.cu_seqlens ? p.cu_seqlens[batch] : 0;
  int64_t rows = p.cu_seqlens ? p.cu_seqlens[batch + 1] - first : p.rows;
  if (p.used) rows = p.used[batch];
  rows = min(rows, p.rows);
  const uint16_t *from = p.from.data + first * p.from.stride_row;
  uint16_t *to = p.to.data + first * p.to.stride_row;
  if (!p.cu_seqlens) {
    from += batch * p.from.stride_batch;
    to += batch * p.to.stride_batch;
  }
  const int64_t row_elements = (int64_t)p.heads * p.dims;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * row_elements;
       i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t row = i / row_elements;
    const int rest = (int)(i - row * row_elements), head = rest / p.dims, dim = rest % p.dims;
    to[row * p.to.stride_row + head * p.to.stride_head + dim] =
        from[row * p.from.stride_row + head * p.from.stride_head + dim] ^ p.flip;
  }
}

extern "C" __global__ void __launch_bounds__(FA3_STRIDED_THREADS)
    sinks_to_float(const __grid_constant__ fa3_sink_params p) {
  for (int head = threadIdx.x; head < p.heads; head += blockDim.x) {
    const int64_t at = head * p.stride;
    p.to[head] = p.kind == 0   ? ((const float *)p.from)[at]
                 : p.kind == 1 ? __half2float(((const __half *)p.from)[at])
                               : __bfloat162float(((const __nv_bfloat16 *)p.from)[at]);
  }
}
