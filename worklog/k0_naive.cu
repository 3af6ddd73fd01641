// K0: attention as the formula says it, one kernel per operation. The scores go to
// global memory, seqlen^2 of them for each head, and come back for every pass.
#include "ladder.cuh"

constexpr int kBlock = 16;  // the scores kernel computes squares of 16 x 16

// S = scale Q K^T, one thread per score.
static __global__ void __launch_bounds__(kBlock *kBlock) k0_scores(attention a) {
  const int key = blockIdx.x * kBlock + threadIdx.x;
  const int query = blockIdx.y * kBlock + threadIdx.y;
  const int batch = blockIdx.z / a.heads, head = blockIdx.z % a.heads;
  const bf16 *q = a.query + row_at(a, batch, query, head);
  const bf16 *k = a.key + row_at(a, batch, key, head);
  float sum = 0.0f;
  for (int d = 0; d < kHeadDim; ++d) sum += __bfloat162float(q[d]) * __bfloat162float(k[d]);
  const bool seen = !a.causal || key <= query;
  a.scores[((int64_t)blockIdx.z * a.seqlen + query) * a.seqlen + key] =
      seen ? sum * kScale : -INFINITY;
}

// P = softmax(S), in place, one warp per row: find the maximum, then the sum, then
// divide.
static __global__ void k0_softmax(attention a) {
  float *row = a.scores + ((int64_t)blockIdx.y * a.seqlen + blockIdx.x) * a.seqlen;
  float top = -INFINITY, sum = 0.0f;
  for (int key = threadIdx.x; key < a.seqlen; key += 32) top = fmaxf(top, row[key]);
  for (int distance = 16; distance > 0; distance /= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, distance));
  for (int key = threadIdx.x; key < a.seqlen; key += 32) sum += expf(row[key] - top);
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  for (int key = threadIdx.x; key < a.seqlen; key += 32) row[key] = expf(row[key] - top) / sum;
}

// O = P V, one thread per output column.
static __global__ void __launch_bounds__(kHeadDim) k0_output(attention a) {
  const int query = blockIdx.x;
  const int batch = blockIdx.y / a.heads, head = blockIdx.y % a.heads;
  const float *p = a.scores + ((int64_t)blockIdx.y * a.seqlen + query) * a.seqlen;
  const bf16 *v = a.value + row_at(a, batch, 0, head) + threadIdx.x;
  float sum = 0.0f;
  for (int key = 0; key < a.seqlen; ++key)
    sum += p[key] * __bfloat162float(v[(int64_t)key * a.heads * kHeadDim]);
  a.out[row_at(a, batch, query, head) + threadIdx.x] = __float2bfloat16(sum);
}

static void launch(const attention &a) {
  const int all_heads = a.batch * a.heads;
  k0_scores<<<dim3(a.seqlen / kBlock, a.seqlen / kBlock, all_heads), dim3(kBlock, kBlock)>>>(a);
  k0_softmax<<<dim3(a.seqlen, all_heads), 32>>>(a);
  k0_output<<<dim3(a.seqlen, all_heads), kHeadDim>>>(a);
}

const step k0_naive = {
    "k0_naive", "scores in global memory", (const void *)k0_scores, kBlock *kBlock, 0, launch,
};
