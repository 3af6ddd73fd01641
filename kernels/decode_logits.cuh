// What the kernels for caches make logits of.
#ifndef FA3_DECODE_LOGITS_CUH
#define FA3_DECODE_LOGITS_CUH

#include "decode_work.cuh"

// What makes logits of products; a cap takes them as they are. A logit is a product, rounded: so it
// is in the backward pass, and lse, whose logit one score may decide, has to be of the same.
__device__ __forceinline__ float product_scale(const fa3_decode_params &p) {
  return p.softcap_log2 != 0.0f ? 1.0f : p.scale;
}

// The exponent of 2 of a difference of logits.
constexpr float kLog2e = 1.44269504f;
__device__ __forceinline__ float exponent_of(float difference) {
  return __fmul_rn(difference, kLog2e);
}

// The keys that all rows of the block see.
__device__ __forceinline__ fa3_range find_common_keys(const fa3_decode_params &p, const work &w) {
  return fa3_common_keys(&w.sequence.mask, divide(w.first_row, p.group),
                         divide(w.first_row + w.rows - 1, p.group) + 1);
}

// The cap of a scaled product. The factor of a tiny cap is near the largest float: it comes last,
// as an infinite one would make NaN of a score of 0.
__device__ __forceinline__ float cap_score(const fa3_decode_params &p, float s) {
  const float x = fmaf(-2.0f, reciprocal_unit(1.0f + exp2_unit(s * p.softcap_log2)), 1.0f);
  return __fmul_rn(p.scale, x);
}

#endif
