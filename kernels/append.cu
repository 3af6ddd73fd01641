// New keys and values go into a cache, behind what each sequence has there; keys, and queries
// beside them, are turned by rotary embedding. A warp has a head of a row, 128 pairs at a time:
// what it reads of them is under way before it knows where they go.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "append_quads.cuh"

enum { kPairs = 4, kChunk = 32 * kPairs }; /* of a lane, 32 apart; of a warp */

__device__ __forceinline__ uint32_t load_bits(const void *data, int64_t i, int kind) {
  return kind == FA3_APPEND_FLOAT32 ? ((const uint32_t *)data)[i]
         : kind == FA3_APPEND_E4M3  ? ((const uint8_t *)data)[i]
                                    : ((const uint16_t *)data)[i];
}

__device__ __forceinline__ void store_bits(void *data, int64_t i, int kind, uint32_t bits) {
  if (kind == FA3_APPEND_FLOAT32)
    ((uint32_t *)data)[i] = bits;
  else if (kind == FA3_APPEND_E4M3)
    ((uint8_t *)data)[i] = (uint8_t)bits;
  else
    ((uint16_t *)data)[i] = (uint16_t)bits;
}

__device__ __forceinline__ float number_of(uint32_t bits, int kind) {
  return kind == FA3_APPEND_FLOAT32   ? __uint_as_float(bits)
         : kind == FA3_APPEND_FLOAT16 ? __half2float(__ushort_as_half((unsigned short)bits))
                                      : __uint_as_float(bits << 16);
}

__device__ __forceinline__ uint32_t bits_of(float x, int kind) {
  return kind == FA3_APPEND_FLOAT32   ? __float_as_uint(x)
         : kind == FA3_APPEND_FLOAT16 ? __half_as_ushort(__float2half_rn(x))
                                      : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Two elements: of those that are turned a pair, then neighbours. Nobody else reads or writes them.
struct pair {
  int first, second;  // elements
  bool turned;
};

__device__ __forceinline__ pair find_pair(const fa3_append_params &p, const head &h, int i) {
  const bool turned = i < h.pairs, halves = turned && !p.interleaved;
  return {halves ? i : 2 * i, halves ? i + h.pairs : 2 * i + 1, turned};
}

__device__ __forceinline__ int index_of(int begin, int n) {
  return begin + 32 * n + (threadIdx.x & 31);
}

// A lane's pairs of a chunk, as they are.
struct chunk {
  uint32_t bits[kPairs][2];
};

__device__ __forceinline__ void load_chunk(const fa3_append_params &p, const head &h, int begin,
                                           chunk &c) {
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const pair at = find_pair(p, h, index_of(begin, n));
    c.bits[n][0] = at.first < h.dim ? load_bits(h.from, h.at + at.first, p.kind) : 0;
    c.bits[n][1] = at.second < h.dim ? load_bits(h.from, h.at + at.second, p.kind) : 0;
  }
}

// The chunk's numbers, turned by the angles of the position: NaN where the tables have none.
__device__ __forceinline__ void turn_chunk(const fa3_append_params &p, const head &h, int begin,
                                           int position, const chunk &c, float (&x)[kPairs][2]) {
  const bool known = position >= 0 && position < p.table_rows;
  const int64_t cos_at = position * p.cos.stride_row, sin_at = position * p.sin.stride_row;
  float cos[kPairs], sin[kPairs];
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int i = index_of(begin, n);
    const bool there = known && i < h.pairs;
    const uint32_t bits[2] = {there ? load_bits(p.cos.data, cos_at + i, p.table_kind) : 0,
                              there ? load_bits(p.sin.data, sin_at + i, p.table_kind) : 0};
    cos[n] = there ? number_of(bits[0], p.table_kind) : NAN;
    sin[n] = there ? number_of(bits[1], p.table_kind) : NAN;
  }
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const float first = number_of(c.bits[n][0], p.kind), second = number_of(c.bits[n][1], p.kind);
    const float2 y = turn_pair(first, second, cos[n], sin[n]);
    const bool turned = index_of(begin, n) < h.pairs;
    x[n][0] = turned ? y.x : first;
    x[n][1] = turned ? y.y : second;
  }
}

// The largest finite magnitude of a lane's elements, or what was found before.
__device__ __forceinline__ float largest_of(const float (&x)[kPairs][2], float largest) {
#pragma unroll
  for (int n = 0; n < kPairs; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (fabsf(x[n][half]) < INFINITY) largest = fmaxf(largest, fabsf(x[n][half]));
  return largest;
}

// A normal number that the largest finite magnitude of the warp's lanes fits into.
__device__ __forceinline__ float scale_of_largest(float largest) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
  return fmaxf(largest / 448.0f, 0x1p-126f);
}

// Of a whole head, of which x is the first chunk.
__device__ __forceinline__ float make_scale(const fa3_append_params &p, const head &h, int position,
                                            const float (&x)[kPairs][2]) {
  float largest = largest_of(x, 0.0f);
#pragma unroll 1
  for (int begin = kChunk; 2 * begin < h.dim; begin += kChunk) {
    chunk c;
    float more[kPairs][2];
    load_chunk(p, h, begin, c);
    turn_chunk(p, h, begin, position, c, more);
    largest = largest_of(more, largest);
  }
  return scale_of_largest(largest);
}

// Where the scale of a head of a cache's row is.
__device__ __forceinline__ float *find_scale(const fa3_scales &scales, int page, int row,
                                             int head) {
  const int block = scales.rows > 0 ? row / scales.rows : 0;
  return (float *)scales.data + page * scales.stride_batch +
         head / scales.heads_per_scale * scales.stride_head + block * scales.stride_block;
}

// What becomes of a number in a cache of codes.
__device__ __forceinline__ uint8_t code_of(float x, float divisor) {
  return fabsf(x) == INFINITY ? 0x7f : (uint8_t)pack_codes(x / divisor, 0.0f, 0.0f, 0.0f);
}

// To a place of the same kind, or, with a divisor, of codes.
__device__ __forceinline__ void store_chunk(const fa3_append_params &p, const head &h, int begin,
                                            const chunk &c, const float (&x)[kPairs][2], void *to,
                                            int64_t to_at, bool coded, float divisor) {
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const pair at = find_pair(p, h, index_of(begin, n));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = half ? at.second : at.first;
      if (i >= h.dim) continue;
      if (coded)
        ((uint8_t *)to)[to_at + i] = code_of(x[n][half], divisor);
      else
        store_bits(to, to_at + i, p.kind,
                   at.turned ? bits_of(x[n][half], p.kind) : c.bits[n][half]);
    }
  }
}

__device__ __forceinline__ float largest_of(const numbers &x, float largest) {
  const float all[4] = {x.first.x, x.first.y, x.second.x, x.second.y};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (fabsf(all[i]) < INFINITY) largest = fmaxf(largest, fabsf(all[i]));
  return largest;
}

// A quad's numbers, turned by the angles of the position.
__device__ __forceinline__ numbers turn_quad_at(const fa3_append_params &p, const quad &q, int i,
                                                int position, const words &w) {
  return turn_quad(p, q, w, load_angles(p, q, i, position), p.kind);
}

// As make_scale, of which x is the first quad.
__device__ __forceinline__ float make_scale_of_quads(const fa3_append_params &p, const head &h,
                                                     int position, const numbers &x) {
  float largest = largest_of(x, 0.0f);
#pragma unroll 1
  for (int i = threadIdx.x % 32 + 32; 4 * i < h.dim; i += 32) {
    const quad q = find_quad(p, h, i);
    largest = largest_of(turn_quad_at(p, q, i, position, load_quad(h, q, i)), largest);
  }
  return scale_of_largest(largest);
}

// To a row of the same kind, or, with a divisor, of codes.
__device__ __forceinline__ void store_quad(const fa3_append_params &p, const quad &q,
                                           const words &w, const numbers &x, void *to, int64_t at,
                                           bool coded, float divisor) {
  if (coded) {
    uint8_t *const row = (uint8_t *)to + at;
    row[q.first] = code_of(x.first.x, divisor), row[q.first + 1] = code_of(x.first.y, divisor);
    row[q.second] = code_of(x.second.x, divisor), row[q.second + 1] = code_of(x.second.y, divisor);
    return;
  }
  uint16_t *const row = (uint16_t *)to + at;
  const words out = words_of(q, w, x, p.kind);
  *(uint32_t *)(row + q.first) = out.first;
  *(uint32_t *)(row + q.second) = out.second;
}

// A warp's head of a row. What does not depend on memory goes before the wait for what was queued
// before. kWords: by quads; else elements are of any kind, and may lie anywhere.
template <bool kWords>
__device__ __forceinline__ void append_head(const fa3_append_params &p) {
  const int batch = blockIdx.y, row = blockIdx.x;
  const int number = blockIdx.z * FA3_APPEND_WARPS + threadIdx.x / 32;
  const bool value = number >= p.heads_k && number < 2 * p.heads_k;
  const bool query = number >= 2 * p.heads_k;
  const int head_number = query ? number - 2 * p.heads_k : value ? number - p.heads_k : number;
  const fa3_operand &from = query ? p.query : value ? p.new_value : p.new_key;
  const fa3_operand &to = query ? p.rotated_query : value ? p.value : p.key;
  const int64_t from_at =
      offset(from, p.sequences.cu_seqlens_q != nullptr ? 0 : batch, row, head_number);

  wait_for_prior_grids();
  let_next_grid_launch();  // which may count on what was before (decode_work.cuh)
  if (number >= 2 * p.heads_k + p.heads_q) return;
  const fa3_sequence sequence = fa3_find_sequence(&p.sequences, batch);
  if (row >= sequence.mask.queries) return;
  const int from_row = sequence.query_row + row;
  const head h = {from.data, from_at + sequence.query_row * from.stride_row,
                  value ? p.head_dim_v : p.head_dim, value ? 0 : p.pairs};
  const int lane = threadIdx.x & 31;
  const quad q = find_quad(p, h, lane);
  words w;
  chunk c;
  if (kWords)
    w = load_quad(h, q, lane);
  else
    load_chunk(p, h, 0, c);

  const int key = sequence.mask.keys + row;
  const int position = p.positions ? p.positions[sequence.query_batch * p.positions_stride_batch +
                                                 from_row * p.positions_stride_row]
                                   : key;
  int to_row = sequence.key_row + key, page = sequence.key_batch;
  const bool there = to_row >= 0 && to_row < p.rows_k;
  if (!query && there && p.page_table) {
    page = p.page_table[batch * p.page_table_stride + to_row / p.page_size];
    to_row %= p.page_size;
  }
  numbers y; /* turned while the page is on its way */
  float x[kPairs][2];
  if (kWords)
    y = turn_quad_at(p, q, lane, position, w);
  else
    turn_chunk(p, h, 0, position, c, x);
  if (!query && !(there && page >= 0 && page < p.pages)) return;

  const bool coded = p.quantised && !query;
  float divisor = 1.0f;
  if (coded) {
    const fa3_scales &scales = value ? p.value_scale : p.key_scale;
    float *const scale = find_scale(scales, page, to_row, head_number);
    if (scales.rows == 1) {
      divisor = kWords ? make_scale_of_quads(p, h, position, y) : make_scale(p, h, position, x);
      if (lane == 0) *scale = divisor;
    } else if (scales.data != nullptr) {
      divisor = *scale;
    }
    if (divisor == 0.0f) divisor = 1.0f;  // times 0 every code is 0
  }
  const int64_t at = query ? offset(to, sequence.query_batch, from_row, head_number)
                           : offset(to, page, to_row, head_number);
  if constexpr (kWords) {
    if (4 * lane < h.dim) store_quad(p, q, w, y, to.data, at, coded, divisor);
#pragma unroll 1
    for (int i = lane + 32; 4 * i < h.dim; i += 32) {
      const quad next = find_quad(p, h, i);
      w = load_quad(h, next, i);
      store_quad(p, next, w, turn_quad_at(p, next, i, position, w), to.data, at, coded, divisor);
    }
  } else {
#pragma unroll 1
    for (int begin = 0;;) {
      store_chunk(p, h, begin, c, x, to.data, at, coded, divisor);
      begin += kChunk;
      if (2 * begin >= h.dim) break;
      load_chunk(p, h, begin, c);
      turn_chunk(p, h, begin, position, c, x);
    }
  }
}

extern "C" __global__ void __launch_bounds__(FA3_APPEND_THREADS, 4)
    append(const __grid_constant__ fa3_append_params p) {
  if (p.words)
    append_head<true>(p);
  else
    append_head<false>(p);
}
