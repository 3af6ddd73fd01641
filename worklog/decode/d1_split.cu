// D1: split keys (flash decode). New since D0: several blocks share a head's keys, so that
// all multiprocessors work. Each leaves its maximum, sum and output; a second kernel
// combines them, as the online softmax combines tiles.
#include "decode.cuh"

static __global__ void __launch_bounds__(kThreads) d1_kernel(decoding d) {
  __shared__ partial result[1];
  const int split = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  attend<1, false>(d, batch, head, split_begin(d, split), split_begin(d, split + 1), result);
  store_partial(d, batch, head, split, result[0]);
}

static __global__ void d1_combine(decoding d) {
  combine_splits(d, blockIdx.y, blockIdx.x, 1);
}

static void launch(const decoding &d, cudaStream_t stream) {
  d1_kernel<<<dim3(d.splits, d.heads_q, d.batch), kThreads, 0, stream>>>(d);
  d1_combine<<<dim3(d.heads_q, d.batch), kHeadDim, 0, stream>>>(d);
}

const step d1_split = {
    "d1_split", "split keys, combined by a second kernel", (const void *)d1_kernel, 1, true, false,
    launch};
