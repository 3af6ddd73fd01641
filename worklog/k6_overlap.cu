// K6: softmax under the matrix products (FlashAttention-3, sections 3.1 and 3.2).
// New since K5:
// - inside a warpgroup, the scores of the next tile and the output of this one are
//   issued together; while the matrix unit works on the output, the softmax of the
//   next tile runs;
// - between the warpgroups, a turn to issue (named barriers): while one computes
//   its softmax, the other's products have the matrix unit (ping-pong).
#include "ladder.cuh"
#include "mbarrier.cuh"
#include "online_softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kQueries = 128;
constexpr int kKeys = 128;
constexpr int kConsumers = 2;                     // warpgroups of 64 query rows
constexpr int kThreads = 128 * (1 + kConsumers);  // the first warpgroup is the producer
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;  // (24 + 2 * 240) * 128 <= 65536
constexpr int kStages = 2;

constexpr int kRowBytes = 128;  // of half a row: 64 columns
constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();
constexpr int kTileBytes = 128 * kHeadDim * 2;
constexpr int kQueryAt = 0;
constexpr int kKeyAt = kQueryAt + kTileBytes;
constexpr int kValueAt = kKeyAt + kStages * kTileBytes;
constexpr int kQueryFull = kValueAt + kStages * kTileBytes;  // barriers, 8 bytes each
constexpr int kKeyFull = kQueryFull + 8;                     // [stage]
constexpr int kKeyEmpty = kKeyFull + 8 * kStages;            // [stage]
constexpr int kValueFull = kKeyEmpty + 8 * kStages;          // [stage]
constexpr int kValueEmpty = kValueFull + 8 * kStages;        // [stage]
constexpr int kSharedBytes = kValueEmpty + 8 * kStages + kAlignment;

// One thread asks for a tile, both halves of it, and tells the barrier what to expect.
static __device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap *map, uint32_t full,
                                                 int row, int head, int batch) {
  mbarrier_arrive_expect(full, kTileBytes);
  tma_load_4d(to, map, full, 0, row, head, batch);
  tma_load_4d(to + kTileBytes / 2, map, full, 64, row, head, batch);
}

// S = Q K^T, for the warpgroup's 64 rows and a tile of keys.
static __device__ __forceinline__ void issue_scores(float (&s)[kKeys / 2], uint32_t query,
                                                    uint32_t key) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    const int step = (d / 64 * (kTileBytes / 2) + d % 64 * 2) >> 4;
    wgmma_shared<kKeys>(s, query + step, key + step, kDescriptorHigh, d > 0);
  }
  wgmma_commit();
}

// O += P V, with P in registers.
static __device__ __forceinline__ void issue_output(float (&o)[kHeadDim / 2],
                                                    const uint32_t (&p)[kKeys / 4],
                                                    uint32_t value) {
#pragma unroll
  for (int k = 0; k < kKeys; k += 16)
    wgmma_registers<kHeadDim>(o, p + k / 4, value + ((k * kRowBytes) >> 4), kDescriptorHigh, true);
  wgmma_commit();
}

// The producer: one thread. Values run one tile behind the keys, as they are used.
static __device__ __forceinline__ void produce(uint32_t base, const CUtensorMap *query_map,
                                               const CUtensorMap *key_map,
                                               const CUtensorMap *value_map, int first, int last,
                                               int head, int batch) {
  load_tile(base + kQueryAt, query_map, base + kQueryFull, first, head, batch);
  for (int i = 0; i <= last + 1; ++i) {
    if (i <= last) {
      const int stage = i % kStages, parity = i / kStages % 2;
      mbarrier_wait(base + kKeyEmpty + 8 * stage, parity ^ 1);
      load_tile(base + kKeyAt + stage * kTileBytes, key_map, base + kKeyFull + 8 * stage,
                (last - i) * kKeys, head, batch);
    }
    if (i > 0) {
      const int stage = (i - 1) % kStages, parity = (i - 1) / kStages % 2;
      mbarrier_wait(base + kValueEmpty + 8 * stage, parity ^ 1);
      load_tile(base + kValueAt + stage * kTileBytes, value_map, base + kValueFull + 8 * stage,
                (last - i + 1) * kKeys, head, batch);
    }
  }
}

// This warp has read a buffer for the last time.
static __device__ __forceinline__ void release(uint32_t empty) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// The consumers take turns at issuing products.
enum { kTurn = 1 };  // named barriers kTurn + warpgroup; 0 is __syncthreads

static __device__ __forceinline__ void take_turn(int warpgroup) {
  named_barrier_sync(kTurn + warpgroup, 128 * kConsumers);
}

static __device__ __forceinline__ void pass_turn(int warpgroup) {
  named_barrier_arrive(kTurn + (warpgroup ^ 1), 128 * kConsumers);
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
  const uint32_t values = wgmma_descriptor_low(base + kValueAt, kTileBytes / 2);
  if (warpgroup == 1) pass_turn(warpgroup);  // the first turn is warpgroup 0's

  // The first tile alone: scores, mask, softmax.
  mbarrier_wait(base + kQueryFull, 0);
  mbarrier_wait(base + kKeyFull, 0);
  take_turn(warpgroup);
  registers_touch(s);
  wgmma_fence();
  issue_scores(s, query, keys);
  if (last > 0 || warpgroup == 0) pass_turn(warpgroup);
  wgmma_wait<0>();
  registers_touch(s);
  release(base + kKeyEmpty);
  if (a.causal) {
    const fa3_range seen[2] = {{0, row + 1}, {0, row + 9}};
    mask_scores(s, seen, last * kKeys + 2 * (lane % 4));
  }
  online_softmax(s, rows, kScaleLog2, factor);

  for (int n = last - 1;; --n) {
    // The output before this round is complete; its wait stands here, behind the
    // loop's branch, because the assembler would move it up through the softmax.
    wgmma_wait<0>();
    registers_touch(o);
    const unsigned round = last - n;
    if (round > 1) release(base + kValueEmpty + 8 * ((round - 2) % kStages));
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= factor[i / 2 % 2];
    uint32_t p[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);
    const unsigned value_stage = (round - 1) % kStages, value_parity = (round - 1) / kStages % 2;
    mbarrier_wait(base + kValueFull + 8 * value_stage, value_parity);
    if (n < 0) {  // the last output stands alone
      registers_touch(o);
      wgmma_fence();
      issue_output(o, p, values + value_stage * (kTileBytes >> 4));
      break;
    }

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
    release(base + kKeyEmpty + 8 * key_stage);
    online_softmax(s, rows, kScaleLog2, factor);
  }
  wgmma_wait<0>();
  registers_touch(o);

  for (int r = 0; r < 2; ++r) softmax_finish(rows, r, softmax_scale(), nullptr, factor[r]);
  store_rows(a, o, factor, batch, row, head);
}

static __global__ void __launch_bounds__(kThreads, 1)
    k6_kernel(attention a, const __grid_constant__ CUtensorMap query_map,
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
      mbarrier_init(base + kValueEmpty + 8 * i, 4 * kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_give_back<kProducerRegisters>();
    if (threadIdx.x == 0) produce(base, &query_map, &key_map, &value_map, first, last, head, batch);
  } else {
    registers_take<kConsumerRegisters>();
    consume(a, base, first, last, head, batch);
  }
}

static void launch(const attention &a) {
  cudaFuncSetAttribute(k6_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k6_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(
      a, tile_map(a, a.query, kQueries), tile_map(a, a.key, kKeys), tile_map(a, a.value, kKeys));
}

const step k6_overlap = {
    "k6_overlap", "ping-pong and overlap", (const void *)k6_kernel, kThreads, kSharedBytes, launch,
};
