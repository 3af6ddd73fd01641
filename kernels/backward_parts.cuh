// Where tiles of keys are dealt out in parts: what these have of dK and dV is added up in memory,
// pair by pair (backward_order.h).
#ifndef FA3_BACKWARD_PARTS_CUH
#define FA3_BACKWARD_PARTS_CUH

#include "backward_tile.cuh"
#include "counters.cuh"

// Of a tile's parts, those that have work.
struct parts_of_tile {
  int number;  // of this one; -1: it has none
  int count;
  int slot;  // of the tile
};

__device__ __forceinline__ parts_of_tile find_parts(const fa3_backward_params &p, const work &w,
                                                    int tile_q, int tile_k) {
  if (fa3_key_tile_parts(&p.tiles) == 1) return {0, w.steps > 0, 0};
  const fa3_key_tile tile = {w.tile, w.head, w.batch, w.head_part, w.row_part, w.upward};
  const fa3_place_of_part place = fa3_find_part(&p.tiles, &tile, &w.sequence.mask, tile_q, tile_k);
  return {place.number, place.count,
          w.head * p.key_slots + w.tile +
              fa3_backward_key_slot(&p.sequences, &p.tiles, w.batch, w.sequence.key_row, tile_k)};
}

// Where a thread's share of the dV that is left in a place lies, behind all of which dK begins: for
// each eight columns one vector a thread, as wgmma has them. `warp`: of those that have 16 of the
// tile's keys each.
template <int kTileKeys, int kColumns>
__device__ __forceinline__ float4 *find_place(const fa3_backward_params &p, int slot, int place,
                                              int warp) {
  const int64_t buffer = (int64_t)slot * fa3_part_places(fa3_key_tile_parts(&p.tiles)) + place;
  return (float4 *)(p.parts + buffer * (2 * kTileKeys * kColumns) + 16 * kColumns * warp) +
         (thread_again() & 31);
}

template <int kCount>
__device__ __forceinline__ void store_part(const float (&x)[kCount], float4 *to) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
    to[32 * j] = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}

// What a warp has read and written comes before it sets a bit; and all its lanes may then read what
// the bits that were set tell of.
__device__ __forceinline__ int set_bit(int *arrivals, int bit) {
  __syncwarp();
  int before = (thread_again() & 31) == 0 ? fetch_or(arrivals, bit) : 0;
  before = __shfl_sync(0xffffffff, before, 0);
  __syncwarp();
  return before;
}

// Tells that this side of a pair has arrived; returns which bits were set before. If the other was
// first, its sum is waited for, which it leaves as soon as it has arrived.
__device__ __forceinline__ int arrive(int *arrivals, const fa3_pair &pair) {
  int before;
#pragma unroll 1
  do {
    before = set_bit(arrivals, pair.arrived);
  } while ((before & (pair.arrived | pair.left)) == pair.arrived);
  return before;
}

// Adds to both gradients what the other side has of them, dK `apart` vectors behind dV. The loads
// of 64 numbers are in flight together.
template <int kCount>
__device__ __forceinline__ void add_parts(float (&dv)[kCount], float (&dk)[kCount],
                                          const float4 *from, int apart) {
  constexpr int kVectors = 16;
#pragma unroll
  for (int begin = 0; begin < kCount / 2; begin += kVectors) {
    float4 y[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int j = begin + i;  // of dV's vectors, and then dK's
      if (j >= kCount / 2) break;
      y[i] = load_relaxed(j < kCount / 4 ? from + 32 * j : from + apart + 32 * (j - kCount / 4));
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int j = begin + i;
      if (j >= kCount / 2) break;
      float *to = j < kCount / 4 ? dv + 4 * j : dk + 4 * j - kCount;
      to[0] += y[i].x, to[1] += y[i].y, to[2] += y[i].z, to[3] += y[i].w;
    }
  }
}

#endif
