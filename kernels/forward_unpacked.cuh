// What the forward kernel does otherwise where keys and values are unpacked codes (unpack.cu):
// these are exact in 16 bits, and have scales. Values and P are float16. Who includes it has
// kUnpacked, kTileK, `results` and `layout`.
//
// Of one scale for each head the keys' is part of the softmax's, and the values' of what makes O
// the average. Scales of rows come with K: the keys' multiply scores, the values' P. The products
// have to fit float16: a row has P, its sum and O in units of its own, 2^unit, which grow where
// products may be too large for them.
#ifndef FA3_FORWARD_UNPACKED_CUH
#define FA3_FORWARD_UNPACKED_CUH

#include "codes.cuh"
#include "forward_work.cuh"

#include "forward_store.cuh"

__device__ __forceinline__ const fa3_head_scales &head_scales(const fa3_forward_params &params,
                                                              const work &w) {
  return params.unpacked.of_heads[w.sequence.key_batch * params.unpacked.heads_k + w.key_head];
}

// Of a row that has seen no key there is nothing to scale.
__device__ __forceinline__ void scale_average(float scale, results &x) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (x.average[r] != 0.0f) x.average[r] *= scale;
}

// The scales of a tile's keys, by its number of all that K has had; those of its values follow.
__device__ __forceinline__ uint32_t row_scales(const layout &m, uint32_t use) {
  return m.scales + use % kScaleTiles * (2 * kScaleBytes);
}

// Those of a thread's scores number i to i + 3: of two keys, for both rows.
__device__ __forceinline__ float2 scales_of_scores(uint32_t scales, int i) {
  return load_shared_pair(scales + i / 4 * 32 + 8 * (thread_again() & 3));
}

// Scores, or P, times these.
template <int kCount>
__device__ __forceinline__ void multiply_rows(float (&s)[kCount], uint32_t scales) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 scale = scales_of_scores(scales, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) s[i + j] *= j % 2 == 0 ? scale.x : scale.y;
  }
}

// The greatest of a tile's scales, which are not negative: their bits are ordered as they are, and
// NaN is the greatest of all.
__device__ __forceinline__ float greatest_scale(uint32_t scales) {
  uint32_t greatest = 0;
#pragma unroll
  for (int i = 0; i < kTileK / 32; i += 2) {
    const float2 x = load_shared_pair(scales + 32 * 4 * i + 8 * (thread_again() & 31));
    greatest = max(greatest, max(__float_as_uint(x.x), __float_as_uint(x.y)));
  }
  return __uint_as_float(__reduce_max_sync(0xffffffff, greatest));
}

// The units of a thread's two rows. At first products of 0 alone fit: what is greater says how
// large they are. They never shrink: what is far below a row's greatest scale loses bits, within
// the bound of docs/numerics.md (of float16, which is absolute there, times the greatest scale).
struct row_units {
  float unit[2];  // an exponent of 2
  float most[2];  // scale of a value whose products always fit
};

// A unit is so small that products are at most this when it is found, and at most so many powers of
// 2 more before it grows.
constexpr float kUnitProducts = 8.0f, kUnitRoom = 7.0f;
constexpr float kLeastUnit = -100.0f;

// Units grow where products of P and values' scales may not fit. P, which is at most 2^kLargestLag,
// its sum and O are then multiplied: O not if there is none of this tile of queries (kBegin).
template <bool kBegin, int kCount, int kColumns>
__device__ __forceinline__ void follow_units(uint32_t scales, row_units &units, float (&p)[kCount],
                                             softmax_rows &rows, float (&o)[kColumns]) {
  const float greatest = greatest_scale(scales);
  const bool fits = greatest <= units.most[0] && greatest <= units.most[1];  // not of NaN
  if (!__any_sync(0xffffffff, !fits)) return;
  float factor[2], most[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 scale = scales_of_scores(scales, i);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      most[j / 2] = max_nan(most[j / 2], p[i + j] * (j % 2 == 0 ? scale.x : scale.y));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float product = row_maximum(most[r]);
    factor[r] = 1.0f;
    if (greatest <= units.most[r] || product <= 0.0f) continue;  // not of NaN
    const float unit = max_nan(units.unit[r] + log2_unit(product / kUnitProducts), kLeastUnit);
    factor[r] = exp2_unit(units.unit[r] - unit);
    rows.sum[r] *= factor[r];
    units.unit[r] = unit;
    units.most[r] = exp2_unit(unit + kUnitRoom);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) p[i] *= factor[i / 2 % 2];
  if (!kBegin)
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] *= factor[i / 2 % 2];
}

// A sum in units becomes what it is.
__device__ __forceinline__ void leave_units(const row_units &units, float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] *= exp2_unit(units.unit[r]);
}

// O is in units, and its average is not.
__device__ __forceinline__ void scale_average(const row_units &units, results &x) {
#pragma unroll
  for (int r = 0; r < 2; ++r) x.average[r] *= exp2_unit(units.unit[r]);
}

#endif
