// K5: warps with different work. New since K4:
// - a third warpgroup does nothing but load: one thread of it runs ahead through
//   the tiles as far as there are free buffers, and the consumers never wait for
//   one another;
// - a second kind of barrier therefore tells the producer that a buffer is empty;
// - keys and values move through rings of their own, so that a buffer of keys is
//   free as soon as the scores are there;
// - setmaxnreg moves registers from the producer, who needs few, to the consumers
//   (kernels/registers.cuh).
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

// The producer: one thread.
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

// This warp has read a buffer for the last time.
static __device__ __forceinline__ void release(uint32_t empty) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// A consumer: K4's loop without the loads.
static __device__ __forceinline__ void consume(const attention &a, uint32_t base, int first,
                                               int last, int head, int batch) {
  const int thread = threadIdx.x - 128;  // among the consumers
  const int lane = thread % 32;
  const int warpgroup = thread / 128;
  const int row = first + thread / 32 * 16 + lane / 4;  // and row + 8

  float o[kHeadDim / 2] = {};
  softmax_rows rows = {{FA3_NO_REFERENCE, FA3_NO_REFERENCE}, {0.0f, 0.0f}};
  const uint32_t query = wgmma_descriptor_low(base + kQueryAt + warpgroup * 64 * kRowBytes, 0);
  mbarrier_wait(base + kQueryFull, 0);

  for (int n = last; n >= 0; --n) {
    const unsigned round = last - n, stage = round % kStages, parity = round / kStages % 2;
    const uint32_t tile = stage * kTileBytes, barrier = 8 * stage;

    float s[kKeys / 2];
    mbarrier_wait(base + kKeyFull + barrier, parity);
    registers_touch(s);
    wgmma_fence();
    issue_scores(s, query, wgmma_descriptor_low(base + kKeyAt + tile, 0));
    wgmma_wait<0>();
    registers_touch(s);
    release(base + kKeyEmpty + barrier);

    if (a.causal && n == last) {
      const fa3_range seen[2] = {{0, row + 1}, {0, row + 9}};
      mask_scores(s, seen, n * kKeys + 2 * (lane % 4));
    }
    float factor[2];
    online_softmax(s, rows, kScaleLog2, factor);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= factor[i / 2 % 2];
    uint32_t p[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack_pair(s[2 * i], s[2 * i + 1]);

    mbarrier_wait(base + kValueFull + barrier, parity);
    registers_touch(o);
    wgmma_fence();
    issue_output(o, p, wgmma_descriptor_low(base + kValueAt + tile, kTileBytes / 2));
    wgmma_wait<0>();
    registers_touch(o);
    release(base + kValueEmpty + barrier);
  }

  float factor[2];
  for (int r = 0; r < 2; ++r) softmax_finish(rows, r, softmax_scale(), nullptr, factor[r]);
  store_rows(a, o, factor, batch, row, head);
}

static __global__ void __launch_bounds__(kThreads, 1)
    k5_kernel(attention a, const __grid_constant__ CUtensorMap query_map,
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
  cudaFuncSetAttribute(k5_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k5_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(
      a, tile_map(a, a.query, kQueries), tile_map(a, a.key, kKeys), tile_map(a, a.value, kKeys));
}

const step k5_specialised = {
    "k5_specialised", "warp specialisation", (const void *)k5_kernel,
    kThreads,         kSharedBytes,          launch,
};
