// The quantise kernel's tiles: which rows they are, and each thread's elements of them on their way
// to shared memory and from there.
#ifndef FA3_QUANTIZE_TILE_CUH
#define FA3_QUANTIZE_TILE_CUH

#include <cuda_fp16.h>
#include <string.h>

#include "cluster.cuh"
#include "codes.cuh"
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
  kChunk = kElements / 2,    /* neighbours: a thread has a chunk of either half of its row */
  kHalf = kDim / 2,          /* from a thread's chunk to its other one */
  kLanes = kDim / kElements, /* threads of a row */
  kWarpRows = 32 / kLanes,   /* rows of a warp */
  kRowBytes = kDim * kElementBytes
};

// A head of some rows of a sequence.
struct tile_number {
  int batch, part, head;
};

struct tile {
  tile_number number;
  int row;  // the first, in its sequence
  int rows;
  const char *input;
  char *codes;
  float *scale;
  int64_t positions;  // offset of the first row
};

// Whether a cluster has all tiles of a head of a sequence.
__device__ __forceinline__ bool in_clusters(const fa3_quantize_params &p) {
  return p.subtract_mean || p.from == FA3_QUANTIZE_OF_SEQUENCE;
}

// Tiles are numbered by head first, or last where clusters have them.
__device__ __forceinline__ tile_number find_number(const fa3_quantize_params &p, int index) {
  if (in_clusters(p))
    return {index / p.tiles / p.heads, index % p.tiles, index / p.tiles % p.heads};
  return {index / p.heads / p.tiles, index / p.heads % p.tiles, index % p.heads};
}

// Which of its tiles a cluster's block takes in its k-th turn: forth, back and forth again, so that
// what it reads next is still in the L2 cache. The mean's sum is the first way.
__device__ __forceinline__ int there_and_back(const fa3_quantize_params &p, int count, int k) {
  if (p.subtract_mean) k += count;
  if (k >= 2 * count) k -= 2 * count;
  return k < count ? k : 2 * count - 1 - k;
}

// Which part of its head a block of a cluster takes in turn k.
__device__ __forceinline__ int part_of_turn(const fa3_quantize_params &p, int count, int k) {
  return (int)cluster_rank() + there_and_back(p, count, k) * (int)cluster_size();
}

// The tile that a block takes in turn k, without clusters. Heads that a block takes one after the
// other lie apart, so that what neighbouring blocks read at a time lies side by side.
__device__ __forceinline__ tile_number find_turn(const fa3_quantize_params &p, int k) {
  const int block = (int)blockIdx.x + k / p.in_turn * (int)gridDim.x, apart = p.heads / p.in_turn;
  return find_number(p, block / apart * p.heads + k % p.in_turn * apart + block % apart);
}

__device__ __forceinline__ tile find_tile(const fa3_quantize_params &p, const tile_number &number) {
  tile t;
  t.number = number;
  const fa3_sequence sequence = fa3_find_sequence(&p.sequences, number.batch);
  int span = number.part, before = 0;
  if (p.span_tiles > 1) {
    span = number.part / p.span_tiles;
    before = number.part % p.span_tiles * p.tile_rows;
  }
  t.row = span * p.span_rows + before;
  t.rows = min(min(p.tile_rows, p.span_rows - before), sequence.mask.queries - t.row);
  const int64_t row = sequence.query_row + (int64_t)t.row, batch = sequence.query_batch;
  t.input = (const char *)p.input.data +
            kElementBytes * (batch * p.input.stride_batch + row * p.input.stride_row +
                             number.head * p.input.stride_head);
  t.codes = (char *)p.codes.data + batch * p.codes.stride_batch + row * p.codes.stride_row +
            number.head * p.codes.stride_head;
  t.positions = batch * p.positions_stride_batch + row * p.positions_stride_row;
  int64_t block = 0;
  if (p.scale_rows) {
    block = (int64_t)span * p.span_scales;
    if (p.sequences.cu_seqlens_q) block += sequence.query_row / p.scale_rows + number.batch;
  }
  t.scale = (float *)p.scale.data + number.batch * p.scale.stride_batch +
            number.head * p.scale.stride_head + block * p.scale.stride_row;
  return t;
}

// The thread's number, read anew: nothing that follows from it stays in registers from tile to
// tile.
__device__ __forceinline__ unsigned this_thread(void) {
  return (unsigned)thread_again();
}

// The first element of a chunk of the thread's.
__device__ __forceinline__ int first_of(int chunk) {
  return (int)(chunk * kHalf + this_thread() % kLanes * kChunk);
}

__device__ __forceinline__ int warp_row(void) {
  return (int)(this_thread() / 32 * kWarpRows);
}

// The thread's row of a tile.
__device__ __forceinline__ int row_of(void) {
  return (int)(this_thread() / kLanes);
}

// PTX ISA, "ld": 16 bits of shared memory.
__device__ __forceinline__ uint32_t load_shared_half(uint32_t from) {
  uint32_t bits;
  asm volatile("{\n\t.reg .b16 x;\n\tld.shared.b16 x, [%1];\n\tcvt.u32.u16 %0, x;\n\t}"
               : "=r"(bits)
               : "r"(from)
               : "memory");
  return bits;
}

// PTX ISA, "ld": 32 bits.
__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t bits;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
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

// Number i of those that words hold, which have so many bytes each.
template <int kBytes>
__device__ __forceinline__ float number_in(const uint32_t (&words)[4], int i) {
  if (kBytes == 4) return __uint_as_float(words[i % 4]);
#if FA3_BF16
  return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
#else
  return number_of(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
#endif
}

// Two neighbouring numbers of shared memory.
template <int kBytes>
__device__ __forceinline__ void load_two_numbers(uint32_t from, float (&x)[2]) {
  if constexpr (kBytes == 4) {
    const float2 pair = load_shared_pair(from);
    x[0] = pair.x, x[1] = pair.y;
  } else {
    const uint32_t words[4] = {__float_as_uint(load_shared_float(from))};
    x[0] = number_in<kBytes>(words, 0), x[1] = number_in<kBytes>(words, 1);
  }
}

// A warp's rows of kBytes each lie in shared memory as vectors of 16 bytes. Where vector n of them
// is, in vectors: eight neighbouring threads that read the same vector of their chunks find them in
// different banks; with kProducts eight that read four vectors of two segments, or every other one
// of eight where numbers have 4 bytes (quantize_products.cuh). The place of the exclusive or of two
// numbers is that of their places.
template <int kBytes, bool kProducts = false>
__device__ __forceinline__ constexpr unsigned place_of_vector(unsigned n) {
  if (kProducts && kBytes == 4 * kDim) return n ^ (n / (kDim == 128 ? 32 : 16) & 1);
  if (kProducts) return n ^ (n / (kBytes == 256 ? 16 : 8) & 1) << 2;
  constexpr int kVectors = kBytes / 16, kChunkVectors = kVectors / 2 / kLanes;
  const unsigned row = n / kVectors, chunk = n % (kVectors / 2) / kChunkVectors;
  if (kChunkVectors == 2)
    return n ^ (kLanes == 2 ? (row & 1) | (row & 2) << 1 : kLanes == 4 ? row & 1 : chunk >> 2);
  return n ^ (kLanes == 2 ? row & 3 : kLanes == 4 ? (row & 1) << 1 | chunk >> 1 : chunk >> 1);
}

// The address of vector `n` of the warp's.
template <int kBytes, bool kProducts = false>
__device__ __forceinline__ uint32_t vector_at(uint32_t rows, unsigned n) {
  return rows + place_of_vector<kBytes, kProducts>(n) * 16;
}

// The first vector of the thread's first chunk; with kProducts, of those it has of a segment.
template <int kBytes, bool kProducts = false>
__device__ __forceinline__ uint32_t own_vector(uint32_t rows) {
  constexpr int kVectors = kBytes / 16;
  const unsigned thread = this_thread();
  if (kProducts)
    return vector_at<kBytes, true>(rows, thread % 32 / 4 * (kBytes == 256 ? 16 : 8) +
                                             (kBytes == 512 ? thread % 32 / 8 * 16 : 0) +
                                             thread % 4);
  return vector_at<kBytes>(
      rows, thread % 32 / kLanes * kVectors + thread % kLanes * (kVectors / 2 / kLanes));
}

// The numbers of a vector of shared memory.
template <int kBytes>
__device__ __forceinline__ void load_numbers(uint32_t from, float (&x)[16 / kBytes]) {
  const uint4 raw = load_shared_vector(from);
  const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 16 / kBytes; i++) x[i] = number_in<kBytes>(words, i);
}

// Where number d is of row r of the warp's, of kBytes each.
template <int kBytes, bool kProducts = false>
__device__ __forceinline__ uint32_t number_place(uint32_t rows, unsigned r, unsigned d) {
  return vector_at<kDim * kBytes, kProducts>(rows, (r * kDim + d) * kBytes / 16) + d * kBytes % 16;
}

template <int kBytes, bool kProducts = false>
__device__ __forceinline__ float number_at(uint32_t rows, unsigned r, unsigned d) {
  const uint32_t from = number_place<kBytes, kProducts>(rows, r, d);
  return kBytes == 4 ? load_shared_float(from) : number_of(load_shared_half(from));
}

// What a thread knows of its place in every tile. It is read from shared memory where it is needed,
// as registers are for elements.
struct load_place {  // of what the thread loads of its warp's rows, or of their angles
  int64_t from;      // bytes into the input; of angles, where those of the tile's first row are
  int row;           // none, where the head dim has no such elements
  uint32_t to;       // in shared memory
};

struct row_place {  // of the thread's row
  int64_t codes;    // offset
  int row;          // none, where the head dim has no such elements
  uint32_t slot;    // of the row's scale among the tile's, twice; and one: the thread writes it
};

template <class place>
__device__ __forceinline__ void store_place(uint32_t to, const place &from) {
  uint32_t words[4];
  memcpy(words, &from, sizeof words);
  store_shared_vector(to, words);
}

enum { kRowVectors = kRowBytes / 16, kLoadLanes = kRowVectors < 32 ? kRowVectors : 32 };

template <bool kProducts>
__device__ __forceinline__ load_place find_load_place(const fa3_quantize_params &p,
                                                      uint32_t stage) {
  const unsigned lane = threadIdx.x % 32, vector = lane % kLoadLanes;
  const unsigned row = threadIdx.x / 32 * kWarpRows + lane / kLoadLanes;
  const bool there = (int)vector * 16 < p.head_dim * kElementBytes;
  return {row * p.input.stride_row * kElementBytes + vector * 16, there ? (int)row : INT32_MAX / 2,
          vector_at<kRowBytes, kProducts>(stage, lane)};
}

__device__ __forceinline__ row_place find_row_place(const fa3_quantize_params &p, int slot_rows,
                                                    int row, int first) {
  const int slot = min(row, p.tile_rows - 1) / slot_rows;
  const bool writes = first == 0 && row == slot * slot_rows;
  return {row * p.codes.stride_row + first, first < p.head_dim ? row : INT32_MAX / 2,
          (uint32_t)(2 * slot + writes)};
}

// The warp's rows of a tile on their way to shared memory, zeros where there is nothing.
template <bool kProducts>
__device__ __forceinline__ void load_ahead(const fa3_quantize_params &p, const tile &t,
                                           uint32_t place) {
  const int64_t step = 32 / kLoadLanes * p.input.stride_row * kElementBytes;
  const uint4 at = load_shared_vector(place);
  const char *from = t.input + (int64_t)((uint64_t)at.y << 32 | at.x);
  const int rows = t.rows - (int)at.z;
#pragma unroll
  for (int n = 0; n < kWarpRows * kRowVectors; n += 32) {
    const int v = n % kRowVectors, row = n / kRowVectors;
    const unsigned swizzle = place_of_vector<kRowBytes, kProducts>(n) ^ n;
    const bool there = row < rows && (v == 0 || v * 16 + (int)(this_thread() % 32) * 16 <
                                                    p.head_dim * kElementBytes);
    if (n && !v) from += step;
    copy_async((at.w ^ swizzle * 16) + n * 16, from + v * 16, there);
  }
}

// The thread's elements of its row as floats, of numbers of so many bytes each.
template <int kBytes>
__device__ __forceinline__ void read_row(uint32_t own, float (&x)[kElements]) {
  constexpr int kNumbers = 16 / kBytes;
#pragma unroll
  for (int i = 0; i < kElements; i += kNumbers) {
    const uint4 raw = load_shared_vector(own ^ (i / kChunk * kHalf + i % kChunk) * kBytes);
    const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < kNumbers; j++) x[i + j] = number_in<kBytes>(words, j);
  }
}

#endif
