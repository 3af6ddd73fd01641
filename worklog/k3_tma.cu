// K3: the copy engine (TMA) fetches the tiles. New since K2:
// - one thread asks for a whole tile; addresses, swizzle and bounds are in the
//   tensor map that the host has encoded (kernels/tma.cuh);
// - an mbarrier per buffer counts the bytes that have arrived, so that waiting for
//   data no longer needs a barrier of all threads (kernels/mbarrier.cuh);
// - two buffers each for keys and values: a tile is asked for a whole round ahead.
// The arithmetic is K2's to the letter.
#include "ladder.cuh"
#include "mbarrier.cuh"
#include "mma_sync.cuh"
#include "online_softmax.cuh"
#include "tma.cuh"

constexpr int kQueries = 128;
constexpr int kKeys = 64;
constexpr int kThreads = 128;
constexpr int kStages = 2;

// A tile is two halves of 64 columns. A row of a half is 128 bytes: eight units of
// 16, of which unit u of row r lies at place u ^ (r % 8), so that eight rows of one
// column fall into different banks.
constexpr int kRowBytes = 128;
constexpr int kQueryBytes = kQueries * kHeadDim * 2;
constexpr int kTileBytes = kKeys * kHeadDim * 2;
constexpr int kQueryAt = 0;
constexpr int kKeyAt = kQueryAt + kQueryBytes;
constexpr int kValueAt = kKeyAt + kStages * kTileBytes;
constexpr int kQueryFull = kValueAt + kStages * kTileBytes;  // barriers, 8 bytes each
constexpr int kKeyFull = kQueryFull + 8;                     // [stage]
constexpr int kValueFull = kKeyFull + 8 * kStages;           // [stage]
constexpr int kSharedBytes = kValueFull + 8 * kStages + kAlignment;

template <int kRows>
static __device__ __forceinline__ uint32_t place(uint32_t tile, int row, int column) {
  const int unit = column % 64 / 8;
  return tile + (column / 64 * kRows + row) * kRowBytes + ((unit ^ (row % 8)) << 4);
}

// One thread asks for a tile, both halves of it, and tells the barrier what to expect.
template <int kRows>
static __device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap *map, uint32_t full,
                                                 int row, int head, int batch) {
  mbarrier_arrive_expect(full, kRows * kHeadDim * 2);
  tma_load_4d(to, map, full, 0, row, head, batch);
  tma_load_4d(to + kRows * kRowBytes, map, full, 64, row, head, batch);
}

static __global__ void __launch_bounds__(kThreads, 2)
    k3_kernel(attention a, const __grid_constant__ CUtensorMap query_map,
              const __grid_constant__ CUtensorMap key_map,
              const __grid_constant__ CUtensorMap value_map) {
  const uint32_t base = shared_base();
  const uint32_t query_tile = base + kQueryAt;
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int lane = threadIdx.x % 32;
  const int row0 = threadIdx.x / 32 * 32;  // this warp's rows: row0 + 0..31, as 2 x 16

  float o[2][kHeadDim / 2] = {};
  softmax_rows rows[2];
  for (int m = 0; m < 2; ++m)
    for (int r = 0; r < 2; ++r) {
      rows[m].reference[r] = FA3_NO_REFERENCE;
      rows[m].sum[r] = 0.0f;
    }

  // From the last tile to the first: those that need a mask come first.
  const int last = (a.causal ? first + kQueries : a.seqlen) / kKeys - 1;
  if (threadIdx.x == 0) {
    mbarrier_init(base + kQueryFull, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(base + kKeyFull + 8 * i, 1);
      mbarrier_init(base + kValueFull + 8 * i, 1);
    }
    mbarrier_init_fence();
    load_tile<kQueries>(query_tile, &query_map, base + kQueryFull, first, head, batch);
    for (int i = 0; i < kStages && i <= last; ++i) {
      load_tile<kKeys>(base + kKeyAt + i * kTileBytes, &key_map, base + kKeyFull + 8 * i,
                       (last - i) * kKeys, head, batch);
      load_tile<kKeys>(base + kValueAt + i * kTileBytes, &value_map, base + kValueFull + 8 * i,
                       (last - i) * kKeys, head, batch);
    }
  }
  __syncthreads();  // the barriers can be waited for
  mbarrier_wait(base + kQueryFull, 0);

  for (int n = last; n >= 0; --n) {
    // The buffers are used in turn; a barrier's parity flips each time around.
    const unsigned round = last - n, stage = round % kStages, parity = round / kStages % 2;
    const uint32_t key_tile = base + kKeyAt + stage * kTileBytes;
    const uint32_t value_tile = base + kValueAt + stage * kTileBytes;
    mbarrier_wait(base + kKeyFull + 8 * stage, parity);

    float s[2][kKeys / 2] = {};
#pragma unroll 1  // not more, or the registers run out
    for (int d = 0; d < kHeadDim; d += 16) {
      uint32_t q[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_matrices(q[m],
                      place<kQueries>(query_tile, row0 + 16 * m + lane % 16, d + lane / 16 * 8));
#pragma unroll
      for (int j = 0; j < kKeys / 8; j += 2) {  // 16 keys
        uint32_t k[4];
        load_matrices(
            k, place<kKeys>(key_tile, 8 * j + lane / 16 * 8 + lane % 8, d + lane / 8 % 2 * 8));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_16x8x16(&s[m][4 * j], q[m], k[0], k[1]);
          mma_16x8x16(&s[m][4 * j + 4], q[m], k[2], k[3]);
        }
      }
    }

#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (a.causal && (n + 1) * kKeys > first) {
        const int row = first + row0 + 16 * m + lane / 4;
        const fa3_range seen[2] = {{0, row + 1}, {0, row + 9}};
        mask_scores(s[m], seen, n * kKeys + 2 * (lane % 4));
      }
      float factor[2];
      online_softmax(s[m], rows[m], kScaleLog2, factor);
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) o[m][i] *= factor[i / 2 % 2];
    }

    mbarrier_wait(base + kValueFull + 8 * stage, parity);
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t p[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p[m][i] = pack_pair(s[m][k / 2 + 2 * i], s[m][k / 2 + 2 * i + 1]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; j += 2) {  // 16 columns
        uint32_t v[4];
        load_matrices_transposed(v, place<kKeys>(value_tile, k + lane % 16, 8 * j + lane / 16 * 8));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_16x8x16(&o[m][4 * j], p[m], v[0], v[1]);
          mma_16x8x16(&o[m][4 * j + 4], p[m], v[2], v[3]);
        }
      }
    }
    __syncthreads();  // all are done with both buffers
    if (threadIdx.x == 0 && n >= kStages) {
      load_tile<kKeys>(key_tile, &key_map, base + kKeyFull + 8 * stage, (n - kStages) * kKeys, head,
                       batch);
      load_tile<kKeys>(value_tile, &value_map, base + kValueFull + 8 * stage, (n - kStages) * kKeys,
                       head, batch);
    }
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float factor[2];
    for (int r = 0; r < 2; ++r) softmax_finish(rows[m], r, softmax_scale(), nullptr, factor[r]);
    store_rows(a, o[m], factor, batch, first + row0 + 16 * m + lane / 4, head);
  }
}

static void launch(const attention &a) {
  cudaFuncSetAttribute(k3_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k3_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(
      a, tile_map(a, a.query, kQueries), tile_map(a, a.key, kKeys), tile_map(a, a.value, kKeys));
}

const step k3_tma = {
    "k3_tma", "tiles by the copy engine", (const void *)k3_kernel, kThreads, kSharedBytes, launch,
};
