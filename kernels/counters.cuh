// Counters in global memory, by which blocks keep an order.
#ifndef FA3_COUNTERS_CUH
#define FA3_COUNTERS_CUH

// PTX ISA, "ld" with .acquire: what was written before the value that it reads can be seen after.
__device__ __forceinline__ int load_acquire(const int *from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// PTX ISA, "st" with .release. What others have told this thread of goes before it too.
__device__ __forceinline__ void store_release(int *to, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// PTX ISA, "red" with .release, likewise.
__device__ __forceinline__ void count_release(int *counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// PTX ISA, "atom" with .acq_rel: both; what was there.
__device__ __forceinline__ int add_bits_both(int *to, int bits) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(bits)
               : "memory");
  return before;
}

#endif
