// Counters in global memory, by which blocks keep an order, and what blocks leave each other there.
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

// PTX ISA, "atom" with .acq_rel: acquires and releases; returns the old value.
__device__ __forceinline__ int fetch_or(int *to, int bits) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(bits)
               : "memory");
  return before;
}

// PTX ISA, "ld" with .relaxed: what other blocks have added with "red", which the L2 cache has.
__device__ __forceinline__ float4 load_relaxed(const float4 *from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// The same if `wanted`, else zeros; without a branch, at whose end it would be waited for.
__device__ __forceinline__ float4 load_relaxed_if(bool wanted, const float4 *from) {
  float4 x;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "mov.f32 %0, 0f00000000;\n\tmov.f32 %1, 0f00000000;\n\t"
      "mov.f32 %2, 0f00000000;\n\tmov.f32 %3, 0f00000000;\n\t"
      "@p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
      : "l"(from), "r"((int)wanted)
      : "memory");
  return x;
}

#endif
