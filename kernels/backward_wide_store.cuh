// How the wide backward kernel's gradients leave: the sums of dK and dV from registers, through a
// little shared memory; those of dQ by way of global memory.
#ifndef FA3_BACKWARD_WIDE_STORE_CUH
#define FA3_BACKWARD_WIDE_STORE_CUH

#include "backward_wide_work.cuh"
#include "counters.cuh"

__device__ __forceinline__ void load_four_shared(float *x, uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

// Each thread of a quad holds two neighbouring columns of four groups of eight; then each holds
// the eight columns of one group, the quad's first thread of the first group.
__device__ __forceinline__ void exchange_in_quad(float (&x)[8], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &low = x[2 * i + e], &high = x[2 * (i + bit) + e];
        const float other = __shfl_xor_sync(0xffffffff, upper ? low : high, bit);
        if (upper)
          low = other;
        else
          high = other;
      }
    }
  }
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

// Written in 16 bits, and 16 bytes at a time: the common case.
__device__ __forceinline__ bool is_plain(const fa3_gradient &g) {
  return g.vectors && !g.is_float && !g.accumulate;
}

__device__ __forceinline__ uint4 pack_eight(const float *x) {
  return make_uint4(pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]),
                    pack_pair(x[6], x[7]));
}

// A warp's 16 rows of a gradient, as the accumulators of a warpgroup hold them (or zeros), leave
// through 2 KB of shared memory, 64 columns at a time.
template <int kColumns>
__device__ __forceinline__ void store_plain_rows(const fa3_gradient &g,
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
__device__ __forceinline__ void store_rows(const fa3_gradient &g, const float (&d)[kColumns / 2],
                                           int any, float scale, uint32_t stage, int batch, int row,
                                           int rows, int head) {
  if (is_plain(g))
    return store_plain_rows<kColumns>(g, d, any, scale, stage, batch, row, rows, head);
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

// A block of dQ leaves: each thread reads what it has added to itself.
template <int kColumns>
__device__ __forceinline__ void store_sums(const fa3_gradient &g, const float *partial, float scale,
                                           int batch, int row, int rows, int head, int column) {
  const int thread = thread_again() & 127, lane = thread & 31;
  const int in_tile = thread / 32 * 16 + lane / 4;
  auto load_eight = [&](int j, float(&x)[2][8]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 sum = load_four(partial + (j + k) * 512);
      x[0][2 * k] = sum.x * scale, x[0][2 * k + 1] = sum.y * scale;
      x[1][2 * k] = sum.z * scale, x[1][2 * k + 1] = sum.w * scale;
    }
  };
  if (is_plain(g)) {
    constexpr int kAtOnce = kColumns / 64;  // half of the row, or registers run out
#pragma unroll
    for (int first = 0; first < 2 * kAtOnce; first += kAtOnce) {
      float x[kAtOnce][2][8];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) load_eight(4 * (first + j), x[j]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint16_t *to = (uint16_t *)g.data + batch * g.stride_batch +
                       (row + in_tile + 8 * r) * g.stride_row + head * g.stride_head;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          exchange_in_quad(x[j][r], lane);
          const int at = column + 8 * (4 * (first + j) + (lane & 3));
          if (in_tile + 8 * r < rows && at < g.head_dim) *(uint4 *)(to + at) = pack_eight(x[j][r]);
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < kColumns / 8; j += 4) {
    float x[2][8];
    load_eight(j, x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      exchange_in_quad(x[r], lane);
      if (in_tile + 8 * r < rows)
        store_gradient(g, batch, row + in_tile + 8 * r, head, column + 8 * (j + (lane & 3)), x[r]);
    }
  }
}

#endif
