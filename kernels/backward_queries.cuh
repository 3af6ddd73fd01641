// dQ of a block of queries: the warpgroup's share of it, which joins what other tiles of keys have
// added (backward_params.h), and its store by the last of them.
#ifndef FA3_BACKWARD_QUERIES_CUH
#define FA3_BACKWARD_QUERIES_CUH

#include "backward_products.cuh"
#include "backward_store.cuh"
#include "backward_work.cuh"
#include "counters.cuh"

// Where dQ is summed: a step's block holds, for each eight columns, one vector a thread. Those of
// columns that the other warpgroup stores come along: a branch around them would make each load
// wait for the one before it.
__device__ __forceinline__ void add_partial(float (&dq)[kQueryColumns / 2], const float4 *from) {
#pragma unroll
  for (int j = 0; j < kQueryColumns / 8; ++j) {
    const float4 x = load_relaxed(from + j * 128);
    dq[4 * j] += x.x, dq[4 * j + 1] += x.y, dq[4 * j + 2] += x.z, dq[4 * j + 3] += x.w;
  }
}

// What the tiles before this one have added to a block, where it is the last. With few registers in
// use the loads are on their way while dQ is computed.
constexpr bool kSumAhead = kHeadDim < 128;
struct query_sum {
  float4 columns[kQueryColumns / 8];
};

__device__ __forceinline__ void load_sum(query_sum &sum, bool wanted, const float4 *from) {
#pragma unroll
  for (int j = 0; j < kQueryColumns / 8; ++j)
    sum.columns[j] = load_relaxed_if(wanted, from + j * 128);
}

__device__ __forceinline__ void add_sum(float (&dq)[kQueryColumns / 2], const query_sum &sum) {
#pragma unroll
  for (int j = 0; j < kQueryColumns / 8; ++j) {
    const float4 &x = sum.columns[j];
    dq[4 * j] += x.x, dq[4 * j + 1] += x.y, dq[4 * j + 2] += x.z, dq[4 * j + 3] += x.w;
  }
}

// What becomes of dQ: the first tile of keys stores it, others add to it, and the last takes the
// sum.
enum partial_fate { kAddPartial, kStorePartial, kKeepPartial };

// Eight columns of dQ. Without a branch, which may not stand between the parts of a product.
__device__ __forceinline__ void put_partial(const float (&dq)[kQueryColumns / 2], int j, float4 *to,
                                            partial_fate fate) {
  asm volatile(
      "{\n\t.reg .pred add, store;\n\t"
      "setp.eq.s32 add, %5, %6;\n\t"
      "setp.eq.s32 store, %5, %7;\n\t"
      "@add red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n\t"
      "@store st.global.v4.f32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(to + j * 128),
      "f"(dq[4 * j]), "f"(dq[4 * j + 1]), "f"(dq[4 * j + 2]), "f"(dq[4 * j + 3]), "r"((int)fate),
      "n"((int)kAddPartial), "n"((int)kStorePartial)
      : "memory");
}

__device__ __forceinline__ partial_fate fate_of_partial(int kind) {
  return kind >= kTurnLast ? kKeepPartial : kind == kTurnFirst ? kStorePartial : kAddPartial;
}

// The warpgroup's share of dQ.
struct dq_share {
  int warpgroup;
  int column;         // its first
  int skipped;        // columns of its product that the other has
  uint32_t all_keys;  // the descriptor of all keys of the first buffer, of these columns
};

__device__ __forceinline__ dq_share find_share(const layout &m, int warpgroup) {
  dq_share share;
  share.warpgroup = warpgroup;
  share.column = warpgroup * kSecondColumn;
  share.skipped = warpgroup * kOverlap;
  share.all_keys = uniform(wgmma_descriptor_low(
      m.k.data + share.column / kChunk * kTileK * kRowBytes, kTileK * kRowBytes));
  return share;
}

// Issues dQ of step `use`, whose keys are those of tile `keys_use`; the product runs on.
__device__ __forceinline__ void issue_query_step(const layout &m, const dq_share &share,
                                                 uint32_t use, uint32_t keys_use,
                                                 float (&dq)[kQueryColumns / 2]) {
  const uint32_t ds_at = uniform(wgmma_descriptor_low(
      ring_tile(m.d_s, use) + (kSplitRows ? share.warpgroup * kDsBlockBytes : 0), 0));
  wgmma_fence();
  issue_dq(dq, ds_at, share.all_keys + keys_use % kKeyStages * (kKeyBytes >> 4));
}

// Where the thread's part of a block's sum is.
__device__ __forceinline__ float4 *partial_of(float *sum, const dq_share &share) {
  const int first = kSplitRows || kTransposed ? share.warpgroup * kQueryColumns : share.column;
  return (float4 *)sum + first / 8 * 128 + (thread_again() & 127);
}

// Waits for the step's turn; says of what kind it is, and where the thread's part of dQ is summed.
__device__ __forceinline__ int wait_for_turn(const layout &m, const dq_share &share, uint32_t use,
                                             float4 *&partial) {
  barrier_wait(turn_granted(m, use, share.warpgroup % kShares), use / kTurns);
  partial = partial_of(turn_of(use).partial, share);
  return uniform(turn_of(use).kind);
}

// Parts `begin` to `end` of dQ leave.
__device__ __forceinline__ void put_partials(const dq_share &share,
                                             const float (&dq)[kQueryColumns / 2], float4 *partial,
                                             partial_fate fate, int begin, int end) {
#pragma unroll
  for (int j = begin; j < end; ++j)
    put_partial(dq, j, partial, kOverlap > 0 && 8 * j < share.skipped ? kKeepPartial : fate);
}

// Stores the warpgroup's share of a block of dQ.
__device__ __forceinline__ void store_query_step(const fa3_backward_params &p,
                                                 const fa3_sequence &s, const dq_share &share,
                                                 const float (&dq)[kQueryColumns / 2],
                                                 const query_step &q) {
  const int first_row = q.block * kTileQ + (kSplitRows ? share.warpgroup * 64 : 0);
  const int first = s.query_row + first_row, rows = s.mask.queries - first_row;
  if (kTransposed)
    store_columns<kQueryColumns>(p.grad_query, dq, p.scale, s.query_batch, first, rows, q.head,
                                 share.column);
  else
    store_rows<kQueryColumns>(p.grad_query, dq, p.scale, s.query_batch, first, rows, q.head,
                              share.column, kOverlap > 0 ? 64 * share.warpgroup : 0);
}

// They have left, or this tile is the last, which stores the sum.
__device__ __forceinline__ void finish_query_step(const fa3_backward_params &p, const layout &m,
                                                  const work &w, const dq_share &share,
                                                  uint32_t use, float (&dq)[kQueryColumns / 2],
                                                  const query_step &q, int kind,
                                                  const query_sum &first_sum) {
  if (kind >= kTurnLast) {
    if (kSumAhead) add_sum(dq, first_sum);
#pragma unroll 1
    for (int sum = kSumAhead; kTakesSums && sum < kind - kTurnLast; ++sum) {
      float *of_block = turn_of(use).partial + sum * p.sums_apart * (kTileQ * kHeadDim);
      add_partial(dq, partial_of(of_block, share));
    }
    if (!kTakesSums && !kSumAhead && kind > kTurnLast)
      add_partial(dq, partial_of(turn_of(use).partial, share));
    store_query_step(p, w.sequence, share, dq, q);
  }
  // Every thread has read the turn.
  barrier_arrive(turn_taken(m, use, share.warpgroup % kShares));
}

#endif
