// V^T of a chunk of V in shared memory. Who includes it has the sizes of a tile (kTileK, kHeadDimV,
// kCodes, kKeys) and kTransposers (warps that share a chunk).
#ifndef FA3_TRANSPOSE_CHUNK_CUH
#define FA3_TRANSPOSE_CHUNK_CUH

#include "codes.cuh"
#include "tma.cuh"

// V^T, for a part of the rows that a chunk of V makes. The second product takes it as it takes K:
// along a row, key by key.
//
// A warp reads units of 32 keys of 16 columns: transposed as pairs of bytes, they leave a thread
// keys 2q and 2q + 1 of columns 2c and 2c + 1 (q = lane % 4, c = lane / 4), and of 8, 16 and 24
// keys on. Two registers, bytes exchanged, hold keys 2q, 2q + 1, 2q + 8 and 2q + 9 of one column
// each: 16 keys in this order side by side are just what P, in the layout that the first product
// leaves, is multiplied by. Half of the lanes take the odd column first, so that eight rows that
// are stored together lie in different banks.
struct chunk_part {
  uint32_t read, write;
  uint32_t first_column, second_column;
};

constexpr int kUnitSteps = kTileK / 32;
constexpr int kPartUnits = kUnitSteps * (kCodes / 16 / kTransposers);

__device__ __forceinline__ chunk_part part_of_chunk(uint32_t to, uint32_t from, int part,
                                                    int thread) {
  const int lane = thread & 31, matrix = lane >> 3, c = lane & 7;
  const int column = 2 * c + ((c >> 2) ^ (matrix & 1)), first = part * (kCodes / kTransposers);
  chunk_part p;
  p.first_column = lane < 16 ? 0x6420 : 0x7531;
  p.second_column = p.first_column ^ 0x1111;
  p.read = (from + swizzled_row<kCodes>(lane)) ^ first;
  p.write = ((to + swizzled_row<kKeys>(column)) ^ (matrix >> 1) << 4) + first * kKeys;
  return p;
}

// `from` and, below, `to`: where the chunk and V^T begin, if `p` does not say so.
__device__ __forceinline__ void load_unit(const chunk_part &p, int i, uint32_t (&x)[4],
                                          uint32_t from = 0) {
  load_matrices_transposed(from + (p.read ^ i / kUnitSteps * 16) + i % kUnitSteps * 32 * kCodes, x);
}

// `keys` are those of the sequence in this tile of V: beyond them there may be anything, and 0 *
// NaN would be NaN, so zeros are stored in their place.
__device__ __forceinline__ void clear_unit(int i, int keys, uint32_t (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int left = keys - (i % kUnitSteps * 32 + 8 * j + 2 * (threadIdx.x & 3));
    x[j] &= left > 1 ? 0xffffffff : left == 1 ? 0xffff : 0;
  }
}

// PTX ISA, "prmt": four of the bytes of two registers.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(which));
  return x;
}

__device__ __forceinline__ void store_unit(const chunk_part &p, int i, const uint32_t (&x)[4],
                                           uint32_t to = 0) {
  const int row = i / kUnitSteps * 16, key = i % kUnitSteps * 32;
  store_matrices(to + (p.write ^ key % kKeys) + (row + key / kKeys * kHeadDimV) * kKeys,
                 pick_bytes(x[0], x[1], p.first_column), pick_bytes(x[0], x[1], p.second_column),
                 pick_bytes(x[2], x[3], p.first_column), pick_bytes(x[2], x[3], p.second_column));
}

// The 32 keys number `step` of a chunk that the sequence ends in, `keys` in all: as any others, or
// one unit after the other, of which some keys are cleared, or zeros.
__device__ __forceinline__ void transpose_end_step(chunk_part p, int step, int keys,
                                                   uint32_t from = 0, uint32_t to = 0) {
  constexpr int kStepUnits = kPartUnits / kUnitSteps;
  const int first = step * 32, left = keys - first;
  from += first * kCodes;
  p.write ^= first % kKeys;
  to += first / kKeys * kHeadDimV * kKeys;
  uint32_t x[2][4];
  if (left >= 32) {
#pragma unroll
    for (int i = 0; i <= kStepUnits; ++i) {
      if (i < kStepUnits) load_unit(p, i * kUnitSteps, x[i % 2], from);
      if (i > 0) store_unit(p, (i - 1) * kUnitSteps, x[(i - 1) % 2], to);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kStepUnits; ++i) {
    if (left > 0) {
      load_unit(p, i * kUnitSteps, x[0], from);
      clear_unit(0, left, x[0]);
    } else {
      x[0][0] = x[0][1] = x[0][2] = x[0][3] = 0;
    }
    store_unit(p, i * kUnitSteps, x[0], to);
  }
}

#endif
