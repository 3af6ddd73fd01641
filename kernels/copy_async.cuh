// Copies from global to shared memory by single threads, which go on meanwhile (PTX ISA,
// "cp.async").
#ifndef FA3_COPY_ASYNC_CUH
#define FA3_COPY_ASYNC_CUH

#include <stdint.h>

// PTX ISA, "cp.async": 16 bytes from global to shared memory, past the first cache; zeros if not
// `valid`, and then nothing is read.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// PTX ISA, "cp.async": a float from global to shared memory; 0 if not `valid`, and then nothing is
// read.
__device__ __forceinline__ void copy_async_float(uint32_t to, const float *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// PTX ISA, "prefetch": a line of global memory comes to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void *from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// PTX ISA, "cp.async.commit_group".
__device__ __forceinline__ void copy_async_commit(void) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// PTX ISA, "cp.async.mbarrier.arrive" with .noinc: arrives once this thread's copies so far have
// landed.
__device__ __forceinline__ void copy_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA, "cp.async.wait_group": of this thread's groups at most the latest `kPending` are under
// way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait(void) {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// PTX ISA, "cp.async.wait_all": all of this thread's copies.
__device__ __forceinline__ void copy_async_wait_all(void) {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif
