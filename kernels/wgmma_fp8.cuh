// Warpgroup matrix products of E4M3 codes (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions", k32): A is 64 x 32, B 32 x N, D as in wgmma.cuh. Both operands
// run along K in shared memory; nothing is transposed on the way.
#ifndef FA3_WGMMA_FP8_CUH
#define FA3_WGMMA_FP8_CUH

#include "wgmma.cuh"

#define WGMMA_FP8_SHARED(columns, list, a, b, flag, ...)                               \
  asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 p, " flag         \
               ", 0;\n\t"                                                              \
               "mov.b64 a, {" a "};\n\tmov.b64 b, {" b                                 \
               "};\n\t"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" list \
               "}, a, b, p, 1, 1;\n\t}"                                                \
               : __VA_ARGS__                                                           \
               : "r"(a_tile), "r"(b_tile), "r"(high), "r"(accumulate))

// D = A B + D with A and B in shared memory; D = A B where `accumulate` is 0.
template <int kColumns>
__device__ __forceinline__ void wgmma_fp8_shared(float (&d)[kColumns / 2], uint32_t a_tile,
                                                 uint32_t b_tile, uint32_t high, int accumulate) {
  if constexpr (kColumns == 48)
    WGMMA_FP8_SHARED(48, WGMMA_LIST24, "%24,%26", "%25,%26", "%27", WGMMA_OUT24(d, 0));
  else if constexpr (kColumns == 64)
    WGMMA_FP8_SHARED(64, WGMMA_LIST32, "%32,%34", "%33,%34", "%35", WGMMA_OUT32(d, 0));
  else if constexpr (kColumns == 80)
    WGMMA_FP8_SHARED(80, WGMMA_LIST40, "%40,%42", "%41,%42", "%43", WGMMA_OUT32(d, 0),
                     WGMMA_OUT8(d, 32));
  else if constexpr (kColumns == 96)
    WGMMA_FP8_SHARED(96, WGMMA_LIST48, "%48,%50", "%49,%50", "%51", WGMMA_OUT48(d, 0));
  else if constexpr (kColumns == 112)
    WGMMA_FP8_SHARED(112, WGMMA_LIST56, "%56,%58", "%57,%58", "%59", WGMMA_OUT48(d, 0),
                     WGMMA_OUT8(d, 48));
  else if constexpr (kColumns == 128)
    WGMMA_FP8_SHARED(128, WGMMA_LIST64, "%64,%66", "%65,%66", "%67", WGMMA_OUT64(d, 0));
  else if constexpr (kColumns == 160)
    WGMMA_FP8_SHARED(160, WGMMA_LIST80, "%80,%82", "%81,%82", "%83", WGMMA_OUT64(d, 0),
                     WGMMA_OUT8(d, 64), WGMMA_OUT8(d, 72));
  else if constexpr (kColumns == 192)
    WGMMA_FP8_SHARED(192, WGMMA_LIST96, "%96,%98", "%97,%98", "%99", WGMMA_OUT64(d, 0),
                     WGMMA_OUT32(d, 64));
  else if constexpr (kColumns == 224)
    WGMMA_FP8_SHARED(224, WGMMA_LIST112, "%112,%114", "%113,%114", "%115", WGMMA_OUT64(d, 0),
                     WGMMA_OUT48(d, 64));
  else
    static_assert(kColumns == 96, "no wrapper for this tile width");
}

#define WGMMA_FP8_REGISTERS(columns, list, a, b, flag, ...)                                     \
  asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 b;\n\tsetp.ne.b32 p, " flag                     \
               ", 0;\n\t"                                                                       \
               "mov.b64 b, {" b                                                                 \
               "};\n\t"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" list "}, {" a \
               "}, b, p, 1, 1;\n\t}"                                                            \
               : __VA_ARGS__                                                                    \
               : "r"(a_tile[0]), "r"(a_tile[1]), "r"(a_tile[2]), "r"(a_tile[3]), "r"(b_tile),   \
                 "r"(high), "r"(accumulate))

// D = A B + D with A in registers: a thread has of rows t/4 and t/4 + 8 the columns 4(t%4) to
// 4(t%4) + 3 in the bytes of a[0] and a[1], and 16 columns on in a[2] and a[3].
template <int kColumns>
__device__ __forceinline__ void wgmma_fp8_registers(float (&d)[kColumns / 2],
                                                    const uint32_t *a_tile, uint32_t b_tile,
                                                    uint32_t high, int accumulate) {
  if constexpr (kColumns == 48)
    WGMMA_FP8_REGISTERS(48, WGMMA_LIST24, "%24,%25,%26,%27", "%28,%29", "%30", WGMMA_OUT24(d, 0));
  else if constexpr (kColumns == 64)
    WGMMA_FP8_REGISTERS(64, WGMMA_LIST32, "%32,%33,%34,%35", "%36,%37", "%38", WGMMA_OUT32(d, 0));
  else if constexpr (kColumns == 80)
    WGMMA_FP8_REGISTERS(80, WGMMA_LIST40, "%40,%41,%42,%43", "%44,%45", "%46", WGMMA_OUT32(d, 0),
                        WGMMA_OUT8(d, 32));
  else if constexpr (kColumns == 96)
    WGMMA_FP8_REGISTERS(96, WGMMA_LIST48, "%48,%49,%50,%51", "%52,%53", "%54", WGMMA_OUT48(d, 0));
  else if constexpr (kColumns == 112)
    WGMMA_FP8_REGISTERS(112, WGMMA_LIST56, "%56,%57,%58,%59", "%60,%61", "%62", WGMMA_OUT48(d, 0),
                        WGMMA_OUT8(d, 48));
  else if constexpr (kColumns == 128)
    WGMMA_FP8_REGISTERS(128, WGMMA_LIST64, "%64,%65,%66,%67", "%68,%69", "%70", WGMMA_OUT64(d, 0));
  else if constexpr (kColumns == 160)
    WGMMA_FP8_REGISTERS(160, WGMMA_LIST80, "%80,%81,%82,%83", "%84,%85", "%86", WGMMA_OUT64(d, 0),
                        WGMMA_OUT8(d, 64), WGMMA_OUT8(d, 72));
  else if constexpr (kColumns == 192)
    WGMMA_FP8_REGISTERS(192, WGMMA_LIST96, "%96,%97,%98,%99", "%100,%101", "%102",
                        WGMMA_OUT64(d, 0), WGMMA_OUT32(d, 64));
  else if constexpr (kColumns == 224)
    WGMMA_FP8_REGISTERS(224, WGMMA_LIST112, "%112,%113,%114,%115", "%116,%117", "%118",
                        WGMMA_OUT64(d, 0), WGMMA_OUT48(d, 64));
  else if constexpr (kColumns == 256)
    WGMMA_FP8_REGISTERS(256, WGMMA_LIST128, "%128,%129,%130,%131", "%132,%133", "%134",
                        WGMMA_OUT64(d, 0), WGMMA_OUT64(d, 64));
  else
    static_assert(kColumns == 64, "no wrapper for this head dim");
}

#endif
