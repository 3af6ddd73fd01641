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

// Stores eight neighbouring columns of a row. Each thread of a quad has two columns, `even` and
// `odd`, of the four groups of eight that the quad stores, and gets one group whole.
__device__ __forceinline__ void store_group(const fa3_gradient &g, const float (&even)[4],
                                            const float (&odd)[4], bool stored, int batch,
                                            int64_t row, int head, int column) {
  if (!g.is_float && !g.accumulate && g.vectors) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_pair(even[i], odd[i]);
    transpose_quad(pairs);
    uint16_t *at = (uint16_t *)g.data + batch * g.stride_batch + row * g.stride_row +
                   head * g.stride_head + column;
    if (stored) *(uint4 *)at = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
  uint32_t first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    first[i] = __float_as_uint(even[i]);
    second[i] = __float_as_uint(odd[i]);
  }
  transpose_quad(first);
  transpose_quad(second);
  float whole[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    whole[2 * i] = __uint_as_float(first[i]);
    whole[2 * i + 1] = __uint_as_float(second[i]);
  }
  if (stored) store_gradient(g, batch, row, head, column, whole);
}

// Stores a warpgroup's 64 rows of kColumns, times `factor`. Rows from `rows` on are not stored, nor
// columns left of `from`.
template <int kColumns>
__device__ __forceinline__ void store_rows(const fa3_gradient &g, const float (&x)[kColumns / 2],
                                           float factor, int batch, int first_row, int rows,
                                           int head, int column, int from) {
  const int thread = thread_again() & 127, lane = thread & 3;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // and the one eight below
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 4) {
      float even[4], odd[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *of = x + 4 * (j + i) + 2 * r;
        even[i] = of[0] * factor;
        odd[i] = of[1] * factor;
      }
      const int to = column + 8 * (j + lane);
      const bool stored = row + 8 * r < rows && to >= from && to < g.head_dim;
      store_group(g, even, odd, stored, batch, first_row + row + 8 * r, head, to);
    }
  }
}

// The same of kRows rows and 64 columns, where x has columns as rows.
template <int kRows>
__device__ __forceinline__ void store_columns(const fa3_gradient &g, const float (&x)[kRows / 2],
                                              float factor, int batch, int first_row, int rows,
                                              int head, int column) {
  const int thread = thread_again() & 127, lane = thread & 31;
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    float even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Two rows of eight, and eight columns: transposed by halves of a float.
      const float *of = x + 4 * (j + i / 2) + 2 * (i % 2);
      const uint32_t a = __float_as_uint(of[0] * factor), b = __float_as_uint(of[1] * factor);
      const uint32_t low = transpose_matrix(__byte_perm(a, b, 0x5410));
      const uint32_t high = transpose_matrix(__byte_perm(a, b, 0x7632));
      even[i] = __uint_as_float(__byte_perm(low, high, 0x5410));
      odd[i] = __uint_as_float(__byte_perm(low, high, 0x7632));
    }
    const int row = 8 * (j + lane % 4 / 2) + lane / 4;
    const int to = column + thread / 32 * 16 + lane % 2 * 8;
    store_group(g, even, odd, row < rows && to < g.head_dim, batch, first_row + row, head, to);
  }
}

#endif
