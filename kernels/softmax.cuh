// The online softmax over one warpgroup's tile of scores, in the wgmma register
// layout: a thread holds two rows, r = 0 and 1 (eight rows apart), each spread
// over the four threads of a quad.
#ifndef FA3_SOFTMAX_CUH
#define FA3_SOFTMAX_CUH

#include <stdint.h>

#include "mask.h"
#include "registers.cuh"

// How many of each eight neighbouring exponentials are computed as a polynomial
// on the FMA units, to relieve the special function unit (16 a clock and SM).
#ifndef FA3_INTEGER_MAX
#define FA3_INTEGER_MAX 1
#endif

#ifndef FA3_POLYNOMIAL
#define FA3_POLYNOMIAL 0
#endif

// The reference that exponents are taken against follows the row's maximum only
// when that has outgrown it by this much (in powers of two). Until then the
// output needs no rescaling, and the sums grow by at most 2^8.
#ifndef FA3_RESCALE_THRESHOLD
#define FA3_RESCALE_THRESHOLD 8.0f
#endif

// A row that has seen no key. Finite, so that a masked score (-inf) less this is
// still -inf, and below any score.
#define FA3_NO_REFERENCE (-1.7e38f)

struct softmax_rows {
  float reference[2];  // in powers of two
  float sum[2];        // this thread's columns alone, until the end
};

// 2**x for x <= 128, as 2**floor(x) times a degree-3 polynomial of the rest
// (relative error 9e-5, below bf16's rounding). Exactly 0 from -127 down.
__device__ __forceinline__ float exp2_polynomial(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are floor(x)
  x = fmaxf(x, -127.0f);
  const float shifted = add_round_down(x, magic);
  const float f = x - (shifted - magic);
  float y = fmaf(0.07706709f, f, 0.22764493f);
  y = fmaf(y, f, 0.69511680f);
  y = fmaf(y, f, 1.0f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}

// Scores become -inf where the thread's row does not see the key. `column` is the
// key of the thread's first score.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const fa3_range (&seen)[2],
                                            int column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = seen[r].begin - column, end = seen[r].end - column;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int offset = 8 * j + e;
        if (offset < begin || offset >= end) s[4 * j + 2 * r + e] = -INFINITY;
      }
    }
  }
}

// cap * tanh(s * scale / cap), less the factor cap, as 1 - 2 / (1 + e^(2x)): the
// tanh instruction is too coarse for scores. Volatile keeps the order of the
// source, and so the registers few.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], float twice) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile(
        "{\n\t.reg .f32 e;\n\t"
        "mul.f32 e, %0, %1;\n\t"
        "ex2.approx.ftz.f32 e, e;\n\t"
        "add.f32 e, e, 0f3f800000;\n\t"
        "rcp.approx.ftz.f32 e, e;\n\t"
        "fma.rn.f32 %0, e, 0fc0000000, 0f3f800000;\n\t}"
        : "+f"(s[i])
        : "f"(twice));
  }
}

// The greatest score of each row, NaN if there is one.
template <int kCount>
__device__ __forceinline__ void row_maxima(const float (&s)[kCount], float (&top)[2]) {
  float chain[4];  // several, so that latency does not add up
#pragma unroll
  for (int e = 0; e < 4; ++e) chain[e] = s[e];
#pragma unroll
  for (int i = 4; i < kCount; ++i) chain[i % 4] = max_nan(chain[i % 4], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = max_nan(chain[2 * r], chain[2 * r + 1]);
    top[r] = max_nan(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
    top[r] = max_nan(top[r], __shfl_xor_sync(0xffffffff, top[r], 2));
  }
}

#if FA3_INTEGER_MAX
// The same with half the instructions: Hopper takes the maximum of three integers
// at once, and floats that are not negative are ordered as their bits are. If all
// of a row is negative the result is wrong, negative, and not used.
template <int kCount>
__device__ __forceinline__ void row_maxima_by_integers(const float (&s)[kCount], float (&top)[2]) {
  int chain[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) chain[e] = __float_as_int(s[e]);
#pragma unroll
  for (int i = 4; i + 7 < kCount; i += 8)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      chain[e] = __vimax3_s32(chain[e], __float_as_int(s[i + e]), __float_as_int(s[i + 4 + e]));
#pragma unroll
  for (int e = 0; e < 4; ++e) chain[e] = max(chain[e], __float_as_int(s[kCount - 4 + e]));
  int m[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m[r] = max(chain[2 * r], chain[2 * r + 1]);
    m[r] = max(m[r], __shfl_xor_sync(0xffffffff, m[r], 1));
    m[r] = max(m[r], __shfl_xor_sync(0xffffffff, m[r], 2));
    top[r] = __int_as_float(m[r]);
  }
  if (__any_sync(0xffffffff, (m[0] | m[1]) < 0)) row_maxima(s, top);
}
#endif

// Scores become probabilities (against the row's reference, not yet divided by
// the sum). Returns whether any row of the warp took a new reference; then what
// was summed before is to be multiplied by `factor`.
template <int kCount>
__device__ __forceinline__ bool softmax_scores(float (&s)[kCount], softmax_rows &rows, float scale,
                                               float (&factor)[2]) {
  bool grown = false;
  float top[2];
#if FA3_INTEGER_MAX
  row_maxima_by_integers(s, top);
#else
  row_maxima(s, top);
#endif
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m0 = top[r] * scale;
    factor[r] = 1.0f;
    if (!(m0 <= rows.reference[r] + FA3_RESCALE_THRESHOLD)) {  // also for NaN
      factor[r] = exp2_unit(rows.reference[r] - m0);
      rows.reference[r] = m0;
      grown = true;
    }
  }
  grown = __any_sync(0xffffffff, grown);
  // Two sums a row, one for each way to compute, so that neither waits for the other.
  float sum[4] = {rows.sum[0] * factor[0], rows.sum[1] * factor[1], 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 4 * j + e, r = e / 2;
      const float x = fmaf(s[i], scale, -rows.reference[r]);
      // Spread the polynomials evenly, so that both units work all the time.
      const bool on_fma = ((i + 1) * FA3_POLYNOMIAL / 8) != (i * FA3_POLYNOMIAL / 8);
      s[i] = on_fma ? exp2_polynomial(x) : exp2_unit(x);
      const int chain = FA3_POLYNOMIAL > 0 ? (on_fma ? 2 + r : r) : r + j % 2 * 2;
      sum[chain] += s[i];
    }
  }
  rows.sum[0] = sum[0] + sum[2];
  rows.sum[1] = sum[1] + sum[3];
  return grown;
}

// One row's columns together: sets the factor that turns the summed output into
// the average, returns the log-sum-exp. The sink is a logit without a value.
__device__ __forceinline__ float softmax_finish(const softmax_rows &rows, int r, const float *sink,
                                                float &factor) {
  float sum = rows.sum[r];
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  sum += __shfl_xor_sync(0xffffffff, sum, 2);
  float reference = rows.reference[r], shift = 1.0f;
  if (sink != nullptr) {
    const float logit = *sink * 1.44269504f;
    const float top = max_nan(reference, logit);
    shift = exp2_unit(reference - top);
    sum = sum * shift + exp2_unit(logit - top);
    reference = top;
  }
  factor = sum == 0.0f ? 0.0f : __fdividef(shift, sum);
  return sum == 0.0f ? -INFINITY : (reference + __log2f(sum)) * 0.69314718f;
}

#endif
