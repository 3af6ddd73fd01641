// The forward kernel's sizes, its shared memory, and the warp that plans the tiles.
#ifndef FA3_FORWARD_WORK_CUH
#define FA3_FORWARD_WORK_CUH

#include "forward_params.h"
#include "registers.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#ifndef FA3_PINGPONG
#define FA3_PINGPONG 1
#endif

constexpr int kHeadDim = FA3_HEAD_DIM;           // of Q and K
constexpr int kHeadDimV = FA3_VALUE_HEAD_DIM;    // of V and O, <= kHeadDim
constexpr int kRows = 64;                        // of Q, of a consumer
constexpr int kWarpgroups = FA3_TILE_Q / kRows;  // consumers
constexpr int kTileK = FA3_TILE_K;               // keys of a tile
constexpr int kStages = FA3_FORWARD_STAGES;      // depth of the rings of K and of V
constexpr int kWorkSlots = 2;                    // the tile that is computed, and the next

constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerWarps = 4 * kWarpgroups;
// What the launch allots (168 or 128 for every thread) is all there is to share out.
constexpr int kProducerRegisters = kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;

// A tile lies in shared memory as blocks of kChunk columns, row after row of
// kRowBytes, swizzled by the copy engine.
constexpr int kChunk = kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 ? 64 : 32;
constexpr int kRowBytes = 2 * kChunk;
constexpr int kUnits = kRowBytes / 16;  // of 16 bytes in a row
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kChunksV = kHeadDimV / kChunk;
constexpr int kQBytes = kRows * kHeadDim * 2;
constexpr int kKBytes = kTileK * kHeadDim * 2;
constexpr int kVBytes = kTileK * kHeadDimV * 2;
constexpr int kWorkBytes = 128;
constexpr int kDealBytes = 48;

// Whether keys and values are unpacked codes with scales of rows (forward_unpacked.cuh). Those of a
// tile come with K, and are read when that may be gone: there is room for more of them.
#if FA3_UNPACKED == 2
constexpr bool kRowScales = true;
#else
constexpr bool kRowScales = false;
#endif
constexpr int kScaleTiles = 2 * kStages;
constexpr int kScaleBytes = kTileK * 4;  // of keys, or of values
constexpr int kScalesOfTile = kRowScales ? 2 * kScaleBytes : 0;

// A warp's 16 rows of O leave through shared memory, this many chunks at a time.
constexpr int kOChunks = kChunksV < 2 ? 1 : 2;
constexpr int kOChunkBytes = 16 * kRowBytes;
constexpr int kOBytes = kOChunks * kOChunkBytes;

// Where the swizzle puts the 16 bytes number `unit` of a row of a chunk.
__device__ __forceinline__ uint32_t swizzled(int row, int unit) {
  return row * kRowBytes + ((unit ^ (kRowBytes == 128 ? row & 7 : (row & 7) >> 1)) << 4);
}

static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0 && kTileK % 8 == 0, "tile sizes");
// A warpgroup that waits for the next work holds the buffer of its last V, and those of K and V
// that the other rows of its tile do not see: of one tile at most, or it would wait for what the
// loading warp can't reach.
static_assert(kRows * (kWarpgroups - 1) <= kTileK, "rows");

// What lies in shared memory. The rings of Q are one for each consumer, side by side.
struct layout {
  ring<1, kQBytes> q;
  ring<kStages, kKBytes> k;
  ring<kStages, kVBytes> v;
  uint32_t o;        // kOBytes for each consumer warp
  uint32_t scales;   // kScalesOfTile for each of kScaleTiles
  barrier v_landed;  // a tile of V of which a part is to be cleared
  ring<kWorkSlots, kWorkBytes> work;
  barrier work_wanted;
  barrier k_copied, v_copied;  // for each buffer of K, of V: the rows that threads copy are there
  uint32_t deal;               // kDealBytes
  uint32_t end;
};

// From a base aligned to 1024, as the copy engine's tiles have to be.
__host__ __device__ constexpr layout lay_out(uint32_t base) {
  layout m = {};
  const uint32_t q = base, k = q + kWarpgroups * kQBytes, v = k + kStages * kKBytes;
  m.o = v + kStages * kVBytes;
  m.scales = m.o + kConsumerWarps * kOBytes;
  const uint32_t work = m.scales + kScaleTiles * kScalesOfTile;
  const uint32_t q_barriers = work + kWorkSlots * kWorkBytes;
  const uint32_t k_barriers = q_barriers + kWarpgroups * kRingBarrierBytes<1>;
  const uint32_t v_barriers = k_barriers + kRingBarrierBytes<kStages>;
  const uint32_t work_barriers = v_barriers + kRingBarrierBytes<kStages>;
  m.q = make_ring<1, kQBytes>(q, q_barriers);
  m.k = make_ring<kStages, kKBytes>(k, k_barriers);
  m.v = make_ring<kStages, kVBytes>(v, v_barriers);
  m.work = make_ring<kWorkSlots, kWorkBytes>(work, work_barriers);
  m.v_landed = {work_barriers + kRingBarrierBytes<kWorkSlots>};
  m.work_wanted = {m.v_landed.address + 8};
  m.k_copied = {m.work_wanted.address + 8};
  m.v_copied = {m.k_copied.address + 8 * kStages};
  m.deal = m.v_copied.address + 8 * kStages;
  m.end = m.deal + kDealBytes;
  return m;
}

constexpr int kSharedBytes = lay_out(0).end;
constexpr int kSharedBytesByHost =
    FA3_FORWARD_SHARED_BYTES(kHeadDim, kHeadDimV, FA3_TILE_Q, kTileK, kRowScales);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kThreads == FA3_FORWARD_THREADS(FA3_TILE_Q), "threads");
static_assert(kChunk == FA3_FORWARD_CHUNK(kHeadDim, kHeadDimV), "chunk");

// Where the copy engine loads pages, so many warps share each tile, or fewer if that has fewer
// boxes; where none are shared, one warp loads K and one V.
constexpr int kPageLoaders = kHeadDim > 128 ? 1 : 3;

// The same where threads copy them row by row.
constexpr int kRowLoaders = kHeadDim > 64 ? 2 : 1;

// How many warps tell when a buffer of K or V is full: of rows that threads copy one tells.
__device__ __forceinline__ int loading_warps(const fa3_forward_params &params) {
  return FA3_PAGES && params.box > 0 ? min(kPageLoaders, kTileK / params.box) : 1;
}

// Its barriers and the initial arrivals at them, by one thread.
__device__ __forceinline__ void init_barriers(const fa3_forward_params &params, const layout &m,
                                              bool paged) {
  const int loaders = loading_warps(params);
  // Who reads the work beside the consumers: warps 0 and 1, and 3 where it loads pages.
  const bool third = paged && (params.box == 0 || kPageLoaders == 1 || loaders == 3);
  for (int i = 0; i < kWarpgroups; ++i) ring_init(ring_beside(m.q, i), 1, 4);
  ring_init(m.k, loaders, kConsumerWarps);
  ring_init(m.v, loaders, kConsumerWarps);
  ring_init(m.work, 1, 32 * (kConsumerWarps + (third ? 3 : 2)));
  barrier_init(m.v_landed, loaders);
  barrier_init(m.work_wanted, 1);
  for (int i = 0; paged && i < kStages; ++i) {
    mbarrier_init(m.k_copied.address + 8 * i, 32 * kRowLoaders);
    mbarrier_init(m.v_copied.address + 8 * i, 32 * kRowLoaders);
  }
  mbarrier_init_fence();
}

enum { kBarrierTurn = 1 };  // named barriers kBarrierTurn + warpgroup; 0 is __syncthreads

#include "forward_tiles.cuh"

#endif
