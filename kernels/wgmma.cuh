// Warpgroup matrix products (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions"). One instruction multiplies a 64 x 16 tile
// A by a 16 x N tile B into a 64 x N float tile D that is spread over the 128
// threads of a warpgroup: thread t of warp w holds, for each group j of eight
// columns, D[16w + t/4][8j + 2(t%4) + {0,1}] in d[4j + {0,1}] and the same
// columns of row 16w + t/4 + 8 in d[4j + {2,3}].
#ifndef FA3_WGMMA_CUH
#define FA3_WGMMA_CUH

#include <stdint.h>

#if FA3_BF16
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif
// Of P V: unpacked codes of values are float16, whatever queries are.
#if FA3_UNPACKED
#define WGMMA_VALUE_TYPES "f32.f16.f16"
#else
#define WGMMA_VALUE_TYPES WGMMA_TYPES
#endif

// PTX ISA, "wgmma.fence": orders register accesses before it and wgmma after it.
__device__ __forceinline__ void wgmma_fence(void) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// PTX ISA, "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit(void) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// PTX ISA, "wgmma.wait_group": at most `kPending` of the latest groups still run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait(void) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Not an instruction: tells the compiler that the registers change here, so
// that it moves no use of them across a fence or a wait.
template <int kCount>
__device__ __forceinline__ void registers_touch(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// PTX ISA, "Matrix Descriptor Format": a tile in shared memory as the copy
// engine leaves it, rows of 128 (or 64, 32) bytes, swizzled. The low word holds the
// address and the distance between blocks of one row's width (`chunk`, which
// matters only where B is read transposed), the high word the distance between
// groups of eight rows and the swizzle. Moving on by n bytes adds n / 16 to the
// low word.
__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t address, uint32_t chunk) {
  return (address & 0x3ffff) >> 4 | (chunk >> 4) << 16;
}

template <int kRowBytes>
__device__ constexpr uint32_t wgmma_descriptor_high(void) {
  return (8 * kRowBytes >> 4) | (kRowBytes == 128 ? 1u : kRowBytes == 64 ? 2u : 3u) << 30;
}

#define WGMMA_OUT8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT24(d, i) WGMMA_OUT8(d, i), WGMMA_OUT8(d, i + 8), WGMMA_OUT8(d, i + 16)
#define WGMMA_OUT32(d, i) \
  WGMMA_OUT8(d, i), WGMMA_OUT8(d, i + 8), WGMMA_OUT8(d, i + 16), WGMMA_OUT8(d, i + 24)
#define WGMMA_OUT48(d, i) WGMMA_OUT32(d, i), WGMMA_OUT8(d, i + 32), WGMMA_OUT8(d, i + 40)
#define WGMMA_OUT64(d, i) WGMMA_OUT32(d, i), WGMMA_OUT32(d, i + 32)

#define WGMMA_LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_LIST24 WGMMA_LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_LIST32 WGMMA_LIST24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_LIST40 WGMMA_LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_LIST48 WGMMA_LIST40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_LIST56 WGMMA_LIST48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_LIST64 WGMMA_LIST56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_LIST72 WGMMA_LIST64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_LIST80 WGMMA_LIST72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_LIST88 WGMMA_LIST80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_LIST96 WGMMA_LIST88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_LIST112 \
  WGMMA_LIST96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_LIST128 \
  WGMMA_LIST112       \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// D = A B + D with A and B in shared memory, B row by row along K (as Q K^T
// needs it); D = A B where `accumulate` is 0.
#define WGMMA_SHARED(columns, list, a, b, flag, ...)                                     \
  asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 p, " flag           \
               ", 0;\n\t"                                                                \
               "mov.b64 a, {" a "};\n\tmov.b64 b, {" b                                   \
               "};\n\t"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16." WGMMA_TYPES " {" list \
               "}, a, b, p, 1, 1, 0, 0;\n\t}"                                            \
               : __VA_ARGS__                                                             \
               : "r"(a_tile), "r"(b_tile), "r"(high), "r"(accumulate))

template <int kColumns>
__device__ __forceinline__ void wgmma_shared(float (&d)[kColumns / 2], uint32_t a_tile,
                                             uint32_t b_tile, uint32_t high, int accumulate) {
  if constexpr (kColumns == 32)
    WGMMA_SHARED(32, WGMMA_LIST16, "%16,%18", "%17,%18", "%19", WGMMA_OUT8(d, 0), WGMMA_OUT8(d, 8));
  else if constexpr (kColumns == 64)
    WGMMA_SHARED(64, WGMMA_LIST32, "%32,%34", "%33,%34", "%35", WGMMA_OUT32(d, 0));
  else if constexpr (kColumns == 80)
    WGMMA_SHARED(80, WGMMA_LIST40, "%40,%42", "%41,%42", "%43", WGMMA_OUT32(d, 0),
                 WGMMA_OUT8(d, 32));
  else if constexpr (kColumns == 96)
    WGMMA_SHARED(96, WGMMA_LIST48, "%48,%50", "%49,%50", "%51", WGMMA_OUT32(d, 0),
                 WGMMA_OUT8(d, 32), WGMMA_OUT8(d, 40));
  else if constexpr (kColumns == 112)
    WGMMA_SHARED(112, WGMMA_LIST56, "%56,%58", "%57,%58", "%59", WGMMA_OUT32(d, 0),
                 WGMMA_OUT8(d, 32), WGMMA_OUT8(d, 40), WGMMA_OUT8(d, 48));
  else if constexpr (kColumns == 128)
    WGMMA_SHARED(128, WGMMA_LIST64, "%64,%66", "%65,%66", "%67", WGMMA_OUT64(d, 0));
  else if constexpr (kColumns == 144)
    WGMMA_SHARED(144, WGMMA_LIST72, "%72,%74", "%73,%74", "%75", WGMMA_OUT64(d, 0),
                 WGMMA_OUT8(d, 64));
  else if constexpr (kColumns == 160)
    WGMMA_SHARED(160, WGMMA_LIST80, "%80,%82", "%81,%82", "%83", WGMMA_OUT64(d, 0),
                 WGMMA_OUT8(d, 64), WGMMA_OUT8(d, 72));
  else if constexpr (kColumns == 176)
    WGMMA_SHARED(176, WGMMA_LIST88, "%88,%90", "%89,%90", "%91", WGMMA_OUT64(d, 0),
                 WGMMA_OUT8(d, 64), WGMMA_OUT8(d, 72), WGMMA_OUT8(d, 80));
  else if constexpr (kColumns == 192)
    WGMMA_SHARED(192, WGMMA_LIST96, "%96,%98", "%97,%98", "%99", WGMMA_OUT64(d, 0),
                 WGMMA_OUT32(d, 64));
  else
    static_assert(kColumns == 64, "no wrapper for this tile width");
}

// D = A B + D with A in registers (the layout of D above, packed in pairs) and B
// in shared memory. B's rows run along N (it is read transposed), as P V needs it, or else along K,
// as Q K^T needs it.
#define WGMMA_REGISTERS(columns, right, types, list, a, b, flag, ...)                         \
  asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 b;\n\tsetp.ne.b32 p, " flag                   \
               ", 0;\n\t"                                                                     \
               "mov.b64 b, {" b                                                               \
               "};\n\t"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16." types " {" list "}, {" a   \
               "}, b, p, 1, 1, " #right ";\n\t}"                                              \
               : __VA_ARGS__                                                                  \
               : "r"(a_tile[0]), "r"(a_tile[1]), "r"(a_tile[2]), "r"(a_tile[3]), "r"(b_tile), \
                 "r"(high), "r"(accumulate))

template <int kColumns, bool kRight = true>
__device__ __forceinline__ void wgmma_registers(float (&d)[kColumns / 2], const uint32_t *a_tile,
                                                uint32_t b_tile, uint32_t high, int accumulate) {
  if constexpr (kColumns == 32 && !kRight)
    WGMMA_REGISTERS(32, 0, WGMMA_TYPES, WGMMA_LIST16, "%16,%17,%18,%19", "%20,%21", "%22",
                    WGMMA_OUT8(d, 0), WGMMA_OUT8(d, 8));
  else if constexpr (kColumns == 64 && kRight)
    WGMMA_REGISTERS(64, 1, WGMMA_VALUE_TYPES, WGMMA_LIST32, "%32,%33,%34,%35", "%36,%37", "%38",
                    WGMMA_OUT32(d, 0));
  else if constexpr (kColumns == 64)
    WGMMA_REGISTERS(64, 0, WGMMA_TYPES, WGMMA_LIST32, "%32,%33,%34,%35", "%36,%37", "%38",
                    WGMMA_OUT32(d, 0));
  else if constexpr (kColumns == 96 && kRight)
    WGMMA_REGISTERS(96, 1, WGMMA_VALUE_TYPES, WGMMA_LIST48, "%48,%49,%50,%51", "%52,%53", "%54",
                    WGMMA_OUT32(d, 0), WGMMA_OUT8(d, 32), WGMMA_OUT8(d, 40));
  else if constexpr (kColumns == 128 && kRight)
    WGMMA_REGISTERS(128, 1, WGMMA_VALUE_TYPES, WGMMA_LIST64, "%64,%65,%66,%67", "%68,%69", "%70",
                    WGMMA_OUT64(d, 0));
  else if constexpr (kColumns == 128)
    WGMMA_REGISTERS(128, 0, WGMMA_TYPES, WGMMA_LIST64, "%64,%65,%66,%67", "%68,%69", "%70",
                    WGMMA_OUT64(d, 0));
  else if constexpr (kColumns == 192 && kRight)
    WGMMA_REGISTERS(192, 1, WGMMA_VALUE_TYPES, WGMMA_LIST96, "%96,%97,%98,%99", "%100,%101", "%102",
                    WGMMA_OUT64(d, 0), WGMMA_OUT32(d, 64));
  else if constexpr (kColumns == 256 && kRight)
    WGMMA_REGISTERS(256, 1, WGMMA_VALUE_TYPES, WGMMA_LIST128, "%128,%129,%130,%131", "%132,%133",
                    "%134", WGMMA_OUT64(d, 0), WGMMA_OUT64(d, 64));
  else
    static_assert(kColumns == 96, "no wrapper for this width");
}

// D = A B + D with both in shared memory, A transposed: its rows run along M. B's run along N, as
// dQ = dS K needs it where dS is stored key by key; or else along K, as dQ^T = K^T dS^T needs it
// where dS is stored query by query. Their rows may differ in width.
#define WGMMA_TRANSPOSED(columns, right, list, a, b, flag, ...)                          \
  asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 a, b;\n\tsetp.ne.b32 p, " flag           \
               ", 0;\n\t"                                                                \
               "mov.b64 a, {" a "};\n\tmov.b64 b, {" b                                   \
               "};\n\t"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16." WGMMA_TYPES " {" list \
               "}, a, b, p, 1, 1, 1, " #right ";\n\t}"                                   \
               : __VA_ARGS__                                                             \
               : "r"(a_tile), "r"(b_tile), "r"(a_high), "r"(b_high), "r"(accumulate))

template <int kColumns, bool kRight = true>
__device__ __forceinline__ void wgmma_transposed(float (&d)[kColumns / 2], uint32_t a_tile,
                                                 uint32_t a_high, uint32_t b_tile, uint32_t b_high,
                                                 int accumulate) {
  if constexpr (kColumns == 64 && kRight)
    WGMMA_TRANSPOSED(64, 1, WGMMA_LIST32, "%32,%34", "%33,%35", "%36", WGMMA_OUT32(d, 0));
  else if constexpr (kColumns == 128 && kRight)
    WGMMA_TRANSPOSED(128, 1, WGMMA_LIST64, "%64,%66", "%65,%67", "%68", WGMMA_OUT64(d, 0));
  else if constexpr (kColumns == 80 && !kRight)
    WGMMA_TRANSPOSED(80, 0, WGMMA_LIST40, "%40,%42", "%41,%43", "%44", WGMMA_OUT32(d, 0),
                     WGMMA_OUT8(d, 32));
  else
    static_assert(kColumns == 64, "no wrapper for this width");
}

#endif
