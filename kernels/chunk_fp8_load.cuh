// The loading warps of the kernel for many queries to a cache of codes: each brings 16 keys and
// values at a time into its own ring, as the decode kernels do, and makes float16 of the codes
// there, which holds each exactly.
#ifndef FA3_CHUNK_FP8_LOAD_CUH
#define FA3_CHUNK_FP8_LOAD_CUH

#include "chunk_fp8_work.cuh"
#include "codes.cuh"
#include "tma.cuh"

// 16 rows of codes become rows of a tile, from `row` on. Eight lanes have the same columns of
// neighbouring rows: neither their loads nor their stores meet in a bank.
__device__ __forceinline__ void unpack_rows(uint32_t codes, uint32_t tile, int row) {
  const int lane = thread_again() & 31;
#pragma unroll
  for (int i = 0; i < kRowUnits / 2; ++i) {
    const int r = (lane & 7) + i % 2 * 8, unit = lane / 8 + i / 2 * 4;
    const uint4 x = load_shared_vector(codes + tile_offset(r, unit));
    uint32_t low[4], high[4];
    unpack_codes(x.x, low[0], low[1]);
    unpack_codes(x.y, low[2], low[3]);
    unpack_codes(x.z, high[0], high[1]);
    unpack_codes(x.w, high[2], high[3]);
    store_shared_vector(tile + place_in_tile<kUnitKeys>(row + r, 2 * unit), low);
    store_shared_vector(tile + place_in_tile<kUnitKeys>(row + r, 2 * unit + 1), high);
  }
}

// A warp's codes of keys, or of values, become its part of a tile; so does each one's scale.
__device__ __forceinline__ void unpack_part(const ring<kTiles, kKBytes> &r, uint32_t scales,
                                            uint32_t codes, uint32_t from, uint32_t tile) {
  const int row = thread_again() / 32 % kLoadersOfTile * kStepKeys;
  ring_wait_empty(r, tile);
  unpack_rows(codes, ring_tile(r, tile), row);
  const int lane = thread_again() & 31;
  if (lane < kStepKeys)
    store_shared_float(scales + tile % kTiles * kTileScaleBytes + (row + lane) * 4,
                       load_shared_float(from + lane * 4));
  fence_proxy_async();  // what the warp has written is there for products
  barrier_arrive(ring_full(r, tile));
}

__device__ __forceinline__ void load(const fa3_decode_fp8_params &fp8, const block_work &w,
                                     const layout &m) {
  const fa3_decode_params &p = fp8.decode;
  const int warp = threadIdx.x / 32;
  const lane_scales scales = find_scales(fp8, w);
  // Of the next load: its key, and the tile of it. What is unpacked is some steps behind.
  int tile = warp / kLoadersOfTile;
  int key = (w.units.begin + tile) * kUnitKeys + warp % kLoadersOfTile * kStepKeys;
  uint32_t stage = 0;
#pragma unroll 1
  for (;; tile += kTurns) {
    const int tiles = again(w).units.end - again(w).units.begin;
    const int behind = tile - (kStages - 1) * kTurns;
    if (behind >= tiles) break;
    const uint32_t ring = m.codes + thread_again() / 32 * kRingBytes;
    if (behind >= 0) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    if (tile < tiles) {
      const uint32_t to = ring + stage * kStageBytes;
      const place at = load_step(p, w, key, to);
      load_scale(scales, at, to, thread_again() & 31);
    }
    key += kTurns * kUnitKeys;
    copy_async_commit();
    if (++stage == kStages) stage = 0;
    if (behind < 0) continue;
    if (kQInRegisters) barrier_wait(m.queries_taken, 0);
    const uint32_t codes = ring + stage * kStageBytes, of_keys = codes + kScalesAt;
    unpack_part(m.k, m.key_scales, codes, of_keys, behind);
    unpack_part(m.v, m.value_scales, codes + kValuesAt, of_keys + kStepKeys * 4, behind);
    __syncwarp();
  }
}

#endif
