// P of the backward pass, where one instruction would be too coarse.
//
// P = exp(scale S - lse) is an exponential of 2 whose exponent is one fma, of a score, scale
// log2(e) and lse log2(e): two roundings of the size of lse. Beyond FA3_LARGE_LSE they are more
// than P's own, and soon any number. The product is then rounded before lse itself is subtracted,
// as it was in the lse of a row that one score decides: such a row's P is 1 however large the
// score.
#ifndef FA3_BACKWARD_PROBABILITY_CUH
#define FA3_BACKWARD_PROBABILITY_CUH

#include "registers.cuh"

// `natural` times the score is the logit. Without an fma.
__device__ __forceinline__ float large_probability(float score, float natural, float lse) {
  return exp2_unit(__fmul_rn(__fsub_rn(__fmul_rn(score, natural), lse), 1.44269504f));
}

// Whether a block of queries is so; `lse` is the address of the thread's first query's.
template <int kQueries>
__device__ __forceinline__ bool has_large_lse(uint32_t lse) {
  return load_shared_pair(lse + 2 * 4 * kQueries).x != 0.0f;
}

#endif
