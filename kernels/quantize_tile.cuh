// The quantise kernel's tiles: which rows they are, and each thread's elements of them on their way
// to shared memory and from there.
#ifndef FA3_QUANTIZE_TILE_CUH
#define FA3_QUANTIZE_TILE_CUH

#include <cuda_fp16.h>

#include "copy_async.cuh"
#include "quantize_params.h"
#include "registers.cuh"

#if FA3_FP32
enum { kElementBytes = 4 };
#else
enum { kElementBytes = 2 };
#endif
enum {
  kDim = FA3_HEAD_DIM,
  kElements = FA3_QUANTIZE_ELEMENTS,
  kRows = FA3_QUANTIZE_ROWS,
  kChunk = 8, /* neighbours */
  kChunks = kElements / kChunk,
  kStride = kDim / kChunks,  /* from a thread's chunk to its next one */
  kLanes = kDim / kElements, /* threads of a row */
  kVectors = kElements * kElementBytes / 16,
  kPartBytes = FA3_QUANTIZE_STAGE_BYTES / (kRows * kVectors) /* 16 for each thread at most */
};

struct tile {
  int batch, head;
  int row;  // the first, in its sequence
  int rows;
  int64_t input, codes, positions;  // offsets of the first row
  int64_t scale;
};

__device__ __forceinline__ tile find_tile(const fa3_quantize_params &p, int index) {
  tile t;
  int part;
  if (p.subtract_mean) {
    part = index % p.tiles;
    t.head = index / p.tiles % p.heads;
    t.batch = index / p.tiles / p.heads;
  } else {
    t.head = index % p.heads;
    part = index / p.heads % p.tiles;
    t.batch = index / p.heads / p.tiles;
  }
  const fa3_sequence sequence = fa3_find_sequence(&p.sequences, t.batch);
  const int span = part / p.span_tiles, before = part % p.span_tiles * p.tile_rows;
  t.row = span * p.span_rows + before;
  t.rows = min(min(p.tile_rows, p.span_rows - before), sequence.mask.queries - t.row);
  const int64_t row = sequence.query_row + (int64_t)t.row, batch = sequence.query_batch;
  t.input = batch * p.input.stride_batch + row * p.input.stride_row + t.head * p.input.stride_head;
  t.codes = batch * p.codes.stride_batch + row * p.codes.stride_row + t.head * p.codes.stride_head;
  t.positions = batch * p.positions_stride_batch + row * p.positions_stride_row;
  int64_t block = 0;
  if (p.scale_rows) {
    block = t.row / p.scale_rows;
    if (p.sequences.cu_seqlens_q) block += sequence.query_row / p.scale_rows + t.batch;
  }
  t.scale =
      t.batch * p.scale.stride_batch + t.head * p.scale.stride_head + block * p.scale.stride_row;
  return t;
}

// The first element of a chunk of the thread's. Read anew, nothing that follows from it stays in
// registers from tile to tile.
__device__ __forceinline__ int first_of(int chunk) {
  return chunk * kStride + thread_again() % kLanes * kChunk;
}

// Element i of the thread's.
__device__ __forceinline__ int index_of(int i) {
  return first_of(i / kChunk) + i % kChunk;
}

__device__ __forceinline__ uint32_t load_bits(const char *from) {
  return kElementBytes == 4 ? *(const uint32_t *)from : *(const uint16_t *)from;
}

// PTX ISA, "st": an element.
__device__ __forceinline__ void store_shared_bits(uint32_t to, uint32_t bits) {
  if (kElementBytes == 4)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
  else
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"((uint16_t)bits) : "memory");
}

// PTX ISA, "ld", likewise.
__device__ __forceinline__ uint32_t load_shared_bits(uint32_t from) {
  uint32_t bits;
  if (kElementBytes == 4)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
  else
    asm volatile("{\n\t.reg .b16 x;\n\tld.shared.b16 x, [%1];\n\tcvt.u32.u16 %0, x;\n\t}"
                 : "=r"(bits)
                 : "r"(from)
                 : "memory");
  return bits;
}

__device__ __forceinline__ float number_of(uint32_t bits) {
#if FA3_BF16
  return __uint_as_float(bits << 16);
#elif FA3_FP16
  return __half2float(__ushort_as_half((unsigned short)bits));
#else
  return __uint_as_float(bits);
#endif
}

// Number i of those that words hold.
__device__ __forceinline__ float pair_number_of(const uint32_t *words, int i) {
#if FA3_BF16
  return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
#else
  return number_of(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
#endif
}

__device__ __forceinline__ float number_of(const uint32_t *words, int i) {
  return kElementBytes == 4 ? __uint_as_float(words[i]) : pair_number_of(words, i);
}

// Where vector v of the thread's row r is: 16 bytes of each thread in turn.
__device__ __forceinline__ uint32_t place_of(uint32_t stage, int r, int v, int thread) {
  return stage + (r * kVectors + v) * kPartBytes + thread * 16;
}

// The same of element d of that row, which another of the row's threads may have.
__device__ __forceinline__ uint32_t place_of_element(uint32_t stage, int r, int d) {
  const int chunk = d / kStride, within = d % kStride, byte = within % kChunk * kElementBytes;
  return place_of(stage, r, chunk * kVectors / kChunks + byte / 16,
                  threadIdx.x / kLanes * kLanes + within / kChunk) +
         byte % 16;
}

// The thread's share of a tile on its way to shared memory, zeros where there is nothing. What
// can't be copied so is loaded and stored.
__device__ __forceinline__ void load_ahead(const fa3_quantize_params &p, const tile &t,
                                           uint32_t stage) {
  const int row = threadIdx.x / kLanes, row_step = blockDim.x / kLanes;
  const int64_t row_bytes = p.input.stride_row * kElementBytes;
  const char *from = (const char *)p.input.data + t.input * kElementBytes + row * row_bytes;
  if (p.vector_input) {
#pragma unroll
    for (int r = 0; r < kRows; r++, from += row_step * row_bytes)
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        const int first = index_of(v * 16 / kElementBytes);
        copy_async(place_of(stage, r, v, threadIdx.x), from + first * kElementBytes,
                   row + r * row_step < t.rows && first < p.head_dim);
      }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows * kElements; i++) {
    const int r = i / kElements, d = index_of(i % kElements);
    const bool there = row + r * row_step < t.rows && d < p.head_dim;
    store_shared_bits(place_of_element(stage, r, d),
                      there ? load_bits(from + r * row_step * row_bytes + d * kElementBytes) : 0);
  }
}

// The thread's elements of its row r, as floats.
__device__ __forceinline__ void read_row(int r, uint32_t stage, float (&x)[kElements]) {
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    const uint4 raw = load_shared_vector(place_of(stage, r, v, threadIdx.x));
    const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 16 / kElementBytes; i++)
      x[v * 16 / kElementBytes + i] = number_of(words, i);
  }
}

__device__ __forceinline__ float read_element(int r, int d, uint32_t stage) {
  return number_of(load_shared_bits(place_of_element(stage, r, d)));
}

#endif
