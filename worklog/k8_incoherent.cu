// K8: FP8 with incoherent processing (FlashAttention-3, section 3.3). New since K7:
// - before they become codes, the rows of Q and K are turned by one random orthogonal
//   matrix M. Scores stay what they were, (M q) . (M k) = q . k. But where one large product
//   made a score, and the rounding of one code its error, there are 128 of ordinary size, and
//   their errors average out;
// - M is random signs, then the Hadamard matrix: 7 rounds of sums and differences of pairs.
// The attention kernel is K7's: it cannot know.
#include "quantise.cuh"

// Sums and differences of the columns whose numbers differ in one bit, for all bits: three
// among a thread's own eight columns, four between the threads of a row.
static __device__ __forceinline__ void hadamard(float (&x)[kColumns]) {
#pragma unroll
  for (int bit = 1; bit < kColumns; bit *= 2)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      if ((j & bit) == 0) {
        const float low = x[j], high = x[j + bit];
        x[j] = low + high;
        x[j + bit] = low - high;
      }
#pragma unroll
  for (int bit = 1; bit < kRowThreads; bit *= 2)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float other = __shfl_xor_sync(0xffffffff, x[j], bit);
      x[j] = threadIdx.x & bit ? other - x[j] : x[j] + other;
    }
}

static __device__ __forceinline__ void rotate_rows(block_of_rows &b) {
  const int first = threadIdx.x % kRowThreads * kColumns;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) b.x[i][j] *= random_sign(first + j) * kScale;  // 1/sqrt(128)
    hadamard(b.x[i]);
  }
}

static __global__ void __launch_bounds__(kQuantiseThreads) k8_quantise(attention a) {
  block_of_rows b;
  load_rows(b, a);
  if (tensor_of_block() != kValue) rotate_rows(b);
  store_codes(b, a);
}

static void quantise(const attention &a) {
  k8_quantise<<<quantise_grid(a), kQuantiseThreads>>>(a);
}

const step k8_incoherent = {
    "k8_incoherent",
    "FP8, Q and K rotated",
    (const void *)k8_quantise,
    kQuantiseThreads,
    0,
    attend_to_codes,
    quantise,
    true,
};
