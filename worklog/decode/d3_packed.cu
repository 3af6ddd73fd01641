// D3: packed heads. New since D2: a block serves all query heads that share its keys, so
// that each key is read once and not four times.
#include "decode.cuh"

static __global__ void __launch_bounds__(kThreads) d3_kernel(decoding d) {
  __shared__ partial result[kGroup];
  const int split = blockIdx.x, first = blockIdx.y * kGroup, batch = blockIdx.z;
  attend<kGroup, false>(d, batch, first, split_begin(d, split), split_begin(d, split + 1), result);
  for (int h = 0; h < kGroup; ++h) store_partial(d, batch, first + h, split, result[h]);
  if (last_to_arrive(d, batch, first)) combine_splits(d, batch, first, kGroup);
}

static void launch(const decoding &d, cudaStream_t stream) {
  d3_kernel<<<dim3(d.splits, d.heads_k, d.batch), kThreads, 0, stream>>>(d);
}

const step d3_packed = {"d3_packed", "packed heads", (const void *)d3_kernel, kGroup, true,
                        false,       launch};
