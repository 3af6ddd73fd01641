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

// A row's top becomes `top`, and what was summed before is less: returns by what to multiply O.
// Where values have scales of their own (not kAlike), the row's unit takes it as long as it can.
template <bool kAlike>
__device__ __forceinline__ float raise_top(float top, float exponent_factor, float &row_top,
                                           float &unit, float &sum) {
  const float moved = (row_top - top) * exponent_factor;
  row_top = top;
  float factor;
  if (kAlike || unit == kNoUnit) {
    factor = exp2_unit(moved);
  } else {
    unit += moved;
    if (unit >= kLeastUnit) return 1.0f;
    factor = exp2_unit(unit - kLeastUnit);
    unit = kLeastUnit;
  }
  sum *= factor;
  return factor;
}

// A row's unit follows the greatest that multiplies values: returns by what to multiply all that.
__device__ __forceinline__ float follow_unit(float greatest, float &unit, float &sum) {
  if (greatest <= (unit == kNoUnit ? 0.0f : 1.0f)) return 1.0f;  // not of NaN
  const float factor = reciprocal_unit(greatest);
  unit += log2_unit(greatest);
  sum *= factor;
  return factor;
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
