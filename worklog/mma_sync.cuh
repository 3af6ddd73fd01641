// The matrix and copy instructions of the generation before Hopper, which K2 and
// K3 use, one wrapper each. A warp multiplies; the operands come from shared
// memory through registers.
#ifndef WORKLOG_MMA_SYNC_CUH
#define WORKLOG_MMA_SYNC_CUH

#include <stdint.h>

// PTX ISA, "mma": D += A B, with A 16 x 16, B 16 x 8, bf16, and D 16 x 8, float.
// Lane t holds D[t/4][2(t%4) + {0,1}] in d[0..1] and row t/4 + 8 in d[2..3].
__device__ __forceinline__ void mma_16x8x16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// PTX ISA, "ldmatrix": four 8 x 8 matrices of 16-bit values; lane i gives the
// address of row i % 8 of matrix i / 8, and gets two neighbours of row i / 4 of
// each.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same with .trans: each matrix is transposed on the way.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#endif
