// Queries on their way to float16, in the kernels for caches of codes.
#ifndef FA3_DECODE_QUERIES_CUH
#define FA3_DECODE_QUERIES_CUH

#include "codes.cuh"
#include "decode_work.cuh"

__device__ __forceinline__ const char *address_of_query_row(const fa3_decode_params &p,
                                                            const work &w, const row_place &place) {
  const fa3_decode_input &query = p.query;
  return query.data + ((uint64_t)w.sequence.query_batch * query.stride_batch +
                       (uint64_t)(w.sequence.query_row + place.query) * query.stride_row +
                       (uint64_t)place.head * query.stride_head) *
                          16;
}

// The exponent of the power of 2 that brings a row of bfloat16 to float16's range, its greatest to
// 2^14. `top`: the bits of that one, without the sign.
__device__ __forceinline__ int exponent_to_fit(uint32_t top) {
  return 14 - max((int)(top >> 7) - 127, -100);  // 128 of what is not finite
}

__device__ __forceinline__ float power_of_2(int exponent) {
  return __int_as_float((127 + exponent) << 23);
}

// A pair of bfloat16, times `up`, as float16.
__device__ __forceinline__ uint32_t fit_pair(uint32_t pair, float up) {
  return pack_fp16(__int_as_float(pair << 16) * up, __int_as_float(pair & 0xffff0000) * up);
}

#endif
