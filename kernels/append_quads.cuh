// Rows that a cache gets, and queries beside them, turned by rotary embedding: elements of 16 bits
// and tables of them, by twos. What the append kernel does, and the decode kernel where it appends.
#ifndef FA3_APPEND_QUADS_CUH
#define FA3_APPEND_QUADS_CUH

#include "append_params.h"
#include "codes.cuh"

__device__ __forceinline__ int64_t offset(const fa3_operand &tensor, int batch, int row, int head) {
  return batch * tensor.stride_batch + row * tensor.stride_row + head * tensor.stride_head;
}

// A head of a row.
struct head {
  const void *from;
  int64_t at;
  int dim, pairs;  // elements, and pairs of them that are turned
};

// Two pairs of neighbours, of 16 bits each: two pairs that are turned, or what is not. Nobody else
// reads or writes them.
struct quad {
  int first, second;  // elements
  bool turned;
};

__device__ __forceinline__ quad find_quad(const fa3_append_params &p, const head &h, int i) {
  const bool turned = 2 * i < h.pairs, halves = turned && !p.interleaved;
  return {halves ? 2 * i : 4 * i, halves ? 2 * i + h.pairs : 4 * i + 2, turned};
}

__device__ __forceinline__ uint32_t load_word(const void *data, int64_t i) {
  return *(const uint32_t *)((const uint16_t *)data + i);
}

// A quad as it is.
struct words {
  uint32_t first, second;
};

__device__ __forceinline__ words load_quad(const head &h, const quad &q, int i) {
  if (4 * i >= h.dim) return {0, 0};
  return {load_word(h.from, h.at + q.first), load_word(h.from, h.at + q.second)};
}

// Of a quad's two pairs.
struct angles {
  uint32_t cos, sin;
};

// Those of a position: NaN where the tables have none.
__device__ __forceinline__ angles load_angles(const fa3_append_params &p, const quad &q, int i,
                                              int position) {
  if (!q.turned || position < 0 || position >= p.table_rows) return {0x7fff7fff, 0x7fff7fff};
  return {load_word(p.cos.data, position * p.cos.stride_row + 2 * i),
          load_word(p.sin.data, position * p.sin.stride_row + 2 * i)};
}

__device__ __forceinline__ float2 numbers_of(uint32_t word, int kind) {
  if (kind == FA3_APPEND_FLOAT16) return unpack_fp16(word);
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
}

__device__ __forceinline__ uint32_t word_of(float2 x, int kind) {
  return kind == FA3_APPEND_FLOAT16 ? pack_fp16(x.x, x.y) : pack_bf16(x.x, x.y);
}

struct numbers {
  float2 first, second;
};

// (x, y) becomes (x cos - y sin, x sin + y cos). What is fused is said, so that every kernel gives
// the same bits.
__device__ __forceinline__ float2 turn_pair(float x, float y, float cos, float sin) {
  return make_float2(__fmaf_rn(x, cos, -__fmul_rn(y, sin)), __fmaf_rn(x, sin, __fmul_rn(y, cos)));
}

// The numbers of a quad of that kind, which its angles are of too: turned, if they are.
__device__ __forceinline__ numbers turn_quad(const fa3_append_params &p, const quad &q,
                                             const words &w, const angles &a, int kind) {
  const float2 first = numbers_of(w.first, kind), second = numbers_of(w.second, kind);
  if (!q.turned) return {first, second};
  const float2 cos = numbers_of(a.cos, kind), sin = numbers_of(a.sin, kind);
  if (p.interleaved)
    return {turn_pair(first.x, first.y, cos.x, sin.x), turn_pair(second.x, second.y, cos.y, sin.y)};
  const float2 x = turn_pair(first.x, second.x, cos.x, sin.x);
  const float2 y = turn_pair(first.y, second.y, cos.y, sin.y);
  return {make_float2(x.x, y.x), make_float2(x.y, y.y)};
}

// A quad as it leaves: what is not turned stays as it is.
__device__ __forceinline__ words words_of(const quad &q, const words &w, const numbers &x,
                                          int kind) {
  if (!q.turned) return w;
  return {word_of(x.first, kind), word_of(x.second, kind)};
}

#endif
