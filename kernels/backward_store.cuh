// Gradients leave: from wgmma's register layout to global memory.
#ifndef FA3_BACKWARD_STORE_CUH
#define FA3_BACKWARD_STORE_CUH

#include "backward_sequence.cuh"

// Each of a quad's threads has four words, one for each thread of the quad, and gets the one of
// each that is meant for it.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + 2], 2);
    (upper ? x[i] : x[i + 2]) = got;
  }
}

// Zeros in a warpgroup's 64 rows, but only in the first `rows`, where nothing is to be added.
__device__ __forceinline__ void store_zeros(const fa3_gradient &g, int batch, int first_row,
                                            int rows, int head, int thread) {
  if (g.accumulate) return;
  for (int row = thread / 2; row < 64 && row < rows; row += 64)
    for (int column = thread % 2 * 8; column < g.head_dim; column += 16) {
      float zeros[8] = {};
      store_gradient(g, batch, first_row + row, head, column, zeros);
    }
}

// Stores a warpgroup's 64 rows of kColumns, times `factor`. Rows from `rows` on are not stored, nor
// columns left of `from`.
template <int kColumns>
__device__ __forceinline__ void store_rows(const fa3_gradient &g, const float (&x)[kColumns / 2],
                                           float factor, int batch, int first_row, int rows,
                                           int head, int column, int from) {
  const int thread = thread_again() & 127, lane = thread & 3;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // and the one eight below
  const bool packed = !g.is_float && !g.accumulate && g.vectors;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool in_use = row + 8 * r < rows;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 4) {
      // Of each four groups of eight columns this thread gets one, whole.
      const int to = column + 8 * (j + lane);
      const bool stored = in_use && to >= from && to < g.head_dim;
      if (packed) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float *of = x + 4 * (j + i) + 2 * r;
          pairs[i] = pack_pair(of[0] * factor, of[1] * factor);
        }
        transpose_quad(pairs);
        uint16_t *at = (uint16_t *)g.data + batch * g.stride_batch +
                       (int64_t)(first_row + row + 8 * r) * g.stride_row + head * g.stride_head +
                       to;
        if (stored) *(uint4 *)at = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
        uint32_t even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          even[i] = __float_as_uint(x[4 * (j + i) + 2 * r] * factor);
          odd[i] = __float_as_uint(x[4 * (j + i) + 2 * r + 1] * factor);
        }
        transpose_quad(even);
        transpose_quad(odd);
        float whole[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          whole[2 * i] = __uint_as_float(even[i]);
          whole[2 * i + 1] = __uint_as_float(odd[i]);
        }
        if (stored) store_gradient(g, batch, first_row + row + 8 * r, head, to, whole);
      }
    }
  }
}

#endif
