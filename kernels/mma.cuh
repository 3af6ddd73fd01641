// Matrix products of one warp, and what brings their operands: small tiles, no order between warps.
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

// PTX ISA, "cp.async": 16 bytes from global to shared memory, past the first cache; zeros if not
// `valid`, and then nothing is read.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// PTX ISA, "cp.async.commit_group".
__device__ __forceinline__ void copy_async_commit(void) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA, "cp.async.wait_group": of this thread's groups at most the latest `kPending` are under
// way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait(void) {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif
