// Rows of Q in the tiles of the forward kernels.
#ifndef FA3_FORWARD_QUERIES_CUH
#define FA3_FORWARD_QUERIES_CUH

#include "forward_tiles.cuh"
#include "tma.cuh"

// Rows that no query will have become zeros, as where three heads share a tile: were they whatever
// shared memory held before, even NaN, each step would go its slow way. By one warp, before any
// queries are used.
template <int kChunksOfTile, int kBytesOfRow>
__device__ __forceinline__ void clear_spare_queries(const fa3_forward_params &params,
                                                    const layout &m) {
  const int rows = params.queries_per_warpgroup * params.tile_heads;
  for (int i = 0; rows < kRows && i < kWarpgroups; ++i)
    clear_rows<kChunksOfTile, kRows, kBytesOfRow>(ring_tile(ring_beside(m.q, i), 0), rows);
}

#endif
