// What a block of chunk_fp8.cu, or of speculative_fp8.cu, does, and how its tiles lie.
#ifndef FA3_CHUNK_BLOCK_CUH
#define FA3_CHUNK_BLOCK_CUH

#include "decode_work.cuh"

// What a block does, in shared memory.
struct block_work : work {
  fa3_range common;  // keys that all rows see
};

// The same, but read anew: nothing of it is kept in registers.
__device__ __forceinline__ const block_work &again(const block_work &w) {
  const block_work *at = &w;
  asm volatile("" : "+l"(at));
  return *at;
}

// Tiles of float16 lie in shared memory as blocks of 64 columns, row after row, swizzled.
constexpr int kBlockBytes = 128;  // of a row of a block

// Where 16 bytes, eight columns, are in a tile of so many rows.
template <int kTileRows>
__device__ __forceinline__ uint32_t place_in_tile(int row, int unit) {
  return (unit / 8 * kTileRows + row) * kBlockBytes + (((unit ^ row) & 7) << 4);
}

#endif
