// D2: no second kernel. New since D1: each block counts itself in when its result is stored,
// and the last of a head combines them all.
#include "decode.cuh"

static __global__ void __launch_bounds__(kThreads) d2_kernel(decoding d) {
  __shared__ partial result[1];
  const int split = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  attend<1, false>(d, batch, head, split_begin(d, split), split_begin(d, split + 1), result);
  store_partial(d, batch, head, split, result[0]);
  if (last_to_arrive(d, batch, head)) combine_splits(d, batch, head, 1);
}

static void launch(const decoding &d, cudaStream_t stream) {
  d2_kernel<<<dim3(d.splits, d.heads_q, d.batch), kThreads, 0, stream>>>(d);
}

const step d2_combine = {
    "d2_combine", "the last block combines", (const void *)d2_kernel, 1, true, false, launch};
