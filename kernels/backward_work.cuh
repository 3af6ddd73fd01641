// The backward kernel's sizes, its shared memory, and the warps that plan the tiles and keep the
// order in which dQ is summed.
#ifndef FA3_BACKWARD_WORK_CUH
#define FA3_BACKWARD_WORK_CUH

#include "backward_parts.cuh"
#include "backward_tile.cuh"
#include "counters.cuh"
#include "ring.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kHeadDim = FA3_HEAD_DIM;
constexpr int kTileQ = FA3_TILE_Q;            // queries per step: 64, 80 or 128
constexpr int kTileK = FA3_TILE_K;            // keys of a tile
constexpr int kStages = FA3_BACKWARD_STAGES;  // depth of the rings of Q and of dO
constexpr int kKeyStages = FA3_BACKWARD_KEY_STAGES(FA3_TILE_Q);  // and of K and of V

// With the next tile's keys in a buffer of their own a tile's last dQ is left to the next tile's
// first step, as that of any other step is to the one after it.
constexpr bool kNoPause = kKeyStages > 1;

constexpr int kWarpgroups = 2;               // consumers
constexpr int kKeys = kTileK / kWarpgroups;  // of a warpgroup
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerWarps = 4 * kWarpgroups;
// What the launch allots (168 for every thread) is all there is to share out.
constexpr int kConsumerRegisters = kHeadDim == 64 ? 232 : 240;
constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
// The tile that is computed, the next, and the one before if dQ of it is still to come.
constexpr int kWorkSlots = kNoPause ? 3 : 2;
constexpr int kTurns = 4;  // steps that may have the leave to add, and not have added

// The warpgroups share dQ's product: by rows if there are 128; else both take all rows and 64
// columns, of which the second leaves out those that the first has too. 80 rows are no multiple of
// 64, which is what a product has: then it is dQ^T that is computed.
constexpr bool kSplitRows = kTileQ == 128;
constexpr bool kTransposed = kTileQ == 80;
constexpr int kQueryColumns = kSplitRows ? kHeadDim : kTransposed ? kTileQ : 64;  // of the product
constexpr int kSecondColumn = kSplitRows ? 0 : kHeadDim - 64;  // where the second begins
constexpr int kOverlap = kSplitRows ? 0 : 64 - kSecondColumn;
// Shares of a block of dQ that are added in turns of their own: with 128 queries the warpgroups are
// half a step apart, and a tile is to follow the one before it as closely as it can.
constexpr int kShares = kSplitRows ? kWarpgroups : 1;
// Whether a block of dQ may have several sums that its last tile takes. Elsewhere there is one, or
// dQ is finished later.
constexpr bool kTakesSums = kTileQ == 128;
static_assert((kTileQ == 64 || kTileQ == 80 || kTileQ == 128) && kTileK == 128, "a step");
static_assert(kHeadDim == FA3_VALUE_HEAD_DIM, "head dims");
static_assert(kSplitRows || kHeadDim >= 64, "dQ's columns");
static_assert(!kTransposed || kHeadDim == 128, "a warpgroup has 64 columns of dQ^T");

// In which order a tile takes its steps: see next_step.
#if FA3_BY_HEAD
constexpr bool kByHead = true;
#else
constexpr bool kByHead = false;
#endif

// A tile lies in shared memory as blocks of kChunk columns, row after row of kRowBytes, swizzled by
// the copy engine.
constexpr int kChunk = FA3_BACKWARD_CHUNK(kHeadDim, kHeadDim);
constexpr int kRowBytes = 2 * kChunk;
constexpr int kChunks = kHeadDim / kChunk;
constexpr int kKeyBytes = kTileK * kHeadDim * 2;
constexpr int kQueryBytes = kTileQ * kHeadDim * 2;
// dS: blocks of 64 queries, key after key; for dQ^T blocks of 64 keys, query after query.
constexpr int kDsRowBytes = 128;
constexpr int kDsBlockBytes = (kTransposed ? kTileQ : kTileK) * kDsRowBytes;
constexpr int kDsBytes = 2 * kTileQ * kTileK;
constexpr int kRowsBytes = 4 * FA3_BACKWARD_STATISTICS(kTileQ);  // lse and D

constexpr int kWholeBytes = sizeof(fa3_range[kWarpgroups]);
constexpr int kTurnBytes = 32;

// Whether dK and dV leave by way of shared memory of their own: then the next tile's V need not
// wait for them. Elsewhere they leave by way of V's buffer, for more than 196 KB would make the L1
// cache smaller.
constexpr int kStagingBytes = FA3_BACKWARD_STAGING_BYTES(FA3_HEAD_DIM, FA3_TILE_Q, FA3_TILE_K);
constexpr bool kStagesApart = kStagingBytes > 0;

// What lies in shared memory.
struct layout {
  ring<kKeyStages, kKeyBytes> k, v;
  ring<kStages, kQueryBytes> q, d_o;  // Q and dO
  ring<2, kDsBytes> d_s;              // dS
  uint32_t staging;                   // dK and dV on their way out, where they have it apart
  uint32_t rows;                      // lse and D of a block of queries, beside each buffer of Q
  uint32_t whole;                     // likewise: those of the work, or none if an lse is large
  barrier landed, cleared;            // a tile of which a part is to be cleared
  ring<kTurns, kTurnBytes> turns;     // full: a step may add to dQ; empty: the next tile knows that
  barrier turn_taken;                 // it has; those of the other turns follow, and then those of
                                      // the second share, as behind `full`
  ring<kWorkSlots, kWorkBytes> work;
  barrier work_wanted;
  uint32_t order;  // of sort_sequences
  uint32_t end;
};

// From a base aligned to 1024, as the copy engine's tiles have to be.
__host__ __device__ constexpr layout lay_out(uint32_t base) {
  layout m = {};
  const uint32_t k = base, v = k + kKeyStages * kKeyBytes, q = v + kKeyStages * kKeyBytes;
  const uint32_t d_o = q + kStages * kQueryBytes;
  const uint32_t d_s = d_o + kStages * kQueryBytes;
  m.staging = d_s + 2 * kDsBytes;
  m.rows = m.staging + kStagingBytes;
  m.whole = m.rows + kStages * kRowsBytes;
  const uint32_t k_barriers = m.whole + kStages * kWholeBytes;
  const uint32_t v_barriers = k_barriers + kRingBarrierBytes<kKeyStages>;
  m.landed = {v_barriers + kRingBarrierBytes<kKeyStages>};
  m.cleared = {m.landed.address + 8};
  const uint32_t q_barriers = m.cleared.address + 8;
  const uint32_t do_barriers = q_barriers + kRingBarrierBytes<kStages>;
  const uint32_t ds_barriers = do_barriers + kRingBarrierBytes<kStages>;
  const uint32_t turn_barriers = ds_barriers + kRingBarrierBytes<2>;
  m.turn_taken = {turn_barriers + 8 * kTurns * kShares};
  const uint32_t turns_empty = m.turn_taken.address + 8 * kTurns * kShares;
  const uint32_t work_barriers = turns_empty + 8 * kTurns;
  m.work_wanted = {work_barriers + kRingBarrierBytes<kWorkSlots>};
  const uint32_t turns = (m.work_wanted.address + 8 + 31) / 32 * 32;
  const uint32_t work = turns + kTurnBytes * kTurns;
  m.k = make_ring<kKeyStages, kKeyBytes>(k, k_barriers);
  m.v = make_ring<kKeyStages, kKeyBytes>(v, v_barriers);
  m.q = make_ring<kStages, kQueryBytes>(q, q_barriers);
  m.d_o = make_ring<kStages, kQueryBytes>(d_o, do_barriers);
  m.d_s = make_ring<2, kDsBytes>(d_s, ds_barriers);
  m.turns = {turns, {turn_barriers}, {turns_empty}};
  m.work = make_ring<kWorkSlots, kWorkBytes>(work, work_barriers);
  m.order = work + kWorkBytes * kWorkSlots;
  m.end = m.order + FA3_MOST_SORTED;
  return m;
}

constexpr int kSharedBytes = lay_out(0).end;
constexpr int kSharedBytesByHost = FA3_BACKWARD_SHARED_BYTES(kHeadDim, kHeadDim, kTileQ, kTileK);
static_assert(kSharedBytes <= kSharedBytesByHost && kSharedBytesByHost <= 232448, "shared memory");
static_assert(kThreads == FA3_BACKWARD_THREADS, "threads");

// lse and D of the block of queries of a step.
__device__ __forceinline__ uint32_t rows_of_step(const layout &m, uint32_t use) {
  return m.rows + use % kStages * kRowsBytes;
}

// A share may be added to dQ.
__device__ __forceinline__ barrier turn_granted(const layout &m, uint32_t use, int share) {
  return {ring_full(m.turns, use).address + 8 * kTurns * share};
}

// It has been.
__device__ __forceinline__ barrier turn_taken(const layout &m, uint32_t use, int share) {
  return {m.turn_taken.address + 8 * (use % kTurns + kTurns * share)};
}

// Its barriers and the initial arrivals at them, by one thread.
__device__ __forceinline__ void init_barriers(const layout &m) {
  ring_init(m.k, 1, kConsumerWarps);
  // By every thread where each has staged gradients there.
  ring_init(m.v, 1, kStagesApart ? kConsumerWarps : 32 * kConsumerWarps);
  barrier_init(m.landed, 1);
  barrier_init(m.cleared, 32);
  ring_init(m.q, 1, 32 * kConsumerWarps);
  ring_init(m.d_o, 1, kConsumerWarps);
  for (int i = 0; i < kTurns; ++i) {
    barrier_init(ring_empty(m.turns, i), 1);
    for (int share = 0; share < kShares; ++share) {
      barrier_init(turn_granted(m, i, share), 1);
      barrier_init(turn_taken(m, i, share), 32 * kConsumerWarps / kShares);
    }
  }
  ring_init(m.d_s, kConsumerWarps, kConsumerWarps);
  ring_init(m.work, 1, 32 * (kConsumerWarps + 3));
  barrier_init(m.work_wanted, 1);
  mbarrier_init_fence();
}

// Named barriers; 0 is __syncthreads. Of both warpgroups, and of a warpgroup's own warps, those are
// numbered from these on. The last two say that the barriers in shared memory are made: to all but
// the planning warp, and to that one.
enum { kBarrierTurn = 1, kBarrierOwn = 3, kBarrierMade = 5, kBarrierMadeForPlan = 6 };

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ work &work_of(uint32_t tile) {
  constexpr layout from_shared = lay_out(0);
  return *(work *)(shared + ring_tile(from_shared.work, tile));
}

// Steps that need care (backward_probability.cuh) go the way of those with a mask. Of longer ones
// the loading warp tells it, so that the consumers need not ask.
constexpr bool kLoaderTells = kTileQ > 64;

// The blocks of queries that need no mask in a step, for each warpgroup.
__device__ __forceinline__ fa3_range *whole_of(uint32_t use) {
  constexpr layout from_shared = lay_out(0);
  return (fa3_range *)(shared + from_shared.whole + use % kStages * kWholeBytes);
}

enum turn_kind {
  kTurnBetween,  // the tile adds to what others have added before it
  kTurnFirst,    // it is the first,
  kTurnLast      // or the last, which takes all of the block's sums: as many more are in `kind`
};

// One step's turn, which a warp of the producers works out and leaves in shared memory.
struct __align__(32) turn {
  // The sum that the tile adds to; the last tile's is the first of all sums.
  int *counter;    // of tiles whose first share has been added to it
  float *partial;  // where it is
  int before;      // tiles that add to it before this one; the last tile's: to all sums
  int kind;        // turn_kind
};
static_assert(sizeof(turn) <= kTurnBytes, "a turn");

__device__ __forceinline__ turn make_turn(const fa3_backward_params &p, const work &w,
                                          const query_step &step) {
  const fa3_turn mine = find_turn<true>(p, w, step.block, kTileQ, kTileK);
  const bool takes_sums = kTakesSums && mine.last;
  const int64_t slot = slot_of_sum(p, w, step, takes_sums ? 0 : mine.sum);
  turn t;
  t.counter = p.counters + slot;
  t.partial = p.partial + slot * (kTileQ * kHeadDim);
  t.before = mine.before;
  t.kind = mine.last ? kTurnLast + (mine.before > 0) : mine.before > 0 ? kTurnBetween : kTurnFirst;
  if (takes_sums && fa3_sum_count(&p.tiles) > 1) {
    t.before = w.tile;
    t.kind = kTurnLast;
    for (int sum = 0; sum < fa3_sum_count(&p.tiles); ++sum)
      t.kind += fa3_tiles_of_sum(&p.tiles, t.before, sum) > 0;
  }
  return t;
}

__device__ __forceinline__ turn &turn_of(uint32_t use) {
  constexpr layout from_shared = lay_out(0);
  return *(turn *)(shared + ring_tile(from_shared.turns, use));
}

// Whether a part has something to do: blocks of queries, or, where no part of its tile has any, to
// clear the gradients. Only the scheduling warp looks at the others: each would cost the block the
// beginning and the end of a tile.
__device__ __forceinline__ bool has_work(const fa3_backward_params &p, const work &w) {
  return w.steps > 0 || find_parts(p, w, kTileQ, kTileK).number >= 0;
}

// The barriers are made beside the search for the first tile: this warp waits for them, with the
// others, when it has found it.
__device__ __forceinline__ void schedule(const fa3_backward_params &p, uint32_t base) {
  constexpr layout from_shared = lay_out(0);
  uint8_t *order = shared + from_shared.order;
  if (p.tiles.longest_first) sort_sequences(p, order);
  for (uint32_t done = 0;; ++done) {
    if (done > 0) {
      // A tile that is taken early waits here, and so do those that come after it in its head.
      barrier_wait(lay_out(base).work_wanted, done - 1);
      ring_claim(lay_out(base).work, done);
    }
    int last = 0;
    if ((threadIdx.x & 31) == 0) {
      work &w = work_of(done);
      bool first = done == 0;
      for (;;) {
        const int index = take_tile(p, blockIdx.x, first);
        first = false;
        last = index >= fa3_key_tile_count(&p.tiles);
        if (last || (find_work(p, index, kTileQ, kTileK, order, w) && has_work(p, w))) break;
      }
      w.last = last;
      w.first = w.tile * kTileK;
#pragma unroll 1
      for (int g = 0; g < kWarpgroups; ++g) {
        const int first = w.first + g * kKeys;
        w.whole[g] = find_whole(w, first, first + kKeys, kTileQ);
        // The consumers count on below block 0 where a staggered tile goes round: block b - blocks
        // stands for block b.
        if (p.tiles.staggered && w.whole[g].end > 0) w.whole[g].begin -= w.blocks.end;
      }
    }
    __syncwarp();
    if (done == 0) named_barrier_sync(kBarrierMadeForPlan, 2 * 32);
    if ((threadIdx.x & 31) == 0) barrier_arrive(ring_full(lay_out(base).work, done));
    if (uniform(last)) break;
  }
  // The next kernel's blocks may take the place of those that end before the others.
  let_next_grid_launch();
}

__device__ __forceinline__ void finish_work(const layout &m, uint32_t tile) {
  barrier_arrive(ring_empty(m.work, tile));  // every thread that read
}

__device__ __forceinline__ void wait_for_tiles(const int *counter, int tiles) {
  while (tiles > 0 && load_acquire(counter) < tiles) {
  }
}

// Waits until the tiles before this one have added to a block of dQ, step after step.
__device__ __forceinline__ void grant_turns(const fa3_backward_params &p, const layout &m) {
  wait_for_prior_grids();                        // which clear the counters
  if (p.finished_later) let_next_grid_launch();  // backward_finish
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    query_step step = first_step(w);
    for (int left = w.steps; left > 0; --left, ++use, next_step<kByHead>(w, step)) {
      ring_claim(m.turns, use);
      if ((threadIdx.x & 31) == 0) {
        turn_of(use) = make_turn(p, w, step);
#pragma unroll 1
        for (int share = 0; share < kShares; ++share) {
          const turn &mine = turn_of(use);
          const int *counter = mine.counter + share * p.counters_apart;
          if (!kTakesSums || mine.kind < kTurnLast) wait_for_tiles(counter, mine.before);
#pragma unroll 1
          for (int sum = 0; kTakesSums && sum < mine.kind - kTurnLast;
               ++sum, counter += p.sums_apart)
            wait_for_tiles(counter, fa3_tiles_of_sum(&p.tiles, mine.before, sum));
          barrier_arrive(turn_granted(m, use, share));
        }
      }
      __syncwarp();
    }
    finish_work(m, t);
  }
}

// Tells the next tile that this one has added.
__device__ __forceinline__ void pass_turns(const fa3_backward_params &p, const layout &m) {
  uint32_t use = 0;
  for (uint32_t t = 0;; ++t) {
    ring_wait_full(m.work, t);
    const work &w = work_of(t);
    if (w.last) break;
    for (int left = w.steps; left > 0; --left, ++use) {
#pragma unroll 1
      for (int share = 0; share < kShares; ++share) {
        barrier_wait(turn_taken(m, use, share), use / kTurns);
        if ((threadIdx.x & 31) == 0) {
          const turn &mine = turn_of(use);
          if (mine.kind < kTurnLast)
            store_release(mine.counter + share * p.counters_apart, mine.before + 1);
        }
        __syncwarp();
      }
      if ((threadIdx.x & 31) == 0) barrier_arrive(ring_empty(m.turns, use));
      __syncwarp();
    }
    finish_work(m, t);
  }
}

#endif
