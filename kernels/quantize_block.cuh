// What a block of the quantise kernel has in shared memory, and its rows on their way there and
// from there.
#ifndef FA3_QUANTIZE_BLOCK_CUH
#define FA3_QUANTIZE_BLOCK_CUH

#include "quantize_rotary_words.cuh"

enum {
  kMostRows = FA3_QUANTIZE_THREADS / kLanes,
  kTileRows = kMostRows < FA3_QUANTIZE_TILE_ROWS ? kMostRows : FA3_QUANTIZE_TILE_ROWS,
  kFound = 8,       /* tiles that are found at a time, by a lane each */
  kLeastGroup = 128 /* threads that wait for each other: there are 15 named barriers */
};

struct shared {
  unsigned largest[4][kTileRows];           // of each scale of a tile; bits of floats
  tile tiles[2 * kFound];                   // a ring: at turn k it has tiles k to k + 7 at least
  tile whole;                               // all that a mean is of
  alignas(16) float factors[kNumbersRoom];  // of the rotation
  alignas(16) float mean[kNumbersRoom];
  double sums[kDim];         // of the block's rows
  float scale;               // of the sequence
  int group;                 // threads that wait for each other
  int tile_rows, slot_rows;  // of a tile, and of those with one scale
  bool of_warp;              // whether all of a warp's rows have one scale
  uint32_t signs[8];         // of a rotation by tensor cores, for lanes t of either quarter
  uint4 matrix[32];          // its second operand
};

// What a block has in its dynamic shared memory: rows as they are loaded, each thread's places, and
// rows of angles. So many bytes an element.
template <int kBytes>
__device__ __forceinline__ uint32_t stage_of(uint32_t start) {
  return start + this_thread() / 32 * (32 * kElements) * kBytes;
}

template <int kBytes>
__device__ __forceinline__ uint32_t load_place_of(uint32_t start) {
  return start + blockDim.x * kElements * kBytes + this_thread() * (uint32_t)sizeof(load_place);
}

template <int kBytes>
__device__ __forceinline__ uint32_t row_place_of(uint32_t start) {
  return load_place_of<kBytes>(start) + blockDim.x * (uint32_t)sizeof(load_place);
}

template <int kBytes>
__device__ __forceinline__ uint32_t angle_place_of(uint32_t start) {
  return load_place_of<kBytes>(start) + 2 * blockDim.x * (uint32_t)sizeof(load_place);
}

template <int kBytes, int kAngleBytes>
__device__ __forceinline__ uint32_t tables_of(uint32_t start) {
  return start + blockDim.x * (kElements * kBytes + FA3_QUANTIZE_PLACE_BYTES) +
         this_thread() / 32 * (32 * kElements) * kAngleBytes;
}

// How rows are taken. kAny: elements one at a time, as floats; else by vectors, and turned by
// tables of kAngleBytes an angle, if not 0.
template <bool kAny, int kAngleBytes, bool kProducts>
__device__ __forceinline__ void load(const fa3_quantize_params &p, const tile &t, bool same_angles,
                                     uint32_t start) {
  constexpr int kBytes = kAny ? 4 : kElementBytes;
  if constexpr (kAny)
    load_any(p, t, stage_of<kBytes>(start));
  else
    load_ahead<kProducts>(p, t, load_place_of<kBytes>(start));
  if constexpr (kAngleBytes > 0) {
    if (same_angles) return;
    if (kDim * kAngleBytes <= 512 && !p.positions && p.cos.stride_row == p.sin.stride_row &&
        t.row + t.rows <= p.table_rows)
      load_angles<kAngleBytes, kProducts>(p, t, angle_place_of<kBytes>(start));
    else
      load_tables<kAngleBytes, kProducts>(p, t, tables_of<kBytes, kAngleBytes>(start));
  }
}

template <bool kAny, int kAngleBytes>
__device__ __forceinline__ void read(const fa3_quantize_params &p, uint32_t start,
                                     float (&x)[kElements]) {
  constexpr int kBytes = kAny ? 4 : kElementBytes;
  copy_async_wait_all();
  __syncwarp();
  /* Where there are no angles, in their place. */
  if constexpr (kAny || kAngleBytes)
    read_row<kBytes>(own_vector<kDim * kBytes>(stage_of<kBytes>(start)), x);
  else
    read_row<kBytes>(load_shared_word(angle_place_of<kBytes>(start)), x);
  if constexpr (kAngleBytes > 0) {
    const uint32_t stage = stage_of<kBytes>(start), tables = tables_of<kBytes, kAngleBytes>(start);
    if (p.rotate)
      turn_row<kAngleBytes, true>(p, stage, tables, x);
    else
      turn_row<kAngleBytes, false>(p, stage, tables, x);
  }
  __syncwarp();
}

#endif
