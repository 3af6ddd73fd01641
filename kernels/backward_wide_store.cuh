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

// This block's 64 keys of a gradient leave, 16 of each warp, by way of 2 KB of shared memory; zeros
// where no query sees them.
template <int kColumns>
__device__ __forceinline__ void store_block(const fa3_backward_params &p, const fa3_gradient &g,
                                            const float (&d)[kColumns / 2], bool any, float factor,
                                            uint32_t staging, const work &w) {
  const int thread = thread_again() & 127, first = any ? w.first + thread / 32 * 16 : w.first;
  const int key_row = w.sequence.key_row + first, keys = w.sequence.mask.keys - first;
  if (any)
    store_warp_rows<kColumns, 64>(g, d, factor, w.sequence.key_batch, key_row, keys,
                                  number_of_part(p, w), staging);
  else
    store_zeros(g, w.sequence.key_batch, key_row, keys, number_of_part(p, w), thread);
}

// Four groups of eight columns of what each thread has added to itself.
struct dq_sums {
  float4 of_columns[4];  // of each group two columns of two rows, eight apart
};

__device__ __forceinline__ dq_sums load_sums(const float *partial, int group) {
  dq_sums sums;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    sums.of_columns[k] = load_relaxed((const float4 *)(partial + (4 * group + k) * 512));
  return sums;
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
