// Queries become float16 in the kernels for chunks of codes.
#ifndef FA3_CHUNK_QUERIES_CUH
#define FA3_CHUNK_QUERIES_CUH

#include "chunk_block.cuh"
#include "codes.cuh"
#include "decode_logits.cuh"
#include "decode_queries.cuh"
#include "decode_scales.cuh"

// Eight elements of a query's row as they lie in memory; of codes in the first two words.
__device__ __forceinline__ uint4 fetch_elements(const fa3_decode_fp8_params &p, const char *row,
                                                int column, bool there) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (!there || column >= p.decode.head_dim) return x;
  if (p.query != FA3_QUERY_E4M3) return *(const uint4 *)(row + 2 * column);
  const uint2 codes = *(const uint2 *)(row + column);
  return make_uint4(codes.x, codes.y, 0, 0);
}

// A row of queries, of which two lanes have halves.
constexpr int kVectorsOfLane = kHeadDim / 16;
struct half_row {
  uint32_t pairs[kVectorsOfLane][4];  // of float16
  float factor;                       // that makes logits of products, but for scales of keys
};

__device__ __forceinline__ int find_exponent(const uint4 (&x)[kVectorsOfLane]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kVectorsOfLane; ++i)
    top = __vmaxu2(__vmaxu2(top, __vmaxu2(x[i].x & 0x7fff7fff, x[i].y & 0x7fff7fff)),
                   __vmaxu2(x[i].z & 0x7fff7fff, x[i].w & 0x7fff7fff));
  top = max(top & 0xffff, top >> 16);
  top = max(top, __shfl_xor_sync(0xffffffff, top, 1));
  return exponent_to_fit(top);
}

// The block's row `row`, from column `first` on, as float16; zeros where there is no such row.
__device__ __forceinline__ half_row fit_half_row(const fa3_decode_fp8_params &p,
                                                 const block_work &w, int row, int first) {
  const bool there = row < w.rows;
  const row_place place = place_of_row(p.decode, w, there ? row : 0);
  const char *const from = address_of_query_row(p.decode, w, place);
  uint4 x[kVectorsOfLane];
#pragma unroll
  for (int i = 0; i < kVectorsOfLane; ++i) x[i] = fetch_elements(p, from, first + 8 * i, there);
  half_row half;
  half.factor = scale_of_query(p, w, place) * product_scale(p.decode);
  float up = 1.0f;
  if (p.query == FA3_QUERY_BF16) {
    const int exponent = find_exponent(x);
    up = power_of_2(exponent);
    half.factor *= power_of_2(-exponent);
  }
#pragma unroll
  for (int i = 0; i < kVectorsOfLane; ++i) {
    uint32_t(&y)[4] = half.pairs[i];
    y[0] = x[i].x, y[1] = x[i].y, y[2] = x[i].z, y[3] = x[i].w;
    if (p.query == FA3_QUERY_BF16) {
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = fit_pair(y[j], up);
    } else if (p.query == FA3_QUERY_E4M3) {
      unpack_codes(x[i].x, y[0], y[1]);
      unpack_codes(x[i].y, y[2], y[3]);
    }
  }
  return half;
}

#endif
