// D0: a block of threads for each query head. Its 8 teams take keys in turn; at the end
// their results are combined. With one sequence of 32 heads, 32 of 132 multiprocessors work.
#include "decode.cuh"

static __global__ void __launch_bounds__(kThreads) d0_kernel(decoding d) {
  __shared__ partial result[1];
  const int head = blockIdx.x, batch = blockIdx.y;
  attend<1, false>(d, batch, head, 0, d.keys, result);
  if (threadIdx.x < kHeadDim)
    d.out[((int64_t)batch * d.heads_q + head) * kHeadDim + threadIdx.x] =
        __float2bfloat16(result[0].out[threadIdx.x] / result[0].sum);
}

static void launch(const decoding &d, cudaStream_t stream) {
  d0_kernel<<<dim3(d.heads_q, d.batch), kThreads, 0, stream>>>(d);
}

const step d0_block = {"d0_block", "one block a head", (const void *)d0_kernel, 1, false, false,
                       launch};
