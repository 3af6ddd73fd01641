// V^T of FP8 values, before the forward kernel of head dim 256: to transpose them there, for each
// tile of queries anew, takes more of shared memory's bandwidth than its products leave.
//
// A block has a chunk of columns of a tile of V. The chunk comes by the copy engine, is transposed
// by way of the registers, and leaves in the order in which the forward kernel has it in shared
// memory.
#include "forward_fp8_params.h"
#include "ring.cuh"
#include "tma.cuh"

constexpr int kTileK = FA3_TILE_K;
constexpr int kHeadDimV = FA3_VALUE_HEAD_DIM;
constexpr int kCodes = FA3_FORWARD_FP8_CHUNK(kHeadDimV);
constexpr int kKeys = kTileK;
constexpr int kChunks = kHeadDimV / kCodes;
constexpr int kBytes = kTileK * kCodes;  // of a chunk
constexpr int kTransposers = FA3_TRANSPOSE_VALUES_THREADS / 32;
static_assert(kTileK == 128 && kCodes == 128, "rows of V^T");

#include "transpose_chunk.cuh"

extern __shared__ __align__(1024) unsigned char shared[];

extern "C" __global__ void __launch_bounds__(FA3_TRANSPOSE_VALUES_THREADS)
    transpose_values(const __grid_constant__ fa3_transpose_values_params params) {
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  const barrier full = {base + kBytes};
  if (threadIdx.x == 0) {
    tma_prefetch_map(&params.value);
    barrier_init(full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_prior_grids();
  let_next_grid_launch();
  const int chunk = blockIdx.x % kChunks, head = blockIdx.y, batch = blockIdx.z;
  const fa3_sequence sequence = fa3_find_sequence(&params.sequences, batch);
  const int keys = sequence.mask.keys;
  const int first = fa3_first_transposed(&params.to, params.sequences.cu_seqlens_k, batch, kTileK);
  uint32_t phase = 0;
  for (int n = blockIdx.x / kChunks; n * kTileK < keys && first + n < params.to.count;
       n += gridDim.x / kChunks, ++phase) {
    if (threadIdx.x == 0) {
      tma_store_wait_read<0>();
      barrier_expect(full, kBytes);
      tma_load_4d(base, &params.value, full.address, chunk * kCodes, sequence.key_row + n * kTileK,
                  head, sequence.key_batch);
    }
    barrier_wait(full, phase);
    const chunk_part part = part_of_chunk(base, base, threadIdx.x / 32, threadIdx.x);
    uint32_t x[kPartUnits][4];
#pragma unroll
    for (int i = 0; i < kPartUnits; ++i) load_unit(part, i, x[i]);
    __syncthreads();
    if (keys - n * kTileK < kTileK)
#pragma unroll
      for (int i = 0; i < kPartUnits; ++i) clear_unit(i, keys - n * kTileK, x[i]);
#pragma unroll
    for (int i = 0; i < kPartUnits; ++i) store_unit(part, i, x[i]);
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(
          fa3_transposed_tile(&params.to, first + n, head, kChunks * kBytes) + chunk * kBytes, base,
          kBytes);
      tma_store_commit();
    }
  }
  if (threadIdx.x == 0) tma_store_wait_read<0>();  // shared memory lives as long as the block
}
