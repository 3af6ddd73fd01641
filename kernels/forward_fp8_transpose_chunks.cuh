// The FP8 forward kernel's warps that transpose V of head dim 256, whose tiles are of two chunks.
// Their time is what that kernel waits for. So they have as little as possible to do between
// chunks: of a tile they know what the loading warp tells them (set_keys), and loads of a chunk run
// beside stores of the one before.
#ifndef FA3_FORWARD_FP8_TRANSPOSE_CHUNKS_CUH
#define FA3_FORWARD_FP8_TRANSPOSE_CHUNKS_CUH

#include "forward_fp8_load.cuh"
#include "transpose_chunk.cuh"

constexpr int kAhead = 2;  // loads run ahead of stores, as many as there are registers for
constexpr int kTileUnits = kCodeChunks * kPartUnits;

// Where unit i of a tile comes from, and where it goes to.
__device__ __forceinline__ uint32_t unit_from(const layout &m, uint32_t tile, int i) {
  return ring_tile(m.v, tile * kCodeChunks + i / kPartUnits);
}

__device__ __forceinline__ uint32_t unit_to(const layout &m, uint32_t tile, int i) {
  return ring_tile(m.v_transposed, tile) + i / kPartUnits * kCodes * kKeys;
}

__device__ __forceinline__ void wait_for_chunk(const layout &m, uint32_t tile, int chunk) {
  // The phase is the tile's last bit, found by other means than that of the tile's first chunk: or
  // the compiler would keep that one, and there is no register for it.
  static_assert(kStages == kCodeChunks, "a phase for each tile");
  barrier_wait(ring_full(m.v, tile * kCodeChunks + chunk), __brev(tile) >> 31);
}

__device__ __forceinline__ void release_chunk(const layout &m, uint32_t tile, int chunk) {
  __syncwarp();
  if (elect_one()) barrier_arrive(ring_empty(m.v, tile * kCodeChunks + chunk));
}

// A tile that the sequence ends in.
__device__ __forceinline__ void transpose_end(const layout &m, const chunk_part &p, uint32_t tile,
                                              int keys) {
  ring_wait_empty(m.v_transposed, tile);
#pragma unroll 1
  for (int i = 0; i < kCodeChunks * kUnitSteps; ++i) {
    const int chunk = i / kUnitSteps, step = i % kUnitSteps, unit = chunk * kPartUnits;
    if (chunk > 0 && step == 0) wait_for_chunk(m, tile, chunk);
    transpose_end_step(p, step, keys, unit_from(m, tile, unit), unit_to(m, tile, unit));
    if (step == kUnitSteps - 1) release_chunk(m, tile, chunk);
  }
}

// Any other. `x` has the first loads.
__device__ __forceinline__ void transpose_tile(const layout &m, chunk_part &p, uint32_t tile,
                                               uint32_t (&x)[kAhead + 1][4]) {
#pragma unroll
  for (int i = 0; i < kTileUnits; ++i) {
    const int next = i + kAhead;
    asm volatile("" : "+r"(p.write));  // or addresses of all units take registers
    if (next < kTileUnits) {
      if (next % kPartUnits == 0) wait_for_chunk(m, tile, next / kPartUnits);
      load_unit(p, next % kPartUnits, x[next % (kAhead + 1)], unit_from(m, tile, next));
    }
    if (i == 0) ring_wait_empty(m.v_transposed, tile);
    store_unit(p, i % kPartUnits, x[i % (kAhead + 1)], unit_to(m, tile, i));
    if (i % kPartUnits == kPartUnits - 1) release_chunk(m, tile, i / kPartUnits);
  }
}

__device__ __forceinline__ void transpose_values(const layout &m, int part) {
  chunk_part p = part_of_chunk(0, 0, part, threadIdx.x);
#pragma unroll 1
  for (uint32_t tile = 0;; ++tile) {
    ring_wait_full(m.v, tile * kCodeChunks);
    // The lane that hands a chunk back has read for all.
    const int keys = __reduce_max_sync(0xffffffff, elect_one() ? keys_of(m, tile) : kNoTile);
    // Opaque, so that what follows from it takes no registers from tile to tile.
    asm volatile("" : "+r"(p.read), "+r"(p.write), "+r"(p.first_column));
    p.second_column = p.first_column ^ 0x1111;
    uint32_t x[kAhead + 1][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_unit(p, i, x[i], unit_from(m, tile, i));
    if (keys == kNoTile) break;
    if (keys < kTileK)
      transpose_end(m, p, tile, keys);
    else
      transpose_tile(m, p, tile, x);
    fence_proxy_async();
    __syncwarp();
    if (elect_one()) barrier_arrive(ring_full(m.v_transposed, tile));
  }
}

#endif
