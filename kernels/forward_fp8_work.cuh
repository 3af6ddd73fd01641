// The FP8 forward kernel's sizes and its shared memory.
#ifndef FA3_FORWARD_FP8_WORK_CUH
#define FA3_FORWARD_FP8_WORK_CUH

#include "codes.cuh"
#include "forward_fp8_params.h"
#include "registers.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#ifndef FA3_TRANSPOSED
#define FA3_TRANSPOSED 0
#endif
#ifndef FA3_MOST_KEYS
#define FA3_MOST_KEYS 0
#endif

constexpr int kHeadDim = FA3_HEAD_DIM;           // of Q and K
constexpr int kHeadDimV = FA3_VALUE_HEAD_DIM;    // of V and O
constexpr int kRows = 64;                        // of Q, of a consumer
constexpr int kWarpgroups = FA3_TILE_Q / kRows;  // consumers
constexpr int kTileK = FA3_TILE_K;               // keys of a tile
constexpr bool kHeadScales = FA3_HEAD_SCALES;    // no scale is of fewer rows than a sequence has
constexpr int kStages = FA3_FORWARD_STAGES;      // depth of the rings: of K's tiles, of chunks of V
constexpr int kTransposedStages =
    FA3_FORWARD_FP8_TRANSPOSED_STAGES(kHeadDim, kTileK, FA3_TRANSPOSED);  // of V transposed
constexpr int kWorkSlots = 2;  // the tile that is computed, and the next
// Where no row of a warpgroup sees more keys of its last tile, it computes no more scores. At head
// dim 256 that gains nothing.
constexpr int kNarrow = kTileK / 2;
constexpr bool kNarrows = kHeadDim <= 128;
constexpr bool kOneStep = FA3_MOST_KEYS > 0;  // no sequence has more keys
static_assert(FA3_MOST_KEYS <= kTileK, "a step's keys");
// Tiles of keys whose products the matrix unit sums.
constexpr int kPeriod = FA3_FORWARD_FP8_PERIOD / kTileK;

constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerWarps = 4 * kWarpgroups;
constexpr bool kTransposed = FA3_TRANSPOSED;       // V comes transposed
constexpr int kTransposers = kTransposed ? 0 : 2;  // warps
constexpr bool kTellsKeys = kHeadDim > 128;        // the loading warp does (set_keys)
// What the launch allots (168 or 128 for every thread) is all there is to share out. The loop for
// scales of heads has two tiles of products in hand: at head dim 256 it takes all that it can get.
constexpr bool kMostRegisters = kHeadScales && kHeadDim > 128;
constexpr int kProducerRegisters = kMostRegisters ? 24 : kWarpgroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kMostRegisters ? 240 : kWarpgroups == 2 ? 232 : 160;

// Tiles of Q, K and V lie in shared memory as blocks of kCodes columns, row after row, swizzled by
// the copy engine; V transposed as blocks of kKeys keys, a row for each column of V.
constexpr int kCodes = FA3_FORWARD_FP8_CHUNK(kHeadDim);
constexpr int kCodeChunks = kHeadDim / kCodes;
constexpr int kKeys = kTileK % 128 == 0 ? 128 : kTileK % 64 == 0 ? 64 : 32;
constexpr int kQBytes = kRows * kHeadDim;
constexpr int kKBytes = kTileK * kHeadDim;
constexpr int kVBytes = kTileK * kHeadDimV;
constexpr int kVChunkBytes = kTileK * kCodes;
constexpr int kWorkBytes = kWarpgroups == 3 ? 144 : 128;
static_assert(kHeadDim == kHeadDimV && kTileK % kKeys == 0, "tile sizes");

// A warp's 16 rows of O leave through shared memory in chunks of 64 columns. There is room for both
// of head dim 128, and for one of the four of head dim 256.
constexpr int kChunk = 64;
constexpr int kRowBytes = 2 * kChunk;
constexpr int kUnits = kRowBytes / 16;
constexpr int kChunksV = kHeadDimV / kChunk;
constexpr int kOChunks = FA3_FORWARD_FP8_OUTPUT_CHUNKS(kHeadDimV, kTileK);
constexpr int kOChunkBytes = 16 * kRowBytes;
constexpr int kOBytes = kOChunks * kOChunkBytes;

// Where the swizzle puts a row's 16 bytes number `unit`, within a chunk.
__device__ __forceinline__ uint32_t swizzled(int row, int unit) {
  return row * kRowBytes + ((unit ^ (kRowBytes == 128 ? row & 7 : (row & 7) >> 1)) << 4);
}

// The scales of a tile of K and V: one of each, then one of each for each row. These are read after
// their tile of K is handed back: they are kept for two rounds of its ring.
constexpr int kScaleSlots = 2 * kStages;
constexpr int kScaleBytes = 8 + 8 * kTileK;

// Sums that a thread keeps for itself: in shared memory, if there is room.
constexpr bool kSharedSums = FA3_FORWARD_FP8_SUMS(kHeadDim, FA3_TILE_Q) == 0;
constexpr int kSumBytes = kRows * kHeadDimV * 4;  // of a consumer
constexpr int kUnitBytes = 128 * 16;              // likewise: what they are counted in
constexpr int kRowScaleBytes = 128 * 8;           // likewise: scales of a thread's rows

// What lies in shared memory. The rings of Q are one for each consumer, side by side.
struct layout {
  ring<1, kQBytes> q;
  ring<kStages, kKBytes> k;
  ring<kStages, kVChunkBytes> v;  // as it comes
  ring<kTransposedStages, kVBytes> v_transposed;
  uint32_t o;           // kOBytes for each consumer warp
  uint32_t sums;        // kSumBytes for each consumer, or nothing
  uint32_t units;       // kUnitBytes for each consumer
  uint32_t row_scales;  // kRowScaleBytes for each consumer
  uint32_t scales;
  ring<kWorkSlots, kWorkBytes> work;
  barrier scaled;  // and one for each slot of work: its scales are there too
  barrier work_wanted;
  uint32_t v_keys;  // an integer for each tile of V under way (set_keys)
  uint32_t end;
};

// From a base aligned to 1024, as the copy engine's tiles have to be.
__host__ __device__ constexpr layout lay_out(uint32_t base) {
  layout m = {};
  const uint32_t q = base, k = q + kWarpgroups * kQBytes, v = k + kStages * kKBytes;
  const uint32_t v_transposed = v + (kTransposed ? 0 : kStages * kVChunkBytes);
  m.o = v_transposed + kTransposedStages * kVBytes;
  m.sums = m.o + kConsumerWarps * kOBytes;
  m.units = m.sums + (kSharedSums ? kWarpgroups * kSumBytes : 0);
  m.row_scales = m.units + kWarpgroups * kUnitBytes;
  const uint32_t work = m.row_scales + kWarpgroups * kRowScaleBytes;
  m.scales = work + kWorkSlots * kWorkBytes;
  const uint32_t q_barriers = m.scales + kScaleSlots * kScaleBytes;
  const uint32_t k_barriers = q_barriers + kWarpgroups * kRingBarrierBytes<1>;
  const uint32_t v_barriers = k_barriers + kRingBarrierBytes<kStages>;
  const uint32_t transposed_barriers = v_barriers + kRingBarrierBytes<kStages>;
  const uint32_t work_barriers = transposed_barriers + kRingBarrierBytes<kTransposedStages>;
  m.q = make_ring<1, kQBytes>(q, q_barriers);
  m.k = make_ring<kStages, kKBytes>(k, k_barriers);
  m.v = make_ring<kStages, kVChunkBytes>(v, v_barriers);
  m.v_transposed = make_ring<kTransposedStages, kVBytes>(v_transposed, transposed_barriers);
  m.work = make_ring<kWorkSlots, kWorkBytes>(work, work_barriers);
  m.scaled = {work_barriers + kRingBarrierBytes<kWorkSlots>};
  m.work_wanted = {m.scaled.address + 8 * kWorkSlots};
  m.v_keys = m.work_wanted.address + 8;
  m.end = m.v_keys + 4 * kStages;
  return m;
}

constexpr int kSharedBytes = lay_out(0).end;
constexpr int kSharedBytesByHost =
    FA3_FORWARD_FP8_SHARED_BYTES(kHeadDim, FA3_TILE_Q, kTileK, kTransposed);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kThreads == FA3_FORWARD_THREADS(FA3_TILE_Q), "threads");

// Whether the keys of a tile may have several scales, or their values, in any sequence.
__device__ __forceinline__ bool any_mixed_scales(const fa3_forward_fp8_params &params) {
  const int key = params.key_scale.rows, value = params.value_scale.rows;
  if (kHeadScales) return false;
  return (key % kTileK != 0) | (value % kTileK != 0) |
         ((key | value) != 0 && params.forward.sequences.leftpad_k != nullptr);
}

// Its barriers and the initial arrivals at them, by one thread.
__device__ __forceinline__ void init_barriers(const fa3_forward_fp8_params &fp8, const layout &m) {
  for (int i = 0; i < kWarpgroups; ++i) ring_init(ring_beside(m.q, i), 1, 4);
  ring_init(m.k, 1, (any_mixed_scales(fp8) ? 32 : 1) * kConsumerWarps);
  ring_init(m.v, 1, kTransposers);
  ring_init(m.v_transposed, kTransposed ? 1 : kTransposers, kConsumerWarps);
  ring_init(m.work, 1, 32 * (kConsumerWarps + 1 + (kTellsKeys ? 0 : kTransposers)));
  for (int i = 0; i < kWorkSlots; ++i) mbarrier_init(m.scaled.address + 8 * i, 1);
  barrier_init(m.work_wanted, 1);
  mbarrier_init_fence();
}

// Named barriers: kBarrierTurn + warpgroup; one for each consumer warp, where two warpgroups take
// turns; and those that tell the scheduling warp, and the others, that barriers are there.
enum {
  kBarrierTurn = 1,
  kBarrierWarp = kBarrierTurn + kWarpgroups,
  kBarrierSchedule = 14,
  kBarrierBegin
};
static_assert(kWarpgroups > 2 || kBarrierWarp + kConsumerWarps <= kBarrierSchedule, "barriers");

#include "forward_tiles.cuh"

// Of the sequence's keys in memory, the first that counts.
__device__ __forceinline__ int left_pad(const fa3_forward_params &params, const work &w) {
  return params.sequences.leftpad_k ? params.sequences.leftpad_k[w.batch] : 0;
}

// The same in this one.
__device__ __forceinline__ bool mixed_scales(const fa3_forward_fp8_params &params, const work &w) {
  const int key = params.key_scale.rows, value = params.value_scale.rows;
  if (kHeadScales) return false;
  return (key % kTileK != 0) | (value % kTileK != 0) |
         ((key | value) != 0 && left_pad(params.forward, w) % kTileK != 0);
}

// The scale of a row of a sequence: `entry` is its number where `cu_seqlens` packs it, else the
// batch entry.
__device__ __forceinline__ float scale_of(const fa3_scales &scales, int entry, int head, int row,
                                          const int *cu_seqlens) {
  if (scales.data == nullptr) return 1.0f;
  int64_t block = 0;
  if (scales.rows > 0) block = row / scales.rows;
  if (scales.rows > 0 && cu_seqlens != nullptr) block += cu_seqlens[entry] / scales.rows + entry;
  return scales
      .data[entry * scales.stride_batch + head / scales.heads_per_scale * scales.stride_head +
            block * scales.stride_block];
}

// The scale of keys or values, where their head has one.
__device__ __forceinline__ float head_scale(const fa3_forward_fp8_params &fp8,
                                            const fa3_scales &scales, const work &w) {
  const int entry = fp8.forward.sequences.cu_seqlens_k ? w.batch : w.sequence.key_batch;
  return scale_of(scales, entry, w.key_head, 0, nullptr);
}

// 0 times minus infinity, a masked score, would be NaN.
__device__ __forceinline__ float positive_scale(float scale) {
  return max_nan(scale, 1e-37f);
}

// A tile is there, with its scales.
__device__ __forceinline__ barrier scaled(const layout &m, uint32_t tile) {
  return {m.scaled.address + 8 * (tile % kWorkSlots)};
}

__device__ __forceinline__ void wait_for_scales(const layout &m, uint32_t tile) {
  barrier_wait(scaled(m, tile), tile / kWorkSlots);
}

// The scheduling warp finds a tile's scales: the consumers would wait for memory. Who loads does
// not wait for them. Its first lanes have those of each warpgroup's queries, the next ones the
// keys' and the values'.
__device__ __forceinline__ void add_work_scales(const fa3_forward_fp8_params &fp8, const layout &m,
                                                uint32_t tile, bool last) {
  work &w = work_of(tile);
  const int lane = threadIdx.x & 31;
  const bool of_queries = lane < kWarpgroups;
  const fa3_scales &scales = of_queries            ? fp8.query_scale
                             : lane == kWarpgroups ? fp8.key_scale
                                                   : fp8.value_scale;
  float scale = 1.0f;
  if (!last &&
      (of_queries ? fp8.warpgroups_have_scales != 0 : kHeadScales && lane < kWarpgroups + 2)) {
    const bool of_sequence = of_queries || fp8.forward.sequences.cu_seqlens_k != nullptr;
    // Behind the last row there is no scale.
    const int row =
        min(w.first + lane * fp8.forward.queries_per_warpgroup, w.sequence.mask.queries - 1);
    scale = scale_of(scales, of_sequence ? w.batch : w.sequence.key_batch,
                     of_queries ? w.head * fp8.forward.tile_heads : w.key_head,
                     of_queries ? row : 0, fp8.forward.sequences.cu_seqlens_q);
  }
  const float of_keys = __shfl_sync(0xffffffff, scale, kWarpgroups);
  const float score = positive_scale(fp8.forward.scale.log2 * scale * of_keys);
  work_scales found = {};
#pragma unroll
  for (int i = 0; i < kWarpgroups; ++i) {
    found.score[i] = __shfl_sync(0xffffffff, score, i);
    if (!fp8.warpgroups_have_scales) found.score[i] = 0.0f;
  }
  found.value = __shfl_sync(0xffffffff, scale, kWarpgroups + 1);
  if (lane == 0) {
    w.scales = found;
    barrier_arrive(scaled(m, tile));
  }
  __syncwarp();
}

#endif
