// Barriers in shared memory (PTX ISA, "Parallel Synchronization and
// Communication Instructions: mbarrier"). A phase ends when the expected
// arrivals and the expected bytes are in; a waiter names the parity of the
// phase that it waits for.
#ifndef FA3_MBARRIER_CUH
#define FA3_MBARRIER_CUH

#include <stdint.h>

// PTX ISA, "mbarrier.init".
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// PTX ISA, "fence.mbarrier_init": makes the inits visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence(void) {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, "mbarrier.arrive".
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// For the whole warp: it has read a buffer for the last time, or done its part of a step.
__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier) {
  if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
}

// PTX ISA, "mbarrier.arrive.expect_tx": arrive, and expect this many bytes more.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// PTX ISA, "mbarrier.try_wait": sleeps up to a time that the hardware chooses.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

#endif
