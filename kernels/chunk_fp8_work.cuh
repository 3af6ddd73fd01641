// Sizes and shared memory of the kernel for many queries to a cache of codes.
#ifndef FA3_CHUNK_FP8_WORK_CUH
#define FA3_CHUNK_FP8_WORK_CUH

#include "chunk_block.cuh"
#include "decode_scales.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

constexpr int kBlockColumns = 64;               // of a block of a tile
constexpr int kGroupRows = 64;                  // of a consumer warpgroup
constexpr int kConsumers = kRows / kGroupRows;  // warpgroups
// Warps that load, 16 keys of a tile each; more than a tile has take turns at tiles.
constexpr int kLoaders = FA3_CHUNK_FP8_LOADERS(kHeadDim);
constexpr int kLoadersOfTile = kUnitKeys / kLoadKeys;
constexpr int kTurns = kLoaders / kLoadersOfTile;
constexpr int kThreads = 32 * kLoaders + 128 * kConsumers;
static_assert(kRows == FA3_CHUNK_FP8_ROWS && kLoaders % kLoadersOfTile == 0 &&
                  kThreads == FA3_CHUNK_FP8_THREADS(kHeadDim),
              "threads");
// What the launch allots (128 or 168 for every thread) is all there is to share out.
constexpr int kProducerRegisters = kLoaders == 8 ? 80 : 88;
constexpr int kConsumerRegisters = kLoaders == 8 ? 176 : 208;

// Whether a consumer keeps its queries in registers, where there is room for them. They pass
// through what is K's place then.
constexpr bool kQInRegisters = kHeadDim <= 128;

constexpr int kQBytes = kGroupRows * kHeadDim * 2;
constexpr int kKBytes = kUnitKeys * kHeadDim * 2;
constexpr int kTiles = FA3_CHUNK_FP8_TILES(kHeadDim);  // of K, and of V, under way
constexpr int kTileScaleBytes = kUnitKeys * 4;         // of keys, or of values

// At its end a consumer warp's output, in floats, takes the place of what nobody reads any more.
constexpr int kPitch = kHeadDim + 4;
constexpr int kWarpRows = 16;

// Named barriers, of all consumers and of each warpgroup; 0 is __syncthreads.
enum { kBarrierConsumers = 1, kBarrierGroup };

// Whether both consumers have the same rows: then each tile of keys is one's.
__device__ __forceinline__ bool take_turns(const block_work &w) {
  return w.rows <= kGroupRows;
}

__device__ __forceinline__ int first_row_of(const block_work &w, int warpgroup) {
  return take_turns(w) ? 0 : warpgroup * kGroupRows;
}

// Tiles of a consumer.
struct tile_turns {
  int first, step, end;
};

// The same for a warp, so that the compiler knows its branches not to part threads. With a single
// tile under way the first consumer has all: it gives values back only when it has its next keys,
// which would be behind the other's.
__device__ __forceinline__ tile_turns find_turns(const block_work &w, int warpgroup) {
  const int tiles = w.units.end - w.units.begin;
  tile_turns turns = {0, 1, tiles};
  if (take_turns(w) && kTiles > 1) turns = {warpgroup, kConsumers, tiles};
  if (take_turns(w) && kTiles == 1 && warpgroup > 0) turns.end = 0;
  return {uniform(turns.first), uniform(turns.step), uniform(turns.end)};
}

struct layout {
  uint32_t q;  // kQBytes for each consumer
  ring<kTiles, kKBytes> k, v;
  uint32_t key_scales, value_scales;  // kTileScaleBytes for each tile
  uint32_t codes;                     // kRingBytes for each loading warp
  uint32_t results;                   // the top and sum of each row
  uint32_t work;
  barrier queries_taken;  // where they pass through K's place
  uint32_t end;
};

__host__ __device__ constexpr layout lay_out(uint32_t base) {
  layout m = {};
  m.q = base;
  const uint32_t k = m.q + (kQInRegisters ? 0 : kConsumers * kQBytes), v = k + kTiles * kKBytes;
  m.key_scales = v + kTiles * kKBytes;
  m.value_scales = m.key_scales + kTiles * kTileScaleBytes;
  m.codes = m.value_scales + kTiles * kTileScaleBytes;
  m.results = m.codes + kLoaders * kRingBytes;
  m.work = m.results + kRows * 8;
  const uint32_t barriers = m.work + (sizeof(block_work) + 7) / 8 * 8;
  m.k = make_ring<kTiles, kKBytes>(k, barriers);
  m.v = make_ring<kTiles, kKBytes>(v, barriers + kRingBarrierBytes<kTiles>);
  m.queries_taken = {barriers + 2 * kRingBarrierBytes<kTiles>};
  m.end = m.queries_taken.address + 8;
  return m;
}

constexpr int kSharedBytes = lay_out(0).end;
constexpr int kSharedBytesByHost = FA3_CHUNK_FP8_SHARED_BYTES(kHeadDim, kUnitKeys, kStages);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kRows * kPitch * 4 <= (int)lay_out(0).results, "room for the output");

#endif
