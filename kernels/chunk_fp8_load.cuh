// The loading warps of the kernel for many queries to a cache of codes: each brings 16 keys and
// values at a time into its own ring, as the decode kernels do, and makes float16 of the codes
// there, which holds each exactly.
#ifndef FA3_CHUNK_FP8_LOAD_CUH
#define FA3_CHUNK_FP8_LOAD_CUH

#include "chunk_fp8_work.cuh"
#include "codes.cuh"
#include "tma.cuh"

// What a lane unpacks of a warp's 16 rows of keys, or of values: units of 16 codes. Eight lanes
// have the same columns of neighbouring rows: neither their loads nor their stores meet in a bank.
constexpr int kUnitsOfLane = kRowUnits / 2;
constexpr int kUnitsAtOnce = kUnitsOfLane < 4 ? kUnitsOfLane : 4;

struct unit_place {
  int row, unit;
};

__device__ __forceinline__ unit_place unit_of_lane(int i) {
  const int lane = thread_again() & 31;
  return {(lane & 7) + i % 2 * 8, lane / 8 + i / 2 * 4};
}

// Units from number `first` on are read at once, so that their latencies do not add up.
struct units {
  uint4 codes[kUnitsAtOnce];
};

__device__ __forceinline__ void read_units(uint32_t codes, int first, units &x) {
#pragma unroll
  for (int i = 0; i < kUnitsAtOnce; ++i) {
    const unit_place at = unit_of_lane(first + i);
    x.codes[i] = load_shared_vector(codes + tile_offset(at.row, at.unit));
  }
}

__device__ __forceinline__ void unpack_units(const units &x, int first, uint32_t tile, int row) {
#pragma unroll
  for (int i = 0; i < kUnitsAtOnce; ++i) {
    const unit_place at = unit_of_lane(first + i);
    uint32_t low[4], high[4];
    unpack_codes(x.codes[i].x, low[0], low[1]);
    unpack_codes(x.codes[i].y, low[2], low[3]);
    unpack_codes(x.codes[i].z, high[0], high[1]);
    unpack_codes(x.codes[i].w, high[2], high[3]);
    store_shared_vector(tile + place_in_tile<kUnitKeys>(row + at.row, 2 * at.unit), low);
    store_shared_vector(tile + place_in_tile<kUnitKeys>(row + at.row, 2 * at.unit + 1), high);
  }
}

// A warp's codes of keys, or of values, become its part of a tile; so does each one's scale.
__device__ __forceinline__ void unpack_part(const ring<kTiles, kKBytes> &r, uint32_t scales,
                                            uint32_t codes, uint32_t from, uint32_t tile) {
  const int row = thread_again() / 32 % kLoadersOfTile * kLoadKeys;
  const int lane = thread_again() & 31;
  units x;
  read_units(codes, 0, x);
  const float scale = load_shared_float(from + lane % kLoadKeys * 4);
  ring_wait_empty(r, tile);
  unpack_units(x, 0, ring_tile(r, tile), row);
#pragma unroll
  for (int first = kUnitsAtOnce; first < kUnitsOfLane; first += kUnitsAtOnce) {
    read_units(codes, first, x);
    unpack_units(x, first, ring_tile(r, tile), row);
  }
  if (lane < kLoadKeys)
    store_shared_float(scales + tile % kTiles * kTileScaleBytes + (row + lane) * 4, scale);
  fence_proxy_async();  // what the warp has written is there for products
  barrier_arrive(ring_full(r, tile));
}

__device__ __forceinline__ void load(const fa3_decode_fp8_params &fp8, const block_work &of_block,
                                     const layout &m) {
  const work w = of_block;  // in registers
  const fa3_decode_params &p = fp8.decode;
  const int warp = threadIdx.x / 32;
  const lane_scales scales = find_scales(fp8, w);
  // Of the next load: its key, and the tile of it. What is unpacked is some steps behind.
  int tile = warp / kLoadersOfTile;
  int key = (w.units.begin + tile) * kUnitKeys + warp % kLoadersOfTile * kLoadKeys;
  const int tiles = w.units.end - w.units.begin;
  uint32_t stage = 0;
#pragma unroll 1
  for (;; tile += kTurns) {
    const int behind = tile - (kStages - 1) * kTurns;
    if (behind >= tiles) break;
    const uint32_t ring = m.codes + thread_again() / 32 * kRingBytes;
    if (behind >= 0) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    if (tile < tiles) {
      const uint32_t to = ring + stage * kStageBytes;
      const place at = load_neighbours(p, w, key, to);
      load_scale(scales, at, to, thread_again() & 31);
    }
    key += kTurns * kUnitKeys;
    copy_async_commit();
    if (++stage == kStages) stage = 0;
    if (behind < 0) continue;
    if (kQInRegisters && behind < kTurns) barrier_wait(m.queries_taken, 0);
    const uint32_t codes = ring + stage * kStageBytes, of_keys = codes + kScalesAt;
    unpack_part(m.k, m.key_scales, codes, of_keys, behind);
    unpack_part(m.v, m.value_scales, codes + kValuesAt, of_keys + kLoadKeys * 4, behind);
    __syncwarp();
  }
}

#endif
