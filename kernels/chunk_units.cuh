// The units of rows of P and O in the kernels for chunks of codes, and what a head's scales are.
#ifndef FA3_CHUNK_UNITS_CUH
#define FA3_CHUNK_UNITS_CUH

#include "chunk_block.cuh"
#include "decode_logits.cuh"
#include "registers.cuh"

// Exponents of 2: the unit of a row that has none, as nothing but zeros multiplied values; the
// least.
constexpr float kNoUnit = 0.5f, kLeastUnit = -100.0f;
constexpr float kMostUnits = 1024.0f;

// A row's top may lag behind its greatest score by so many powers of 2, as in the forward kernel
// (docs/numerics.md). To follow takes time: of 16 rows one has a new maximum in many tiles.
constexpr float kTopRoom = 3.0f;

// How far a row's products may exceed its top, where `factor` makes logits of them. It is finite,
// so that a row without a top always takes the first score.
__device__ __forceinline__ float room_of_products(float factor) {
  return fminf(kTopRoom / kLog2e * reciprocal_unit(factor), 1e37f);
}

// The scale that all keys of a head have, or all values; -1: there are several.
__device__ __forceinline__ float scale_of_head(const fa3_decode_params &p, const fa3_scales &scales,
                                               const block_work &w) {
  if (scales.data == nullptr) return 1.0f;
  // A page stands for a sequence.
  if (scales.rows > 0 || (p.sequences.page_table != nullptr && scales.stride_batch != 0))
    return -1.0f;
  const int entry = p.sequences.cu_seqlens_k ? w.batch : w.sequence.key_batch;
  return scales
      .data[entry * scales.stride_batch + w.head / scales.heads_per_scale * scales.stride_head];
}

#endif
