// Warp-level wrappers that belong to no copy and no matrix engine: register
// budgets, named barriers, votes, packed conversions, fast mathematics.
#ifndef FA3_REGISTERS_CUH
#define FA3_REGISTERS_CUH

#include <stdint.h>

// PTX ISA, "setmaxnreg": a warpgroup gives registers back to the block's pool,
// or takes them from it. Every warp of the warpgroup runs it.
template <int kCount>
__device__ __forceinline__ void registers_give_back(void) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void registers_take(void) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// PTX ISA, "bar{.cta}.sync": arrive at a named barrier and wait until `threads`
// threads have.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA, "bar{.cta}.arrive": arrive without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA, "elect.sync": true in one lane of the warp, always the same one.
__device__ __forceinline__ bool elect_one(void) {
  uint32_t elected;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(elected));
  return elected != 0;
}

// PTX ISA, "shfl.sync": a value that all lanes hold alike, so that the compiler
// knows it and may keep it, and what follows from it, in uniform registers.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(0xffffffff, x, 0);
}

__device__ __forceinline__ uint32_t uniform(uint32_t x) {
  return __shfl_sync(0xffffffff, x, 0);
}

// PTX ISA, "vote.sync": the same of a condition, which all lanes hold alike; the whole warp calls
// it. Where a branch's condition is not known to be uniform, and the warp meets behind it (a
// product, a shuffle, a barrier), the assembler takes the warp's threads to be apart from there on,
// in all of the loop: it then finds addresses in each thread, and the threads meet before each
// product and each shuffle.
__device__ __forceinline__ bool uniform(bool x) {
  return __any_sync(0xffffffff, x);
}

// PTX ISA, "bar{.cta}.red": named_barrier_sync that also says whether `x` holds in any of the
// threads. The assembler does not know that answer to be uniform: so a vote.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n\t.reg .pred x, any;\n\t"
      "setp.ne.s32 x, %3, 0;\n\t"
      "bar.red.or.pred any, %1, %2, x;\n\t"
      "selp.s32 %0, 1, 0, any;\n\t}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"((int)x)
      : "memory");
  return uniform(any != 0);
}

// PTX ISA, "vote": whether any of four neighbouring lanes, which share rows of a product, says so.
__device__ __forceinline__ bool any_of_quad(bool x) {
  return (__ballot_sync(0xffffffff, x) >> (threadIdx.x & 28) & 15) != 0;
}

// The same as threadIdx.x, but read anew: nothing that follows from it is computed early and kept
// in registers meanwhile.
__device__ __forceinline__ int thread_again(void) {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// PTX ISA, "griddepcontrol": with programmatic dependent launch, wait until the
// kernels before this one are done and their writes visible. Returns at once
// when the launch did not ask for it.
__device__ __forceinline__ void wait_for_prior_grids(void) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// PTX ISA, "fence": what this thread reads from here on is no older than what it has learned of.
__device__ __forceinline__ void fence_device(void) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// PTX ISA, "griddepcontrol": the kernel after this one may be launched, to wait for this one's end.
__device__ __forceinline__ void let_next_grid_launch(void) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// PTX ISA, "ex2": 2**x on the special function unit; 2**-inf is 0.
__device__ __forceinline__ float exp2_unit(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "lg2": log2(0) is -inf. Volatile, so that it stays where others hide its latency.
__device__ __forceinline__ float log2_unit(float x) {
  float y;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "rcp".
__device__ __forceinline__ float reciprocal_unit(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "max" with .NaN: a NaN in either operand is the result, so that a
// row that sees a NaN ends as NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// PTX ISA, "cvt": two floats to a packed pair of 16-bit floats, the first in
// the low half.
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t pair;
#if FA3_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// PTX ISA, "mul" and "fma" of packed halves: of two such pairs, each rounded once.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t pair;
#if FA3_BF16
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
#endif
  return pair;
}

__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t pair;
#if FA3_BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
#endif
  return pair;
}

// PTX ISA, "neg".
__device__ __forceinline__ uint32_t negate_pair(uint32_t a) {
  uint32_t pair;
#if FA3_BF16
  asm("neg.bf16x2 %0, %1;" : "=r"(pair) : "r"(a));
#else
  asm("neg.f16x2 %0, %1;" : "=r"(pair) : "r"(a));
#endif
  return pair;
}

// PTX ISA, "ld": two neighbouring floats of shared memory.
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

// PTX ISA, "ld": two neighbouring floats of shared memory, or 0 if not `wanted`.
__device__ __forceinline__ float2 load_shared_pair_if(bool wanted, uint32_t address) {
  float2 x;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.f32 %0, 0f00000000;\n\t"
      "mov.f32 %1, 0f00000000;\n\t@p ld.shared.v2.f32 {%0, %1}, [%2];\n\t}"
      : "=&f"(x.x), "=&f"(x.y)
      : "r"(address), "r"((int)wanted)
      : "memory");
  return x;
}

// PTX ISA, "st": two neighbouring floats of shared memory.
__device__ __forceinline__ void store_shared_pair(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

// PTX ISA, "ld": 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_shared_vector(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// PTX ISA, "st": 16 bytes of global memory, if `wanted`; without a branch, around which nothing
// else could be moved.
__device__ __forceinline__ void store_vector_if(bool wanted, void *to, uint4 x) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"((int)wanted)
      : "memory");
}

// PTX ISA, "ldmatrix": four 8x8 matrices of 16-bit values from shared memory, as they are or
// transposed; lane i gives the address of row i % 8 of matrix i / 8.
template <bool kTranspose>
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
  if (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// PTX ISA, "stmatrix": four 8x8 matrices of 16-bit values from registers to
// shared memory, as they are or transposed; lane i gives the address of row i % 8
// of matrix i / 8.
template <bool kTranspose = false>
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  if (kTranspose)
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// PTX ISA, "movmatrix": an 8x8 matrix of 16-bit values, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// PTX ISA, "bmsk": `width` ones from bit `begin` on; what would be beyond bit 31 is lost.
__device__ __forceinline__ uint32_t bit_mask(int begin, int width) {
  uint32_t bits;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(begin), "r"(width));
  return bits;
}

#endif
