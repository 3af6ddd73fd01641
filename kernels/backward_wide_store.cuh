// How the wide backward kernel's gradients leave: the sums of dK and dV from registers, through a
// little shared memory; those of dQ by way of global memory.
#ifndef FA3_BACKWARD_WIDE_STORE_CUH
#define FA3_BACKWARD_WIDE_STORE_CUH

#include "backward_store.cuh"
#include "backward_wide_work.cuh"
#include "counters.cuh"

__device__ __forceinline__ void load_four_shared(float *x, uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

// PTX ISA, "red" with vectors: to what other blocks have added up in `partial`.
__device__ __forceinline__ void add_four(float *to, const float *x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ void store_four(float *to, const float *x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ float4 load_four(const float *from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// A warp's 16 rows of a gradient, as the accumulators of a warpgroup hold them (or zeros), leave
// through 2 KB of shared memory, 64 columns at a time.
template <int kColumns>
__device__ __forceinline__ void stage_plain_rows(const fa3_gradient &g,
                                                 const float (&d)[kColumns / 2], int any,
                                                 float scale, uint32_t stage, int batch, int row,
                                                 int rows, int head) {
  const int lane = thread_again() & 31;
  asm volatile("" : "+f"(scale), "+r"(any), "+r"(stage));
  uint16_t *to = (uint16_t *)g.data + batch * g.stride_batch + (row + lane / 8) * g.stride_row +
                 head * g.stride_head + 8 * (lane & 7);
#pragma unroll
  for (int c = 0; c < kColumns; c += 64) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float *x = d + (c / 8 + j) * 4;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = any ? pack_pair(x[2 * i] * scale, x[2 * i + 1] * scale) : 0;
      store_matrices(stage + (lane & 15) * 128 + (((j + lane / 16) ^ (lane & 7)) << 4), pairs[0],
                     pairs[1], pairs[2], pairs[3]);
    }
    __syncwarp();
    float x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_tile = 4 * i + lane / 8;
      load_four_shared(x[i], stage + in_tile * 128 + (((lane ^ in_tile) & 7) << 4));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * i + lane / 8 < rows && c + 8 * (lane & 7) < g.head_dim)
        *(float4 *)(to + 4 * i * g.stride_row + c) =
            make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
    __syncwarp();
  }
}

// Eight neighbouring floats of a row of `kColumns` in shared memory, in blocks of 32 bytes that
// trade places from row to row, so that no bank is asked twice.
template <int kColumns>
__device__ __forceinline__ uint32_t staged(int row, int column) {
  const int block = column / 8 ^ row & (kColumns / 8 - 1);
  return row * kColumns * 4 + block * 32 + column % 8 * 4;
}

// The same for any gradient, `kStaged` columns at a time.
template <int kColumns, int kStaged>
__device__ __forceinline__ void stage_rows(const fa3_gradient &g, const float (&d)[kColumns / 2],
                                           int any, float scale, uint32_t stage, int batch, int row,
                                           int rows, int head) {
  if (is_plain(g))
    return stage_plain_rows<kColumns>(g, d, any, scale, stage, batch, row, rows, head);
#pragma unroll 1
  for (int c = 0; c < kColumns; c += kStaged) {
    // Not known to the compiler, or it computes everything before the loop, and spills.
    const int lane = thread_again() & 31;
    asm volatile("" : "+f"(scale), "+r"(any), "+r"(stage));
#pragma unroll
    for (int k = 0; k < kColumns; k += kStaged) {
      if (k != c) continue;
#pragma unroll
      for (int i = 0; i < kStaged / 4; ++i) {  // pairs of columns
        const float *x = d + k / 2 + 2 * i;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                         stage + staged<kStaged>(lane / 4 + i % 2 * 8, i / 2 * 8 + 2 * (lane & 3))),
                     "f"(any ? x[0] * scale : 0.0f), "f"(any ? x[1] * scale : 0.0f)
                     : "memory");
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 16 * kStaged / 8; i += 32) {
      const int in_tile = i / (kStaged / 8), column = i % (kStaged / 8) * 8;
      if (in_tile >= rows) break;
      float x[8];
      const uint32_t from = stage + staged<kStaged>(in_tile, column);
      load_four_shared(x, from);
      load_four_shared(x + 4, from + 16);
      store_gradient(g, batch, row + in_tile, head, c + column, x);
    }
    __syncwarp();
  }
}

// This block's 64 keys of a gradient leave, 16 of each warp.
template <int kColumns, int kStaged>
__device__ __forceinline__ void store_block(const fa3_gradient &g, const float (&d)[kColumns / 2],
                                            int any, float scale, uint32_t stage, const work &w) {
  const int first = w.first + (thread_again() & 127) / 32 * 16;
  stage_rows<kColumns, kStaged>(g, d, any, scale, stage, w.sequence.key_batch,
                                w.sequence.key_row + first, w.sequence.mask.keys - first, w.part);
}

// Four groups of eight columns of what each thread has added to itself.
struct dq_sums {
  float4 of_columns[4];  // of each group two columns of two rows, eight apart
};

__device__ __forceinline__ dq_sums load_sums(const float *partial, int group) {
  dq_sums sums;
#pragma unroll
  for (int k = 0; k < 4; ++k) sums.of_columns[k] = load_four(partial + (4 * group + k) * 512);
  return sums;
}

__device__ __forceinline__ void add_sums(dq_sums &to, const dq_sums &sums) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float4 &x = to.of_columns[k];
    const float4 &y = sums.of_columns[k];
    x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
  }
}

// `rows` from `row` on are in the sequence.
__device__ __forceinline__ void store_sums(const fa3_gradient &g, const dq_sums &sums, float scale,
                                           int batch, int row, int rows, int head, int column) {
  const int thread = thread_again() & 127, lane = thread & 31;
  const int in_tile = thread / 32 * 16 + lane / 4, to = column + 8 * (lane & 3);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even[4], odd[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 &x = sums.of_columns[k];
      even[k] = (r ? x.z : x.x) * scale;
      odd[k] = (r ? x.w : x.y) * scale;
    }
    store_group(g, even, odd, in_tile + 8 * r < rows && to < g.head_dim, batch,
                row + in_tile + 8 * r, head, to);
  }
}

// A block of dQ leaves, kColumns of it.
template <int kColumns>
__device__ __forceinline__ void store_dq(const fa3_gradient &g, const float *partial, float scale,
                                         int batch, int row, int rows, int head, int column) {
  if (is_plain(g)) {
    constexpr int kAtOnce = kColumns / 64;  // half of the row, or registers run out
#pragma unroll
    for (int first = 0; first < 2 * kAtOnce; first += kAtOnce) {
      dq_sums sums[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sums[j] = load_sums(partial, first + j);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        store_sums(g, sums[j], scale, batch, row, rows, head, column + 32 * (first + j));
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < kColumns / 32; ++j)
    store_sums(g, load_sums(partial, j), scale, batch, row, rows, head, column + 32 * j);
}

#endif
