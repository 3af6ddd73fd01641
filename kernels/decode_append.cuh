// New rows of keys and values go into the cache by the blocks that attend to them, where no others
// do, and queries are turned on their way to shared memory, where a block has all that share a head
// of keys: the append kernel's work (append.cu), bit by bit, without the end of a grid before
// attention.
//
// It has warps of its own, as many as attend. These are alone on their schedulers otherwise, so
// what is done while they ask for their first keys takes no longer. A thread has a quad of a row,
// and so of some rows at once: of the block's queries, then of the sequence's new keys, then of its
// new values. Every block that reads a new row writes all of them, and so does each cluster's last,
// should nobody see them: several may write the same, but none reads what is not there.
#ifndef FA3_DECODE_APPEND_CUH
#define FA3_DECODE_APPEND_CUH

#include "append_quads.cuh"
#include "cluster.cuh"
#include "decode_layout.cuh"
#include "decode_load.cuh"
#include "mbarrier.cuh"

static_assert(!kMayAppend || FA3_DECODE_APPEND_THREADS == 2 * kThreads, "as many warps");
// Of a thread: two blocks fit on a multiprocessor.
constexpr int kAttendRegisters = 176;
constexpr int kAppendRegisters = 256 - kAttendRegisters;
constexpr int kTurnedAtOnce = kThreads / kQuads;  // rows
// Of a thread, so that their latencies do not add up.
constexpr int kTurnedTogether = kRows > kTurnedAtOnce ? kRows / kTurnedAtOnce : 1;
#if FA3_BF16
constexpr int kElementKind = FA3_APPEND_BFLOAT16;
#else
constexpr int kElementKind = FA3_APPEND_FLOAT16;
#endif

// A thread's quad of a row: as it is, its angles, and where in the cache its first element goes.
struct turning {
  quad at;
  words as_it_is;
  angles turn;
  uint16_t *to;  // null: nowhere
};

__device__ __forceinline__ uint32_t turned_barrier(void) {
  return (uint32_t)__cvta_generic_to_shared(shared + kTurnedBarrierAt);
}

// Before what was queued earlier is awaited, as prefetch_sequences.
__device__ __forceinline__ void begin_append(const fa3_decode_append_params &p) {
  const int entry = 32 * threadIdx.x;
  if (blockIdx.x == 0 && entry < p.decode.batch) prefetch_line(p.append.sequences.used_k + entry);
  if (threadIdx.x == 0) mbarrier_init(turned_barrier(), kThreads);
  __syncthreads();
}

// The number of the first new key, of a sequence that had so many rows.
__device__ __forceinline__ int first_new_key(const fa3_append_params &p, const work &w, int used) {
  return min(used, p.sequences.seqlen_k) - w.sequence.key_row;
}

// The block's queries, and new rows if it writes them.
__device__ __forceinline__ int count_turned_rows(const work &w, int first_new) {
  const bool writes = w.rank == w.active - 1 || w.units.end * kUnitKeys > first_new;
  return w.rows + (writes ? 2 * w.sequence.mask.queries : 0);
}

// Where a new row is in the cache; page -1: there is no room for it.
__device__ __forceinline__ place find_new_row(const fa3_decode_params &p, const work &w, int key) {
  const int row = w.sequence.key_row + key;
  if ((unsigned)row >= (unsigned)p.rows_k) return {-1, 0};
  const int before = divide(row, p.page_size);
  const int page = p.sequences.page_table ? __ldg(fa3_find_page(&p.sequences, &w.sequence, before))
                                          : w.sequence.key_batch;
  return {page < p.pages ? page : -1, row - before * (int)p.page_size.divisor};
}

__device__ __forceinline__ turning load_turning(const fa3_decode_append_params &p, const work &w,
                                                int first_new, int number) {
  const fa3_append_params &a = p.append;
  const int i = threadIdx.x % kQuads, new_row = number - w.rows;
  const bool query = new_row < 0, value = new_row >= w.sequence.mask.queries;
  const row_place asked = place_of_row(p.decode, w, number);
  const int row = query ? asked.query : value ? new_row - w.sequence.mask.queries : new_row;
  const int number_of_head = query ? asked.head : w.head;
  const fa3_operand &from = query ? a.query : value ? a.new_value : a.new_key;
  const head h = {from.data,
                  offset(from, w.sequence.query_batch, w.sequence.query_row + row, number_of_head),
                  value ? a.head_dim_v : a.head_dim,
                  query   ? p.query_pairs
                  : value ? 0
                          : a.pairs};
  const int position = a.positions
                           ? a.positions[w.sequence.query_batch * a.positions_stride_batch +
                                         (w.sequence.query_row + row) * a.positions_stride_row]
                           : first_new + row;
  turning x;
  x.at = find_quad(a, h, i);
  x.as_it_is = load_quad(h, x.at, i);
  x.turn = load_angles(a, x.at, i, position);
  x.to = nullptr;
  if (!query && 4 * i < h.dim) {
    const fa3_operand &cache = value ? a.value : a.key;
    const place to = find_new_row(p.decode, w, first_new + row);
    if (to.page >= 0)
      x.to = (uint16_t *)cache.data + offset(cache, to.page, to.row, number_of_head);
  }
  return x;
}

__device__ __forceinline__ uint16_t *turned_query(int row, int element) {
  return (uint16_t *)(shared + kTurnedAt + tile_offset(row, element / 8)) + element % 8;
}

__device__ __forceinline__ void store_turning(const fa3_decode_append_params &p, const work &w,
                                              int number, const turning &x) {
  const words out = words_of(
      x.at, x.as_it_is, turn_quad(p.append, x.at, x.as_it_is, x.turn, kElementKind), kElementKind);
  if (number < w.rows) {
    *(uint32_t *)turned_query(number, x.at.first) = out.first;
    *(uint32_t *)turned_query(number, x.at.second) = out.second;
  } else if (x.to != nullptr) {
    *(uint32_t *)(x.to + x.at.first) = out.first;
    *(uint32_t *)(x.to + x.at.second) = out.second;
  }
}

// Queries leave too, by each cluster's first block, when all others of the cluster have read what
// may be in the same place; where there are several clusters it is not. Of a row only the warp that
// turned it reads or writes anything.
__device__ __forceinline__ void store_turned_queries(const fa3_decode_append_params &p,
                                                     const work &w) {
  const fa3_operand &to = p.append.rotated_query;
  if (w.rank > 0 || to.data == nullptr) return;
  __syncwarp();
  if (p.decode.cluster > 1) {
    cluster_announce();
    cluster_wait_announced();
  }
  const int element = threadIdx.x % kQuads * 4;
#pragma unroll 1
  for (int row = threadIdx.x % kThreads / kQuads; row < w.rows; row += kTurnedAtOnce) {
    const row_place asked = place_of_row(p.decode, w, row);
    if (element < p.append.head_dim)
      *(uint2 *)((uint16_t *)to.data + element +
                 offset(to, w.sequence.query_batch, w.sequence.query_row + asked.query,
                        asked.head)) = *(const uint2 *)turned_query(row, element);
  }
}

// What the warps do that append.
__device__ __forceinline__ void append_rows(const fa3_decode_append_params &p, const work &w,
                                            int first_new) {
  if (w.rows <= 0 || w.rank >= w.active) return;
  const int thread = threadIdx.x % kThreads, count = count_turned_rows(w, first_new);
#pragma unroll 1
  for (int first = thread / kQuads; first < count; first += kTurnedTogether * kTurnedAtOnce) {
    turning x[kTurnedTogether];
#pragma unroll
    for (int j = 0; j < kTurnedTogether; ++j)
      if (first + j * kTurnedAtOnce < count)
        x[j] = load_turning(p, w, first_new, first + j * kTurnedAtOnce);
#pragma unroll
    for (int j = 0; j < kTurnedTogether; ++j)
      if (first + j * kTurnedAtOnce < count) store_turning(p, w, first + j * kTurnedAtOnce, x[j]);
  }
#pragma unroll 1
  for (int i = w.rows * kQuads + thread; i < kRows * kQuads; i += kThreads)
    *(uint2 *)turned_query(i / kQuads, i % kQuads * 4) = make_uint2(0, 0);
  mbarrier_arrive(turned_barrier());
  store_turned_queries(p, w);
}

// What the warps wait for that attend: before the first step that has new keys, and before queries
// are read. Steps are counted from those that are only asked for, 1 - kStages and so on.
__device__ __forceinline__ int step_of_new_keys(const work &w, int first_new) {
  const int step = first_new / kUnitKeys - w.units.begin - (kStages - 1);
  return min(max(step, 1 - kStages), 0);
}

__device__ __forceinline__ void await_turned_rows(void) {
  mbarrier_wait(turned_barrier(), 0);
}

#endif
