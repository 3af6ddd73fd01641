// Where tiles of keys are dealt out in parts: what these have of dK and dV meets in memory. Who
// comes last adds it up, in the order of the parts whoever that is.
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
  const fa3_key_tile tile = {w.tile, w.head, w.batch, w.head_part, w.row_part};
  const fa3_place_of_part place = fa3_find_part(&p.tiles, &tile, &w.sequence.mask, tile_q, tile_k);
  return {place.number, place.count,
          w.head * p.key_slots + w.tile +
              fa3_backward_key_slot(&p.sequences, &p.tiles, w.batch, w.sequence.key_row, tile_k)};
}

// Where a thread's share of a part's gradient lies: for each eight columns one vector a thread, as
// wgmma has them. `warp`: of those that have 16 of the tile's keys each; `column`: 0, or the
// columns of the gradient before it.
template <int kTileKeys, int kAllColumns>
__device__ __forceinline__ float4 *place_of_part(const fa3_backward_params &p, int slot, int part,
                                                 int warp, int column, int columns) {
  const int64_t buffer = (int64_t)slot * fa3_key_tile_parts(&p.tiles) + part;
  return (float4 *)(p.parts + buffer * (kTileKeys * kAllColumns) + kTileKeys * column +
                    16 * columns * warp) +
         (thread_again() & 31);
}

template <int kCount>
__device__ __forceinline__ void store_part(const float (&x)[kCount], float4 *to) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
    to[32 * j] = make_float4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}

// The warp has stored its share of a part: whether those that have the same keys in the other parts
// all have.
__device__ __forceinline__ bool last_of_parts(const fa3_backward_params &p,
                                              const parts_of_tile &parts, int warp) {
  int before = 0;
  __syncwarp();
  if ((thread_again() & 31) == 0)
    before = count_both(p.parts_there + parts.slot * FA3_BACKWARD_PART_WARPS + warp);
  return __shfl_sync(0xffffffff, before, 0) + 1 == parts.count;
}

// Adds what another part has; all of its loads are in flight together.
template <int kCount>
__device__ __forceinline__ void add_part(float (&x)[kCount], const float4 *from) {
  float4 y[kCount / 4];
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(y[j].x), "=f"(y[j].y), "=f"(y[j].z), "=f"(y[j].w)
                 : "l"(from + 32 * j)
                 : "memory");
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    float *to = x + 4 * j;
    to[0] += y[j].x, to[1] += y[j].y, to[2] += y[j].z, to[3] += y[j].w;
  }
}

#endif
