// The online softmax of the FP8 forward kernel: as softmax.cuh, with a scale for each row, and
// probabilities 2^kTop times as large, so that they make good codes.
#ifndef FA3_FORWARD_FP8_SOFTMAX_CUH
#define FA3_FORWARD_FP8_SOFTMAX_CUH

#include "softmax.cuh"

// A reference is kTop below its row's maximum: 2^kTop is that maximum's code, and up to 448 =
// 2^8.807 there is room for greater ones that the reference need not follow. With less room than
// that some warp of the four follows in most steps, and the others wait for it. In the loop for
// scales of heads the sums of P have to have room too (forward_fp8_heads.cuh).
constexpr float kTop = kHeadScales ? 5.0f : 7.0f;
constexpr float kGreatest = 8.8f;

// Exponents of 2 beyond this are beyond any bound, for in one instruction (fma) they would keep the
// rounding of the reference. There the product with the scale is rounded as the reference is.
constexpr float kLargestExponent = 0x1p22f;

__device__ __forceinline__ void softmax_set_code_bounds(softmax_rows &rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    rows.bound[r] = fminf(
        rows.reference[r] + fminf(fmaxf(log2_unit(rows.sum[r] * kLargestShare), kTop), kGreatest),
        kLargestExponent);
}

__device__ __forceinline__ bool softmax_outgrown_codes(const float (&top)[2],
                                                       const softmax_rows &rows,
                                                       const float (&scale)[2]) {
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float greatest = __int_as_float(max(__float_as_int(top[r]), 0));
    outgrown |= !(greatest * scale[r] <= rows.bound[r]);  // also for NaN
  }
  return __any_sync(0xffffffff, outgrown);
}

__device__ __forceinline__ bool softmax_follow_codes(const float (&top)[2], softmax_rows &rows,
                                                     const float (&scale)[2], float (&factor)[2]) {
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Rounded twice, as softmax_subtract_large_codes does.
    const float m0 = __fsub_rn(__fmul_rn(row_maximum(top[r]), scale[r]), kTop);
    bool follows = !(m0 <= rows.reference[r]);  // also for NaN
    follows &= any_of_quad(!(top[r] * scale[r] <= rows.bound[r]));
    factor[r] = 1.0f;
    if (follows) {
      factor[r] = exp2_unit(rows.reference[r] - m0);
      rows.reference[r] = m0;
      grown = true;
    }
    rows.sum[r] *= factor[r];
  }
  return __any_sync(0xffffffff, grown);
}

// Of rows whose reference is beyond kLargestExponent, the scores become exponents of 2, in two
// steps, and scale and shift what leaves them so. What becomes of a row depends on that row alone.
template <int kCount>
__device__ __forceinline__ void softmax_subtract_large_codes(float (&s)[kCount],
                                                             const softmax_rows &rows,
                                                             float (&scale)[2], float (&shift)[2]) {
  bool large[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    large[r] = fabsf(rows.reference[r]) > kLargestExponent && rows.reference[r] != FA3_NO_REFERENCE;
  if (!__any_sync(0xffffffff, large[0] || large[1])) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = i / 2 % 2;
    if (large[r]) s[i] = __fsub_rn(__fmul_rn(s[i], scale[r]), kTop) - rows.reference[r] + kTop;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!large[r]) continue;
    scale[r] = 1.0f;
    shift[r] = 0.0f;
  }
}

// Scores become exponents of 2.
template <int kCount>
__device__ __forceinline__ void softmax_exponents_of_codes(float (&s)[kCount],
                                                           const float (&shift)[2],
                                                           const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = fmaf(s[i], scale[i / 2 % 2], -shift[i / 2 % 2]);
}

// Two pairs of neighbours, eight columns apart, make four codes: the order in which V's keys lie.
template <int kCount>
__device__ __forceinline__ void pack_probabilities(const float (&s)[kCount],
                                                   uint32_t (&p)[kCount / 4]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float *x = s + i / 2 * 8 + i % 2 * 2;
    p[i] = pack_codes(x[0], x[1], x[4], x[5]);
  }
}

// Exponents become probabilities, and join their rows' sums: those of row r are sum[r] and
// sum[r + 2], so that latency does not add up.
template <int kCount>
__device__ __forceinline__ void softmax_probabilities(float (&s)[kCount], float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = exp2_unit(s[i]);
    sum[i / 2 % 4] += s[i];
  }
}

// The same, and their codes: of few at a time, so that neither waits for the last exponential.
template <int kCount>
__device__ __forceinline__ void softmax_codes(float (&s)[kCount], uint32_t (&p)[kCount / 4],
                                              float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    float(&x)[8] = reinterpret_cast<float(&)[8]>(s[i]);
    softmax_probabilities(x, sum);
    pack_probabilities(x, reinterpret_cast<uint32_t(&)[2]>(p[i / 4]));
  }
}

#endif
