// K2: the tensor cores, with FlashAttention-2's division of work (its section 3.3).
// New since K1:
// - each of four warps owns 32 query rows and sees every key, so that the warps
//   share no sums; scores, probabilities and output never leave the registers,
//   because the accumulators of one product, packed to bf16, are the operand of
//   the next;
// - tiles stay bf16 in shared memory, swizzled, and reach the registers by
//   ldmatrix;
// - cp.async loads run under the arithmetic: values while the scores are
//   computed, the next keys during softmax and output.
#include "copy_async.cuh"
#include "ladder.cuh"
#include "mma_sync.cuh"
#include "online_softmax.cuh"

constexpr int kQueries = 128;
constexpr int kKeys = 64;
constexpr int kThreads = 128;

// A tile is two halves of 64 columns. A row of a half is 128 bytes: eight units of
// 16, of which unit u of row r lies at place u ^ (r % 8), so that eight rows of one
// column fall into different banks.
constexpr int kRowBytes = 128;
constexpr int kQueryBytes = kQueries * kHeadDim * 2;
constexpr int kTileBytes = kKeys * kHeadDim * 2;
constexpr int kQueryAt = 0;
constexpr int kKeyAt = kQueryAt + kQueryBytes;
constexpr int kValueAt = kKeyAt + kTileBytes;
constexpr int kSharedBytes = kValueAt + kTileBytes + kAlignment;

template <int kRows>
static __device__ __forceinline__ uint32_t place(uint32_t tile, int row, int column) {
  const int unit = column % 64 / 8;
  return tile + (column / 64 * kRows + row) * kRowBytes + ((unit ^ (row % 8)) << 4);
}

// Sixteen threads to a row; each thread's copies are eight rows apart.
template <int kRows>
static __device__ __forceinline__ void load_tile(uint32_t to, const attention &a,
                                                 const bf16 *from) {
  const int row = threadIdx.x / 16, column = threadIdx.x % 16 * 8;
  const int row_step = kThreads / 16;
  from += (int64_t)row * a.heads * kHeadDim + column;
  to = place<kRows>(to, row, column);
#pragma unroll
  for (int i = 0; i < kRows / row_step; ++i) {
    copy_async(to + i * row_step * kRowBytes, from, true);
    from += row_step * a.heads * kHeadDim;
  }
}

static __global__ void __launch_bounds__(kThreads, 2) k2_kernel(attention a) {
  const uint32_t base = shared_base();
  const uint32_t query_tile = base + kQueryAt;
  const uint32_t key_tile = base + kKeyAt;
  const uint32_t value_tile = base + kValueAt;
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
  int n = (a.causal ? first + kQueries : a.seqlen) / kKeys - 1;
  const bf16 *keys = a.key + row_at(a, batch, 0, head);
  const bf16 *values = a.value + row_at(a, batch, 0, head);
  const int64_t tile_step = (int64_t)kKeys * a.heads * kHeadDim;
  load_tile<kQueries>(query_tile, a, a.query + row_at(a, batch, first, head));
  load_tile<kKeys>(key_tile, a, keys + n * tile_step);

  for (; n >= 0; --n) {
    copy_async_wait_all();
    __syncthreads();  // the keys are here, and all are done with the values before
    load_tile<kKeys>(value_tile, a, values + n * tile_step);

    float s[2][kKeys / 2] = {};
#pragma unroll 2  // not more, or the registers run out
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

    copy_async_wait_all();
    __syncthreads();  // the values are here, and all are done with the keys
    if (n > 0) load_tile<kKeys>(key_tile, a, keys + (n - 1) * tile_step);

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
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float factor[2];
    for (int r = 0; r < 2; ++r) softmax_finish(rows[m], r, softmax_scale(), nullptr, factor[r]);
    store_rows(a, o[m], factor, batch, first + row0 + 16 * m + lane / 4, head);
  }
}

static void launch(const attention &a) {
  cudaFuncSetAttribute(k2_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k2_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(a);
}

const step k2_mma_sync = {
    "k2_mma_sync", "tensor cores (mma.sync)", (const void *)k2_kernel, kThreads, kSharedBytes,
    launch,
};
