// What kernels on E4M3 codes need beside registers.cuh: conversions, and loads and stores of floats
// and of bytes to be transposed.
#ifndef FA3_CODES_CUH
#define FA3_CODES_CUH

#include <stdint.h>

#include "registers.cuh"

// PTX ISA, "cvt": four floats to E4M3 codes, the first in the low byte; what is beyond 448 becomes
// 448, NaN stays NaN.
__device__ __forceinline__ uint32_t pack_codes(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n\t.reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// PTX ISA, "cvt": four E4M3 codes to two packed pairs of float16, exactly; NaN stays NaN.
__device__ __forceinline__ void unpack_codes(uint32_t codes, uint32_t &low, uint32_t &high) {
  asm("{\n\t.reg .b16 a, b;\n\t"
      "mov.b32 {a, b}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// PTX ISA, "cvt": a packed pair of float16 to two floats, the first from the low half.
__device__ __forceinline__ float2 unpack_fp16(uint32_t pair) {
  float2 x;
  asm("{\n\t.reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low;\n\t"
      "cvt.f32.f16 %1, high;\n\t}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(pair));
  return x;
}

// PTX ISA, "cvt": two floats to a packed pair of bfloat16, or of float16, the first in the low
// half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// PTX ISA, "ld" and "st": a float of shared memory.
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_float(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// PTX ISA, "ld" and "st": four neighbouring floats, in the order of the source.
__device__ __forceinline__ float4 load_shared_floats(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_floats(uint32_t to, const float *x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// PTX ISA, "st": 32 bits, and 16 bytes.
__device__ __forceinline__ void store_shared_word(uint32_t to, uint32_t bits) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}

__device__ __forceinline__ void store_shared_vector(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ float4 load_global_floats(const float *from) {
  float4 x;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_global_floats(float *to, const float *x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// PTX ISA, "st": 16 bytes.
__device__ __forceinline__ void store_global_vector(void *to, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// PTX ISA, "ldmatrix" with .trans: four 8x8 matrices of 16-bit values from shared memory,
// transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

#endif
