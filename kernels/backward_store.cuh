// Gradients leave: from wgmma's register layout to global memory.
#ifndef FA3_BACKWARD_STORE_CUH
#define FA3_BACKWARD_STORE_CUH

#include "backward_gradient.cuh"
#include "registers.cuh"

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

// Written in 16 bits, and 16 bytes at a time: the common case.
__device__ __forceinline__ bool is_plain(const fa3_gradient &g) {
  return g.vectors && !g.is_float && !g.accumulate;
}

// Stores eight neighbouring columns of a row. Each thread of a quad has two columns, `even` and
// `odd`, of the four groups of eight that the quad stores, and gets one group whole.
__device__ __forceinline__ void store_group(const fa3_gradient &g, const float (&even)[4],
                                            const float (&odd)[4], bool stored, int batch,
                                            int64_t row, int head, int column) {
  if (is_plain(g)) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_pair(even[i], odd[i]);
    transpose_quad(pairs);
    uint16_t *at = (uint16_t *)g.data + batch * g.stride_batch + row * g.stride_row +
                   head * g.stride_head + column;
    store_vector_if(stored, at, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
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

// Stores a warpgroup's 64 rows of kColumns, a multiple of eight, times `factor`. Rows from `rows`
// on are not stored, nor columns left of `from`.
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
        const bool exists = j + i < kColumns / 8;
        const float *of = x + (exists ? 4 * (j + i) + 2 * r : 0);
        even[i] = exists ? of[0] * factor : 0.0f;
        odd[i] = exists ? of[1] * factor : 0.0f;
      }
      const int to = column + 8 * (j + lane);
      const bool stored =
          row + 8 * r < rows && j + lane < kColumns / 8 && to >= from && to < g.head_dim;
      store_group(g, even, odd, stored, batch, first_row + row + 8 * r, head, to);
    }
  }
}

// Where 16 bytes of a warp's row lie in shared memory, so that neither way of writing rows nor
// reading them makes lanes wait for each other. The warp has 16 rows of 2 * kColumns bytes.
template <int kColumns>
__device__ __forceinline__ uint32_t staged_at(uint32_t staging, int row, int piece) {
  const int swizzle = kColumns % 64 ? row >> 1 & 3 : (row & 3) << 1 | (row >> 2 & 1);
  return staging + row * (2 * kColumns) + ((piece ^ swizzle) << 4);
}

// A lane's share of a warp's 16 rows.
template <int kColumns>
struct warp_rows {
  uint4 pieces[kColumns / 16];
};

// kColumns of a warp's 16 rows, times `factor`, from wgmma's layout to rows in shared memory.
template <int kColumns>
__device__ __forceinline__ void stage_rows(const float *x, float factor, uint32_t staging) {
  const int lane = thread_again() & 31;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    const float *of = x + 4 * j;
    store_matrices(
        staged_at<kColumns>(staging, lane & 15, j + lane / 16),
        pack_pair(of[0] * factor, of[1] * factor), pack_pair(of[2] * factor, of[3] * factor),
        pack_pair(of[4] * factor, of[5] * factor), pack_pair(of[6] * factor, of[7] * factor));
  }
  __syncwarp();
}

template <int kColumns>
__device__ __forceinline__ warp_rows<kColumns> read_staged_rows(uint32_t staging) {
  constexpr int kPieces = kColumns / 8;  // of a row
  const int lane = thread_again() & 31;
  warp_rows<kColumns> rows;
#pragma unroll
  for (int i = 0; i < kPieces / 2; ++i)
    rows.pieces[i] = load_shared_vector(
        staged_at<kColumns>(staging, (32 * i + lane) / kPieces, (32 * i + lane) % kPieces));
  __syncwarp();
  return rows;
}

// They leave; `bytes` are those of an element. Rows from `rows` on are not stored, nor columns
// beyond the head dim.
template <int kColumns>
__device__ __forceinline__ void store_read_rows(const fa3_gradient &g, int bytes, int64_t first,
                                                int rows, int column,
                                                const warp_rows<kColumns> &read) {
  constexpr int kPieces = kColumns / 8;
  const int lane = thread_again() & 31;
  unsigned char *to = (unsigned char *)g.data + bytes * (first + column);
#pragma unroll
  for (int i = 0; i < kPieces / 2; ++i) {
    const int row = (32 * i + lane) / kPieces, piece = (32 * i + lane) % kPieces;
    store_vector_if(row < rows && column * bytes + 16 * piece < g.head_dim * bytes,
                    to + bytes * row * g.stride_row + 16 * piece, read.pieces[i]);
  }
}

// Stores a warp's 16 rows of kColumns, times `factor`, by way of 32 * kStaged bytes of shared
// memory that are the warp's own: so many columns at a time, or half as many of float32. Rows from
// `rows` on are not stored.
template <int kColumns, int kStaged>
__device__ __forceinline__ void store_warp_rows(const fa3_gradient &g,
                                                const float (&x)[kColumns / 2], float factor,
                                                int batch, int64_t first_row, int rows, int head,
                                                uint32_t staging) {
  const int64_t first = batch * g.stride_batch + first_row * g.stride_row + head * g.stride_head;
  const bool whole = !g.accumulate && g.vectors;
  if (whole && !g.is_float) {
#pragma unroll
    for (int column = 0; column < kColumns; column += kStaged) {
      stage_rows<kStaged>(x + column / 2, factor, staging);
      store_read_rows(g, 2, first, rows, column, read_staged_rows<kStaged>(staging));
    }
    return;
  }
  constexpr int kFloats = kStaged / 2;
#pragma unroll 1
  for (int column = 0; column < kColumns; column += kFloats) {
    // Not known to the compiler, or it computes everything before the loop, and spills.
    const int lane = thread_again() & 31;
    asm volatile("" : "+f"(factor), "+r"(staging));
    // Which registers these are has to be known when this is compiled; the rest is there once.
#pragma unroll
    for (int known = 0; known < kColumns; known += kFloats) {
      if (known != column) continue;
#pragma unroll
      for (int j = 0; j < kFloats / 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float *of = x + known / 2 + 4 * j + 2 * r;
          store_shared_pair(
              staged_at<kStaged>(staging, lane / 4 + 8 * r, 2 * j + lane % 4 / 2) + lane % 2 * 8,
              of[0] * factor, of[1] * factor);
        }
      }
    }
    __syncwarp();
    if (whole) {
      store_read_rows(g, 4, first, rows, column, read_staged_rows<kStaged>(staging));
    } else {
      constexpr int kGroups = kFloats / 8;  // of eight columns
#pragma unroll 1
      for (int i = lane; i < 16 * kGroups; i += 32) {
        const int row = i / kGroups, group = i % kGroups;
        const uint4 low = load_shared_vector(staged_at<kStaged>(staging, row, 2 * group)),
                    high = load_shared_vector(staged_at<kStaged>(staging, row, 2 * group + 1));
        float eight[8] = {__uint_as_float(low.x),  __uint_as_float(low.y),  __uint_as_float(low.z),
                          __uint_as_float(low.w),  __uint_as_float(high.x), __uint_as_float(high.y),
                          __uint_as_float(high.z), __uint_as_float(high.w)};
        if (row < rows) store_gradient(g, batch, first_row + row, head, column + 8 * group, eight);
      }
    }
    __syncwarp();
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
      const float *of = x + (j + i / 2 < kRows / 8 ? 4 * (j + i / 2) + 2 * (i % 2) : 0);
      const uint32_t a = __float_as_uint(of[0] * factor), b = __float_as_uint(of[1] * factor);
      const uint32_t low = transpose_matrix(__byte_perm(a, b, 0x5410));
      const uint32_t high = transpose_matrix(__byte_perm(a, b, 0x7632));
      even[i] = __uint_as_float(__byte_perm(low, high, 0x5410));
      odd[i] = __uint_as_float(__byte_perm(low, high, 0x7632));
    }
    const int eight = j + lane % 4 / 2, row = 8 * eight + lane / 4;
    const int to = column + thread / 32 * 16 + lane % 2 * 8;
    const bool stored = eight < kRows / 8 && row < rows && to < g.head_dim;
    store_group(g, even, odd, stored, batch, first_row + row, head, to);
  }
}

#endif
