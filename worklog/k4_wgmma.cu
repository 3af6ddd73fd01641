// K4: Hopper's matrix instruction. New since K3:
// - a warpgroup of four warps multiplies 64 rows at a time, and wgmma reads its
//   operands where the copy engine put them: no ldmatrix, no fragments of Q, K or V
//   in registers (kernels/wgmma.cuh). A tile in shared memory is a descriptor, and
//   the next 16 columns of it an addition to the descriptor's low word;
// - two warpgroups to a block, 64 query rows each, and tiles of 128 keys, for a
//   wider instruction reads less shared memory for the same work;
// - wgmma runs asynchronously. Here every product is waited for at once.
#include "ladder.cuh"
#include "mbarrier.cuh"
#include "online_softmax.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kQueries = 128;
constexpr int kKeys = 128;
constexpr int kThreads = 256;
constexpr int kStages = 2;

constexpr int kRowBytes = 128;  // of half a row: 64 columns
constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();
constexpr int kTileBytes = 128 * kHeadDim * 2;
constexpr int kQueryAt = 0;
constexpr int kKeyAt = kQueryAt + kTileBytes;
constexpr int kValueAt = kKeyAt + kStages * kTileBytes;
constexpr int kQueryFull = kValueAt + kStages * kTileBytes;  // barriers, 8 bytes each
constexpr int kKeyFull = kQueryFull + 8;                     // [stage]
constexpr int kValueFull = kKeyFull + 8 * kStages;           // [stage]
constexpr int kSharedBytes = kValueFull + 8 * kStages + kAlignment;

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

static __global__ void __launch_bounds__(kThreads, 1)
    k4_kernel(attention a, const __grid_constant__ CUtensorMap query_map,
              const __grid_constant__ CUtensorMap key_map,
              const __grid_constant__ CUtensorMap value_map) {
  const uint32_t base = shared_base();
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int warpgroup = threadIdx.x / 128;
  const int row = first + threadIdx.x / 32 * 16 + lane / 4;  // and row + 8

  float o[kHeadDim / 2] = {};
  softmax_rows rows = {{FA3_NO_REFERENCE, FA3_NO_REFERENCE}, {0.0f, 0.0f}};

  // From the last tile to the first: the one that needs a mask comes first.
  const int last = (a.causal ? first + kQueries : a.seqlen) / kKeys - 1;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kQueryFull, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kKeyFull + 8 * i, 1);
      mbarrier_init(base + kValueFull + 8 * i, 1);
    }
    mbarrier_init_fence();
    load_tile(base + kQueryAt, &query_map, base + kQueryFull, first, head, batch);
    for (int i = 0; i < kStages && i <= last; ++i) {
      load_tile(base + kKeyAt + i * kTileBytes, &key_map, base + kKeyFull + 8 * i,
                (last - i) * kKeys, head, batch);
      load_tile(base + kValueAt + i * kTileBytes, &value_map, base + kValueFull + 8 * i,
                (last - i) * kKeys, head, batch);
    }
  }
  __syncthreads();  // the barriers can be waited for

  const uint32_t query = wgmma_descriptor_low(base + kQueryAt + warpgroup * 64 * kRowBytes, 0);
  mbarrier_wait(base + kQueryFull, 0);

  for (int n = last; n >= 0; --n) {
    // The buffers are used in turn; a barrier's parity flips each time around.
    const unsigned round = last - n, stage = round % kStages, parity = round / kStages % 2;
    const uint32_t key_tile = base + kKeyAt + stage * kTileBytes;
    const uint32_t value_tile = base + kValueAt + stage * kTileBytes;

    float s[kKeys / 2];
    mbarrier_wait(base + kKeyFull + 8 * stage, parity);
    registers_touch(s);
    wgmma_fence();
    issue_scores(s, query, wgmma_descriptor_low(key_tile, 0));
    wgmma_wait<0>();
    registers_touch(s);

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

    mbarrier_wait(base + kValueFull + 8 * stage, parity);
    registers_touch(o);
    wgmma_fence();
    issue_output(o, p, wgmma_descriptor_low(value_tile, kTileBytes / 2));
    wgmma_wait<0>();
    registers_touch(o);

    __syncthreads();  // both warpgroups are done with both buffers
    if (threadIdx.x == 0 && n >= kStages) {
      load_tile(key_tile, &key_map, base + kKeyFull + 8 * stage, (n - kStages) * kKeys, head,
                batch);
      load_tile(value_tile, &value_map, base + kValueFull + 8 * stage, (n - kStages) * kKeys, head,
                batch);
    }
  }

  float factor[2];
  for (int r = 0; r < 2; ++r) softmax_finish(rows, r, softmax_scale(), nullptr, factor[r]);
  store_rows(a, o, factor, batch, row, head);
}

static void launch(const attention &a) {
  cudaFuncSetAttribute(k4_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k4_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(
      a, tile_map(a, a.query, kQueries), tile_map(a, a.key, kKeys), tile_map(a, a.value, kKeys));
}

const step k4_wgmma = {
    "k4_wgmma", "WGMMA", (const void *)k4_kernel, kThreads, kSharedBytes, launch,
};
