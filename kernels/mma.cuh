// Matrix products of one warp: small tiles, no order between warps.
#ifndef FA3_MMA_CUH
#define FA3_MMA_CUH

#include <stdint.h>

#if FA3_BF16
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
#define MMA_TYPES "f32.f16.f16.f32"
#endif

// PTX ISA, "mma.m16n8k16": D = A B + D. Lane l holds, with g = l / 4 and t = l % 4, of D rows g and
// g + 8 and columns 2t and 2t + 1.
__device__ __forceinline__ void mma_16_8_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES
      " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
