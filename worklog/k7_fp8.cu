// K7: both products in FP8 (FlashAttention-3, section 3.3). New since K6:
// - Q, K and V become E4M3 codes, with one scale for each block of 128 rows, in a small
//   kernel of its own. The matrix unit multiplies them at twice the rate;
// - Q's scale times K's joins the softmax's scale. O is kept in units of the scale of the
//   V tile at hand: it is rescaled for every tile anyway;
// - FP8 products take operands that run along K only, and V's rows run along the head dim:
//   two warps of the producer's warpgroup transpose each tile of V;
// - P becomes codes, 2^8 times the probability: the greatest is 256, exact, and what is
//   2^-14 of it still has all its bits. Four codes fill a register where two 16-bit numbers
//   did; the order in which a thread has them is the order of the keys in V transposed.
#include "mbarrier.cuh"
#include "quantise.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#include "wgmma_fp8.cuh"

constexpr int kQueries = 128;
constexpr int kKeys = 128;
constexpr int kConsumers = 2;                     // warpgroups of 64 query rows
constexpr int kThreads = 128 * (1 + kConsumers);  // the first warpgroup is the producer
constexpr int kTransposers = 2;                   // warps of it
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;  // (40 + 2 * 232) * 128 <= 65536
constexpr int kStages = 2;
static_assert(kQueries == kBlockRows && kKeys == kBlockRows, "a tile has one scale");

constexpr int kRowBytes = 128;  // a whole row
constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();
constexpr int kTileBytes = 128 * kHeadDim;
constexpr int kQueryAt = 0;
constexpr int kKeyAt = kQueryAt + kTileBytes;
constexpr int kValueAt = kKeyAt + kStages * kTileBytes;
constexpr int kTransposedAt = kValueAt + kStages * kTileBytes;
constexpr int kQueryFull = kTransposedAt + kStages * kTileBytes;  // barriers, 8 bytes each
constexpr int kKeyFull = kQueryFull + 8;                          // [stage]
constexpr int kKeyEmpty = kKeyFull + 8 * kStages;                 // [stage]
constexpr int kValueFull = kKeyEmpty + 8 * kStages;               // [stage]
constexpr int kValueEmpty = kValueFull + 8 * kStages;             // [stage]
constexpr int kTransposedFull = kValueEmpty + 8 * kStages;        // [stage]
constexpr int kTransposedEmpty = kTransposedFull + 8 * kStages;   // [stage]
constexpr int kSharedBytes = kTransposedEmpty + 8 * kStages + kAlignment;

constexpr float kTop = 8.0f;  // a row's greatest code is 2^kTop

// One thread asks for a tile and tells the barrier what to expect.
static __device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap *map, uint32_t full,
                                                 int row, int head, int batch) {
  mbarrier_arrive_expect(full, kTileBytes);
  tma_load_4d(to, map, full, 0, row, head, batch);
}

// S = Q K^T, for the warpgroup's 64 rows and a tile of keys: 32 columns a step.
static __device__ __forceinline__ void issue_scores(float (&s)[kKeys / 2], uint32_t query,
                                                    uint32_t key) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 32)
    wgmma_fp8_shared<kKeys>(s, query + (d >> 4), key + (d >> 4), kDescriptorHigh, d > 0);
  wgmma_commit();
}

// O += P V, with P in registers and V transposed: 32 keys a step.
static __device__ __forceinline__ void issue_output(float (&o)[kHeadDim / 2],
                                                    const uint32_t (&p)[kKeys / 8],
                                                    uint32_t value) {
#pragma unroll
  for (int k = 0; k < kKeys; k += 32)
    wgmma_fp8_registers<kHeadDim>(o, p + k / 8, value + (k >> 4), kDescriptorHigh, true);
  wgmma_commit();
}

// The producer of tiles: one thread.
static __device__ __forceinline__ void produce(uint32_t base, const CUtensorMap *query_map,
                                               const CUtensorMap *key_map,
                                               const CUtensorMap *value_map, int first, int last,
                                               int head, int batch) {
  load_tile(base + kQueryAt, query_map, base + kQueryFull, first, head, batch);
  for (int n = last; n >= 0; --n) {
    const unsigned round = last - n, stage = round % kStages, parity = round / kStages % 2;
    const uint32_t tile = stage * kTileBytes, barrier = 8 * stage;
    mbarrier_wait(base + kKeyEmpty + barrier, parity ^ 1);  // at once in the first round
    load_tile(base + kKeyAt + tile, key_map, base + kKeyFull + barrier, n * kKeys, head, batch);
    mbarrier_wait(base + kValueEmpty + barrier, parity ^ 1);
    load_tile(base + kValueAt + tile, value_map, base + kValueFull + barrier, n * kKeys, head,
              batch);
  }
}

// Where the swizzle puts a row's 16 bytes number 0; number u lies at that address ^ 16 u.
static __device__ __forceinline__ uint32_t swizzled_row(int row) {
  return row * kRowBytes + (row % 8 << 4);
}

// V transposed, by one warp of kTransposers. It reads 32 keys of 16 columns: transposed as
// pairs of bytes, they leave a thread keys 2q and 2q + 1 of columns 2c and 2c + 1 (q = lane
// % 4, c = lane / 4), and of 8, 16 and 24 keys on. Two registers, bytes exchanged, hold keys
// 2q, 2q + 1, 2q + 8 and 2q + 9 of one column: the keys of four scores of a thread. Half of
// the lanes take the odd column first, so that the rows of a store lie in different banks.
static __device__ __forceinline__ void transpose_tile(uint32_t to, uint32_t from, int part) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, c = lane % 8;
  const uint32_t first_column = lane < 16 ? 0x6420 : 0x7531, second_column = first_column ^ 0x1111;
  const uint32_t read = from + swizzled_row(lane);
  const uint32_t write = (to + swizzled_row(2 * c + (c / 4 ^ matrix % 2))) ^ matrix / 2 << 4;
#pragma unroll 1
  for (int column = part * 16; column < kHeadDim; column += kTransposers * 16)
#pragma unroll
    for (int key = 0; key < kKeys; key += 32) {
      uint32_t x[4];
      load_matrices_transposed((read ^ column) + key * kRowBytes, x);
      store_matrices((write ^ key) + column * kRowBytes, __byte_perm(x[0], x[1], first_column),
                     __byte_perm(x[0], x[1], second_column), __byte_perm(x[2], x[3], first_column),
                     __byte_perm(x[2], x[3], second_column));
    }
}

// This warp has read a buffer for the last time, or filled its part of it.
static __device__ __forceinline__ void arrive(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

static __device__ __forceinline__ void transpose(uint32_t base, int last, int part) {
  for (int round = 0; round <= last; ++round) {
    const unsigned stage = round % kStages, parity = round / kStages % 2;
    const uint32_t tile = stage * kTileBytes, barrier = 8 * stage;
    mbarrier_wait(base + kValueFull + barrier, parity);
    mbarrier_wait(base + kTransposedEmpty + barrier, parity ^ 1);
    transpose_tile(base + kTransposedAt + tile, base + kValueAt + tile, part);
    fence_proxy_async();  // the matrix unit is to see what this warp has written
    __syncwarp();
    arrive(base + kTransposedFull + barrier);
    arrive(base + kValueEmpty + barrier);
  }
}

// The consumers take turns at issuing products.
enum { kTurn = 1 };  // named barriers kTurn + warpgroup; 0 is __syncthreads

static __device__ __forceinline__ void take_turn(int warpgroup) {
  named_barrier_sync(kTurn + warpgroup, 128 * kConsumers);
}

static __device__ __forceinline__ void pass_turn(int warpgroup) {
  named_barrier_arrive(kTurn + (warpgroup ^ 1), 128 * kConsumers);
}

// The online softmax: `scale` is the tile's, so references are exponents of 2, and scores
// become 2^kTop times the probabilities.
static __device__ __forceinline__ void softmax_codes(float (&s)[kKeys / 2], softmax_rows &rows,
                                                     float scale, float (&factor)[2]) {
  float top[2];
  thread_maxima(s, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = max_nan(rows.reference[r], row_maximum(top[r]) * scale - kTop);
    factor[r] = exp2_unit(rows.reference[r] - reference);
    rows.reference[r] = reference;
    rows.sum[r] *= factor[r];
  }
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) s[i] = fmaf(s[i], scale, -rows.reference[i / 2 % 2]);
  softmax_exponentials<0, kKeys / 2>(s, rows);
}

// Two pairs of neighbours, eight columns apart, make four codes: the order in which V's keys lie.
static __device__ __forceinline__ void pack_probabilities(const float (&s)[kKeys / 2],
                                                          uint32_t (&p)[kKeys / 8]) {
#pragma unroll
  for (int i = 0; i < kKeys / 8; ++i) {
    const float *x = s + i / 2 * 8 + i % 2 * 2;
    p[i] = pack_codes(x[0], x[1], x[4], x[5]);
  }
}

// A consumer: in each round the scores of tile n and the output of tile n + 1.
static __device__ __forceinline__ void consume(const attention &a, uint32_t base, int first,
                                               int last, int head, int batch) {
  const int thread = threadIdx.x - 128;  // among the consumers
  const int lane = thread % 32;
  const int warpgroup = thread / 128;
  const int row = first + thread / 32 * 16 + lane / 4;  // and row + 8

  float s[kKeys / 2];
  float o[kHeadDim / 2] = {};
  float factor[2];
  softmax_rows rows = {{FA3_NO_REFERENCE, FA3_NO_REFERENCE}, {0.0f, 0.0f}};
  const uint32_t query = wgmma_descriptor_low(base + kQueryAt + warpgroup * 64 * kRowBytes, 0);
  const uint32_t keys = wgmma_descriptor_low(base + kKeyAt, 0);
  const uint32_t values = wgmma_descriptor_low(base + kTransposedAt, 0);
  const float *key_scale = a.codes.key_scale + scale_at(a, batch, 0, head);
  const float *value_scale = a.codes.value_scale + scale_at(a, batch, 0, head);
  const float query_scale =
      a.codes.query_scale[scale_at(a, batch, first / kBlockRows, head)] * kScaleLog2;
  float unit = value_scale[last];            // what O is counted in
  if (warpgroup == 1) pass_turn(warpgroup);  // the first turn is warpgroup 0's

  // The first tile alone: scores, mask, softmax.
  float scale = query_scale * key_scale[last];
  mbarrier_wait(base + kQueryFull, 0);
  mbarrier_wait(base + kKeyFull, 0);
  take_turn(warpgroup);
  registers_touch(s);
  wgmma_fence();
  issue_scores(s, query, keys);
  if (last > 0 || warpgroup == 0) pass_turn(warpgroup);
  wgmma_wait<0>();
  registers_touch(s);
  arrive(base + kKeyEmpty);
  if (a.causal) {
    const fa3_range seen[2] = {{0, row + 1}, {0, row + 9}};
    mask_scores(s, seen, last * kKeys + 2 * (lane % 4));
  }
  softmax_codes(s, rows, scale, factor);

  for (int n = last - 1;; --n) {
    // The output before this round is complete; its wait stands here, behind the
    // loop's branch, because the assembler would move it up through the softmax.
    wgmma_wait<0>();
    registers_touch(o);
    const unsigned round = last - n;
    if (round > 1) arrive(base + kTransposedEmpty + 8 * ((round - 2) % kStages));
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= factor[i / 2 % 2];
    uint32_t p[kKeys / 8];
    pack_probabilities(s, p);
    const unsigned value_stage = (round - 1) % kStages, value_parity = (round - 1) / kStages % 2;
    mbarrier_wait(base + kTransposedFull + 8 * value_stage, value_parity);
    if (n < 0) {  // the last output stands alone
      registers_touch(o);
      wgmma_fence();
      issue_output(o, p, values + value_stage * (kTileBytes >> 4));
      break;
    }

    scale = query_scale * key_scale[n];
    const float next_unit = value_scale[n], change = unit * reciprocal_unit(next_unit);
    const unsigned key_stage = round % kStages, key_parity = round / kStages % 2;
    mbarrier_wait(base + kKeyFull + 8 * key_stage, key_parity);
    take_turn(warpgroup);
    registers_touch(s);
    registers_touch(o);
    wgmma_fence();
    issue_scores(s, query, keys + key_stage * (kTileBytes >> 4));
    issue_output(o, p, values + value_stage * (kTileBytes >> 4));
    if (n > 0 || warpgroup == 0) pass_turn(warpgroup);

    wgmma_wait<1>();  // the scores; the output goes on under the softmax
    registers_touch(s);
    arrive(base + kKeyEmpty + 8 * key_stage);
    softmax_codes(s, rows, scale, factor);
    for (int r = 0; r < 2; ++r) factor[r] *= change;
    unit = next_unit;
  }
  wgmma_wait<0>();
  registers_touch(o);

  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    factor[r] = unit / sum;
  }
  store_rows(a, o, factor, batch, row, head);
}

static __global__ void __launch_bounds__(kThreads, 1)
    k7_kernel(attention a, const __grid_constant__ CUtensorMap query_map,
              const __grid_constant__ CUtensorMap key_map,
              const __grid_constant__ CUtensorMap value_map) {
  const uint32_t base = shared_base();
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int last = (a.causal ? first + kQueries : a.seqlen) / kKeys - 1;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kQueryFull, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kKeyFull + 8 * i, 1);
      mbarrier_init(base + kKeyEmpty + 8 * i, 4 * kConsumers);  // one lane of each warp
      mbarrier_init(base + kValueFull + 8 * i, 1);
      mbarrier_init(base + kValueEmpty + 8 * i, kTransposers);
      mbarrier_init(base + kTransposedFull + 8 * i, kTransposers);
      mbarrier_init(base + kTransposedEmpty + 8 * i, 4 * kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_give_back<kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce(base, &query_map, &key_map, &value_map, first, last, head, batch);
    if (warp >= 1 && warp <= kTransposers) transpose(base, last, warp - 1);
  } else {
    registers_take<kConsumerRegisters>();
    consume(a, base, first, last, head, batch);
  }
}

void attend_to_codes(const attention &a) {
  cudaFuncSetAttribute(k7_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k7_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(
      a, code_map(a, a.codes.query, kQueries), code_map(a, a.codes.key, kKeys),
      code_map(a, a.codes.value, kKeys));
}

static __global__ void __launch_bounds__(kQuantiseThreads) k7_quantise(attention a) {
  block_of_rows b;
  load_rows(b, a);
  store_codes(b, a);
}

static void quantise(const attention &a) {
  k7_quantise<<<quantise_grid(a), kQuantiseThreads>>>(a);
}

const step k7_fp8 = {
    "k7_fp8", "FP8", (const void *)k7_kernel, kThreads, kSharedBytes, attend_to_codes,
    quantise, false,
};
