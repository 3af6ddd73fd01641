// What the steps of flash decode share: the problem, and how a block of threads attends to a
// run of keys.
//
// One new token for each sequence of a batch: a query of 128 columns for each of heads_q
// heads, and a cache of keys and values, bf16, that heads_q / heads_k query heads share. In a
// decode step each number of the cache is used for a handful of multiplications: all that
// counts is how fast the cache can be read.
#ifndef WORKLOG_DECODE_CUH
#define WORKLOG_DECODE_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#include "copy_async.cuh"

constexpr int kHeadDim = 128;
constexpr float kScaleLog2 = 0.08838834764831845f * 1.44269504089f;  // log2(e) / sqrt(128)
constexpr int kGroup = 4;                                            // heads_q / heads_k
constexpr int kPageRows = 16;

typedef __nv_bfloat16 bf16;

// Attention over some of the keys: what is needed to combine it with the others'.
struct partial {
  float max, sum;       // of the scores (in powers of two), of the weights
  float out[kHeadDim];  // weights times values, not yet divided by the sum
};

struct decoding {
  int batch, heads_q, heads_k, keys;
  const bf16 *query;        // (batch, heads_q, 128)
  const bf16 *key, *value;  // (batch, keys, heads_k, 128), or with pages (page, 16, heads_k, 128)
  const int *page_table;    // (batch, pages of a sequence), for D4 alone
  bf16 *out;                // as the query
  int splits;               // what D1 to D4 cut a sequence into
  partial *partials;        // (batch, heads_q, splits)
  int *arrived;             // (batch, heads_q): how many splits are done; 0 before and after
};

struct step {
  const char *name;
  const char *idea;
  const void *kernel;
  int heads_of_block;  // query heads that a block serves
  bool splits, pages;
  void (*launch)(const decoding &, cudaStream_t);
};

extern const step d0_block, d1_split, d2_combine, d3_packed, d4_pages;

// A key is read by a team of 16 threads, each 8 columns (16 bytes) of it. In a round a team
// takes kAtOnce keys; the next round's are on their way meanwhile.
constexpr int kThreads = 128;
constexpr int kColumns = 8;
constexpr int kTeam = kHeadDim / kColumns;
constexpr int kTeams = kThreads / kTeam;
constexpr int kAtOnce = 4;
constexpr int kRoundKeys = kTeams * kAtOnce;
constexpr int kStages = 2;
constexpr int kMostSplits = 128;

// What a thread has asked for: its columns of each key and each value of a round. They are its
// own, so that no barrier is needed.
struct round_buffer {
  uint4 key[kAtOnce][kThreads], value[kAtOnce][kThreads];
};

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void unpack(float (&x)[kColumns], const uint4 &eight) {
  const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int j = 0; j < kColumns; ++j)  // a bf16 is the upper half of a float
    x[j] = __uint_as_float(j % 2 ? pairs[j / 2] & 0xffff0000 : pairs[j / 2] << 16);
}

// The element of the cache with which a key begins.
template <bool kPaged>
__device__ __forceinline__ int64_t key_at(const decoding &d, int batch, int head, int key) {
  int64_t row;
  if (kPaged) {
    const int *pages = d.page_table + (int64_t)batch * ((d.keys + kPageRows - 1) / kPageRows);
    row = (int64_t)pages[key / kPageRows] * kPageRows + key % kPageRows;
  } else {
    row = (int64_t)batch * d.keys + key;
  }
  return (row * d.heads_k + head) * kHeadDim;
}

// What a team knows of one query head so far.
struct online {
  float max, sum, out[kColumns];
};

// The online softmax, for kAtOnce more keys.
__device__ __forceinline__ void add_keys(online &o, const float (&score)[kAtOnce],
                                         const float (&v)[kAtOnce][kColumns]) {
  float max = o.max;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) max = fmaxf(max, score[i]);
  const float factor = exp2f(o.max - max);
  o.max = max;
  o.sum *= factor;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) o.out[j] *= factor;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const float weight = exp2f(score[i] - max);
    o.sum += weight;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) o.out[j] += weight * v[i][j];
  }
}

// Another team's result is added.
__device__ __forceinline__ void merge(online &o, const online &other) {
  const float max = fmaxf(o.max, other.max);
  const float factor = exp2f(o.max - max), other_factor = exp2f(other.max - max);
  o.max = max;
  o.sum = o.sum * factor + other.sum * other_factor;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) o.out[j] = o.out[j] * factor + other.out[j] * other_factor;
}

// The teams' results become one, for each head: first the two of a warp, then the warps'.
template <int kHeads>
__device__ __forceinline__ void combine_teams(online (&of_team)[kHeads],
                                              partial (&result)[kHeads]) {
  constexpr int kWarps = kThreads / 32;
  __shared__ online of_warp[kHeads][kWarps][kTeam];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    online other;
    other.max = __shfl_xor_sync(0xffffffff, of_team[h].max, kTeam);
    other.sum = __shfl_xor_sync(0xffffffff, of_team[h].sum, kTeam);
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      other.out[j] = __shfl_xor_sync(0xffffffff, of_team[h].out[j], kTeam);
    merge(of_team[h], other);
    if (threadIdx.x % 32 < kTeam) of_warp[h][threadIdx.x / 32][threadIdx.x % 32] = of_team[h];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeads * kTeam; i += kThreads) {
    const int h = i / kTeam, part = i % kTeam;
    online all = of_warp[h][0][part];
    for (int w = 1; w < kWarps; ++w) merge(all, of_warp[h][w][part]);
    for (int j = 0; j < kColumns; ++j) result[h].out[part * kColumns + j] = all.out[j];
    if (part == 0) result[h].max = all.max;
    if (part == 0) result[h].sum = all.sum;
  }
  __syncthreads();
}

// Where this thread's columns of its keys of a round lie. Beyond the end it is the last key.
template <bool kPaged>
__device__ __forceinline__ void find_keys(const decoding &d, int batch, int head, int first,
                                          int end, int64_t (&at)[kAtOnce]) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int key = min(first + (int)threadIdx.x / kTeam + i * kTeams, end - 1);
    at[i] = key_at<kPaged>(d, batch, head, key) + threadIdx.x % kTeam * kColumns;
  }
}

__device__ __forceinline__ void ask_for_keys(const decoding &d, round_buffer &to,
                                             const int64_t (&at)[kAtOnce]) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i)
    copy_async(shared_address(&to.key[i][threadIdx.x]), d.key + at[i], true);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i)
    copy_async(shared_address(&to.value[i][threadIdx.x]), d.value + at[i], true);
}

// kHeads query heads from `head` on, which share keys, attend to keys `begin` to `end` - 1.
// `result` is in shared memory.
template <int kHeads, bool kPaged>
__device__ __forceinline__ void attend(const decoding &d, int batch, int head, int begin, int end,
                                       partial (&result)[kHeads]) {
  __shared__ round_buffer buffer[kStages];
  const int team = threadIdx.x / kTeam, column = threadIdx.x % kTeam * kColumns;
  const int head_k = head / kGroup;
  float q[kHeads][kColumns];
  online of_team[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int64_t row = (int64_t)batch * d.heads_q + head + h;
    unpack(q[h], *(const uint4 *)(d.query + row * kHeadDim + column));
#pragma unroll
    for (int j = 0; j < kColumns; ++j) q[h][j] *= kScaleLog2;
    of_team[h] = {-1e30f, 0.0f, {}};  // below any score
  }

  int64_t at[kAtOnce];  // of keys two rounds ahead: to look them up takes a while, too
  find_keys<kPaged>(d, batch, head_k, begin, end, at);
  ask_for_keys(d, buffer[0], at);
  copy_async_commit();
  find_keys<kPaged>(d, batch, head_k, begin + kRoundKeys, end, at);
  int stage = 0;
  for (int first = begin; first < end; first += kRoundKeys, stage ^= 1) {
    if (first + kRoundKeys < end) ask_for_keys(d, buffer[stage ^ 1], at);
    copy_async_commit();
    find_keys<kPaged>(d, batch, head_k, first + 2 * kRoundKeys, end, at);
    copy_async_wait<1>();  // this round's keys and values are here

    float score[kHeads][kAtOnce], v[kAtOnce][kColumns];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float k[kColumns];
      unpack(k, buffer[stage].key[i][threadIdx.x]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        score[h][i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) score[h][i] += q[h][j] * k[j];
      }
    }
#pragma unroll
    for (int bit = 1; bit < kTeam; bit *= 2)
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          score[h][i] += __shfl_xor_sync(0xffffffff, score[h][i], bit);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) unpack(v[i], buffer[stage].value[i][threadIdx.x]);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + team + i * kTeams >= end) score[h][i] = -INFINITY;
      add_keys(of_team[h], score[h], v);
    }
  }
  combine_teams(of_team, result);
}

// The keys of one split: from begin to end - 1.
__device__ __forceinline__ int split_begin(const decoding &d, int split) {
  return (int)((int64_t)d.keys * split / d.splits);
}

// The splits' results become the outputs of `heads` heads from `first` on. By the whole block.
__device__ __forceinline__ void combine_splits(const decoding &d, int batch, int first, int heads) {
  __shared__ float weight[kGroup][kMostSplits];
  const partial *p = d.partials + ((int64_t)batch * d.heads_q + first) * d.splits;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp < heads) {  // a split's weight: what its sums are scaled by, over the sum of all
    const partial *of_head = p + warp * d.splits;
    float max = -INFINITY, sum = 0.0f;
    for (int i = lane; i < d.splits; i += 32) max = fmaxf(max, __ldcg(&of_head[i].max));
    for (int bit = 16; bit > 0; bit /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, bit));
    for (int i = lane; i < d.splits; i += 32) {
      weight[warp][i] = exp2f(__ldcg(&of_head[i].max) - max);
      sum += weight[warp][i] * __ldcg(&of_head[i].sum);
    }
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    for (int i = lane; i < d.splits; i += 32) weight[warp][i] /= sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * kHeadDim; i += blockDim.x) {
    const int h = i / kHeadDim, column = i % kHeadDim;
    float out = 0.0f;
#pragma unroll 8
    for (int split = 0; split < d.splits; ++split)
      out += weight[h][split] * __ldcg(&p[h * d.splits + split].out[column]);
    d.out[((int64_t)batch * d.heads_q + first) * kHeadDim + i] = __float2bfloat16(out);
  }
}

__device__ __forceinline__ void store_partial(const decoding &d, int batch, int head, int split,
                                              const partial &result) {
  partial &p = d.partials[((int64_t)batch * d.heads_q + head) * d.splits + split];
  if (threadIdx.x < kHeadDim) p.out[threadIdx.x] = result.out[threadIdx.x];
  if (threadIdx.x == 0) p.max = result.max;
  if (threadIdx.x == 0) p.sum = result.sum;
}

// Whether this block is the last of its head's splits to come here: then all of their
// results can be read. The counter is 0 again for the next launch.
__device__ __forceinline__ bool last_to_arrive(const decoding &d, int batch, int head) {
  __shared__ bool last;
  __threadfence();  // this block's result is visible before it is counted
  __syncthreads();
  if (threadIdx.x == 0) {
    int *arrived = d.arrived + batch * d.heads_q + head;
    last = atomicAdd(arrived, 1) == d.splits - 1;
    if (last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

#endif
