// D4: pages. New since D3: the cache is a pool of pages of 16 keys, in any order, and a table
// says which are a sequence's. What changes is one line: where a key lies (key_at).
#include "decode.cuh"

static __global__ void __launch_bounds__(kThreads) d4_kernel(decoding d) {
  __shared__ partial result[kGroup];
  const int split = blockIdx.x, first = blockIdx.y * kGroup, batch = blockIdx.z;
  attend<kGroup, true>(d, batch, first, split_begin(d, split), split_begin(d, split + 1), result);
  for (int h = 0; h < kGroup; ++h) store_partial(d, batch, first + h, split, result[h]);
  if (last_to_arrive(d, batch, first)) combine_splits(d, batch, first, kGroup);
}

static void launch(const decoding &d, cudaStream_t stream) {
  d4_kernel<<<dim3(d.splits, d.heads_k, d.batch), kThreads, 0, stream>>>(d);
}

const step d4_pages = {"d4_pages", "pages", (const void *)d4_kernel, kGroup, true, true, launch};
