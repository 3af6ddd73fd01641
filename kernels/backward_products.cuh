// The products of a step of the backward kernel.
#ifndef FA3_BACKWARD_PRODUCTS_CUH
#define FA3_BACKWARD_PRODUCTS_CUH

#include "backward_work.cuh"
#include "wgmma.cuh"

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kRowBytes>();
constexpr uint32_t kDsDescriptorHigh = wgmma_descriptor_high<kDsRowBytes>();

// S^T = K Q^T, or dP^T = V dO^T, for the warpgroup's keys and a block of queries.
__device__ __forceinline__ void issue_scores(float (&s)[kTileQ / 2], uint32_t keys,
                                             uint32_t queries) {
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 16) {
    const int chunk = k / kChunk, inside = k % kChunk * 2;
    wgmma_shared<kTileQ>(s, keys + ((chunk * kTileK * kRowBytes + inside) >> 4),
                         queries + ((chunk * kTileQ * kRowBytes + inside) >> 4), kDescriptorHigh,
                         k > 0);
  }
  wgmma_commit();
}

// dV += P^T dO, or dK += dS^T Q. `before` each part, what else there is to do.
template <class Before>
__device__ __forceinline__ void issue_gradient(float (&gradient)[kHeadDim / 2],
                                               const uint32_t (&weights)[kTileQ / 4],
                                               uint32_t queries, bool accumulate, Before before) {
#pragma unroll
  for (int k = 0; k < kTileQ; k += 16) {
    before(k / 16);
    wgmma_fence();
    wgmma_registers<kHeadDim>(gradient, weights + k / 4, queries + ((k * kRowBytes) >> 4),
                              kDescriptorHigh, k > 0 || accumulate);
  }
  wgmma_commit();
}

// dQ = dS K for the warpgroup's share of rows or columns; or dQ^T = K^T dS^T.
__device__ __forceinline__ void issue_dq(float (&dq)[kQueryColumns / 2], uint32_t ds,
                                         uint32_t keys) {
#pragma unroll
  for (int k = 0; k < kTileK; k += 16) {
    const uint32_t of_keys = keys + ((k * kRowBytes) >> 4);
    const uint32_t of_ds =
        ds + ((kTransposed ? k / 64 * kDsBlockBytes + k % 64 * 2 : k * kDsRowBytes) >> 4);
    if (kTransposed)
      wgmma_transposed<kQueryColumns, !kTransposed>(dq, of_keys, kDescriptorHigh, of_ds,
                                                    kDsDescriptorHigh, k > 0);
    else
      wgmma_transposed<kQueryColumns, !kTransposed>(dq, of_ds, kDsDescriptorHigh, of_keys,
                                                    kDescriptorHigh, k > 0);
  }
  wgmma_commit();
}

#endif
