// The online softmax over one warpgroup's tile of scores, in the wgmma register
// layout: a thread holds two rows, r = 0 and 1 (eight rows apart), each spread
// over the four threads of a quad.
#ifndef FA3_SOFTMAX_CUH
#define FA3_SOFTMAX_CUH

#include <stdint.h>

#include <float.h>

#include "mask.h"
#include "registers.cuh"
#include "softmax_scale.h"

// The same of products that are to be multiplied by `factor` besides, which is positive, zero or
// NaN (make_softmax_scale).
__device__ __forceinline__ fa3_softmax_scale scale_times(const fa3_softmax_scale &scale,
                                                         float factor) {
  constexpr float kLeastFloat = 0x1p-149f, kLargestExponent = 0x1p22f, kLeastExponent = -1.7e38f;
  fa3_softmax_scale times;
  times.natural = scale.natural * factor;
  times.log2 = max_nan(scale.log2 * factor, kLeastFloat);
  times.inverse = fminf(reciprocal_unit(times.log2), FLT_MAX);
  times.limit = fminf(kLargestExponent * times.inverse, FLT_MAX);
  times.none = times.log2 > 1.0f ? kLeastExponent * times.inverse : kLeastExponent;
  return times;
}

// A row that has seen no key, where scores times their scale stay below 1.7e38. Finite, so that a
// masked score (-inf) less this is still -inf, and below any score.
#define FA3_NO_REFERENCE (-1.7e38f)

// Probabilities are exponentials of scores less a reference, of the size of the row's maximum.
// Both are products of Q and K, before the scale: their exponents of 2 are differences of scores,
// times the scale. To make the difference of two products of it (one instruction, fma, instead of
// two) adds the rounding of reference * scale to all exponents of a row. That is nothing as long as
// references are within the limit of softmax_scale.h; beyond it, it could be any number.
struct softmax_rows {
  float reference[2];
  float sum[2];    // this thread's columns alone, until the end
  float bound[2];  // the greatest score of this thread that the reference need not follow
};

// How many of a thread's scores of a row have keys before this one, counted from its first: of
// every eight columns it has the first two.
__device__ __forceinline__ int scores_before(int key) {
  return max(((key + 7) >> 3) + ((key + 6) >> 3), 0);
}

// Scores of row r become -inf where the thread's row does not see the key. One bit for each score
// of a row, because the assembler turns seven of them at a time into predicates.
template <int kCount>
__device__ __forceinline__ void hide_scores(float (&s)[kCount], int r, uint32_t visible) {
  static_assert(kCount <= 64, "a row's bits");
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i)
    if (!(visible & 1u << i)) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
}

// `column` is the key of the thread's first score.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const fa3_range (&seen)[2],
                                            int column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = scores_before(seen[r].begin - column);
    hide_scores(s, r, bit_mask(begin, max(scores_before(seen[r].end - column) - begin, 0)));
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

// The greatest of a thread's scores of each row, NaN if there is one.
template <int kCount>
__device__ __forceinline__ void thread_maxima(const float (&s)[kCount], float (&top)[2]) {
  float chain[4];  // several, so that latency does not add up
#pragma unroll
  for (int e = 0; e < 4; ++e) chain[e] = s[e];
#pragma unroll
  for (int i = 4; i < kCount; ++i) chain[i % 4] = max_nan(chain[i % 4], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = max_nan(chain[2 * r], chain[2 * r + 1]);
}

// The same with half the instructions: Hopper takes the maximum of three integers
// at once, and floats that are not negative are ordered as their bits are. Where all
// of a row are negative, it is one of them, not the greatest.
template <int kCount>
__device__ __forceinline__ void thread_maxima_by_integers(const float (&s)[kCount],
                                                          float (&top)[2]) {
  int chain[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) chain[e] = __float_as_int(s[e]);
#pragma unroll
  for (int i = 4; i + 7 < kCount; i += 8)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      chain[e] = __vimax3_s32(chain[e], __float_as_int(s[i + e]), __float_as_int(s[i + 4 + e]));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = kCount - 4 + 2 * r;
    const int m = __vimax3_s32(chain[2 * r], chain[2 * r + 1], __float_as_int(s[i]));
    top[r] = __int_as_float(max(m, __float_as_int(s[i + 1])));
  }
}

// A reference need not follow each new maximum: then what was summed before is rescaled less
// often, and probabilities are at most 2 to kLargestLag. But where the maximum is the reference,
// its probability is exactly 1. Any other is rounded for the second product, and where one
// outweighs the rest, that is the largest error of all: so the reference also follows a maximum
// whose probability would be a larger part of what its thread has summed than kLargestShare.
constexpr float kLargestLag = 3.0f;
constexpr float kLargestShare = 0.2f;

// Scores beyond the limit are always beyond the bound.
__device__ __forceinline__ void softmax_set_bounds(softmax_rows &rows,
                                                   const fa3_softmax_scale &scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float lag = fminf(fmaxf(log2_unit(rows.sum[r] * kLargestShare), 0.0f), kLargestLag);
    rows.bound[r] = fminf(fmaf(lag, scale.inverse, rows.reference[r]), scale.limit);
  }
}

// Whether a score of the warp's may be beyond its row's bound: without a word between the
// threads of a row, for most tiles have none.
__device__ __forceinline__ bool softmax_outgrown(const float (&top)[2], const softmax_rows &rows) {
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float greatest = __int_as_float(max(__float_as_int(top[r]), 0));
    outgrown |= !(greatest <= rows.bound[r]);  // also for NaN
  }
  return __any_sync(0xffffffff, outgrown);
}

// Makes the maxima by integers the greatest in any case.
template <int kCount>
__device__ __forceinline__ void correct_maxima(const float (&s)[kCount], float (&top)[2]) {
  if (__any_sync(0xffffffff, (__float_as_int(top[0]) | __float_as_int(top[1])) < 0))
    thread_maxima(s, top);
}

// The greatest of the four threads' that share a row.
__device__ __forceinline__ float row_maximum(float top) {
  top = max_nan(top, __shfl_xor_sync(0xffffffff, top, 1));
  return max_nan(top, __shfl_xor_sync(0xffffffff, top, 2));
}

// What a row's reference is next: its maximum `m0` if that is greater, and (lazily) a score is
// beyond its thread's bound.
template <bool kLazy>
__device__ __forceinline__ bool softmax_follows(float m0, float top, const softmax_rows &rows,
                                                int r) {
  bool follows = !(m0 <= rows.reference[r]);  // also for NaN
  if (kLazy) follows &= any_of_quad(!(top <= rows.bound[r]));
  return follows;
}

// Makes the maxima by integers the greatest in any case. Rows whose next reference is beyond the
// limit become `large`: their scores are then less that reference. As unsigned integers all
// negative numbers are greater than any that is not, so that one comparison finds all this is for.
// What becomes of a row depends on that row alone: those beyond a tile's heads hold anything.
template <int kCount>
__device__ __forceinline__ void softmax_settle_unusual(float (&s)[kCount], float (&top)[2],
                                                       const softmax_rows &rows,
                                                       const fa3_softmax_scale &scale,
                                                       bool (&large)[2]) {
  bool unusual[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    large[r] = false;
    unusual[r] = __float_as_uint(top[r]) > __float_as_uint(scale.limit);
  }
  if (!__any_sync(0xffffffff, unusual[0] || unusual[1])) return;
  thread_maxima(s, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m0 = row_maximum(top[r]);
    const float next = softmax_follows<true>(m0, top[r], rows, r) ? m0 : rows.reference[r];
    large[r] = any_of_quad(unusual[r]) && fabsf(next) > scale.limit && next != scale.none;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i / 2 % 2 == r && large[r]) s[i] -= next;
  }
}

// The references follow the rows' maxima, of which each thread has those of its own
// scores: each that is greater, or (lazily) where one is beyond its thread's bound; what a row
// does depends on that row alone. Returns whether any row of the warp took a new one; then
// what was summed before is to be multiplied by `factor`.
template <bool kLazy>
__device__ __forceinline__ bool softmax_follow(const float (&top)[2], softmax_rows &rows,
                                               float scale, float (&factor)[2]) {
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m0 = row_maximum(top[r]);
    factor[r] = 1.0f;
    if (softmax_follows<kLazy>(m0, top[r], rows, r)) {
      factor[r] = exp2_unit((rows.reference[r] - m0) * scale);
      rows.reference[r] = m0;
      grown = true;
    }
    rows.sum[r] *= factor[r];
  }
  return __any_sync(0xffffffff, grown);
}

// What is subtracted from scores times the scale.
__device__ __forceinline__ void softmax_set_shift(const softmax_rows &rows, float scale,
                                                  const bool (&large)[2], float (&shift)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) shift[r] = large[r] ? 0.0f : rows.reference[r] * scale;
}

// Where references always follow, no branch may stand behind the new ones: it would keep one row's
// exponentials from hiding the other row's maximum. There a row with a reference beyond the limit
// takes it for its base, once: the base is less of all its scores from then on, and the reference
// counts from it.
struct softmax_bases {
  float base[2];
  bool any;  // row of the warp's has one
};

// Before steps in which references always follow.
__device__ __forceinline__ void softmax_take_bases(softmax_rows &rows, softmax_bases &bases,
                                                   const fa3_softmax_scale &scale) {
  bool based = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool large = fabsf(rows.reference[r]) > scale.limit && rows.reference[r] != scale.none;
    bases.base[r] = large ? rows.reference[r] : 0.0f;
    if (large) rows.reference[r] = 0.0f;
    based |= large;
  }
  bases.any = __any_sync(0xffffffff, based);
}

// Behind them.
__device__ __forceinline__ void softmax_leave_bases(softmax_rows &rows,
                                                    const softmax_bases &bases) {
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.reference[r] += bases.base[r];
}

// Makes the maxima by integers the greatest in any case, and takes the bases off the scores; rows
// whose next reference is beyond the limit get theirs first. As softmax_settle_unusual.
template <int kCount>
__device__ __forceinline__ void softmax_rebase(float (&s)[kCount], float (&top)[2],
                                               softmax_rows &rows, softmax_bases &bases,
                                               const fa3_softmax_scale &scale) {
  const uint32_t greatest = max(__float_as_uint(top[0]), __float_as_uint(top[1]));
  if (!__any_sync(0xffffffff, bases.any || greatest > __float_as_uint(scale.limit))) return;
  thread_maxima(s, top);
  bool based = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float m0 = row_maximum(top[r]), before = bases.base[r] + rows.reference[r];
    const float next = !(m0 <= before) ? m0 : before;
    const float base = fabsf(next) > scale.limit && next != scale.none ? next : 0.0f;
    if (base != bases.base[r]) rows.reference[r] = before - base;
    bases.base[r] = base;
    based |= base != 0.0f;
    if (base != 0.0f) {
      top[r] -= base;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i / 2 % 2 == r) s[i] -= base;
    }
  }
  bases.any = __any_sync(0xffffffff, based);
}

// Scores become exponents of 2.
template <int kCount>
__device__ __forceinline__ void softmax_exponents(float (&s)[kCount], const float (&shift)[2],
                                                  float scale) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = fmaf(s[i], scale, -shift[i / 2 % 2]);
}

// Exponents kBegin to kEnd become probabilities (not yet divided by the sum).
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void softmax_exponentials(float (&s)[kCount], softmax_rows &rows) {
  float second[2] = {0.0f, 0.0f};  // sums that take turns with the rows', for speed
#pragma unroll
  for (int i = kBegin; i < kEnd; ++i) {
    const int r = i / 2 % 2;
    s[i] = exp2_unit(s[i]);
    (i / 4 % 2 ? second : rows.sum)[r] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.sum[r] += second[r];
}

// The softmax of a tile's first scores: the references are the rows' maxima. Found among floats:
// where a mask hides most of a tile, whole rows of a thread are negative, or hidden, and the
// maximum by integers would have to be put right, in a branch that a warpgroup's other warps wait
// for.
template <int kCount>
__device__ __forceinline__ void softmax_begin(float (&s)[kCount], softmax_rows &rows,
                                              const fa3_softmax_scale &scale) {
  float top[2], shift[2];
  bool large[2];
  thread_maxima(s, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.reference[r] = max_nan(row_maximum(top[r]), scale.none);
    rows.sum[r] = 0.0f;
    large[r] = fabsf(rows.reference[r]) > scale.limit && rows.reference[r] != scale.none;
  }
  if (__any_sync(0xffffffff, large[0] || large[1])) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (large[i / 2 % 2]) s[i] -= rows.reference[i / 2 % 2];
  }
  softmax_set_shift(rows, scale.log2, large, shift);
  softmax_exponents(s, shift, scale.log2);
  softmax_exponentials<0, kCount>(s, rows);
}

// One row's columns together: sets the factor that turns the summed output into
// the average, returns the log-sum-exp. The sink is a logit without a value.
__device__ __forceinline__ float softmax_finish(const softmax_rows &rows, int r,
                                                const fa3_softmax_scale &scale, const float *sink,
                                                float &factor) {
  float sum = rows.sum[r];
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  sum += __shfl_xor_sync(0xffffffff, sum, 2);
  const float reference = rows.reference[r];
  float logit = reference * scale.natural, shift = 1.0f;
  // Exponents have the rounding of reference * scale, and so has the sum: 2^-excess as a factor. It
  // would be all of the sum's logarithm where one score decides.
  float excess = 0.0f;
  if (fabsf(reference) <= scale.limit)
    excess = fmaf(-reference, scale.log2, reference * scale.log2);
  if (sink != nullptr) {
    if (sum == 0.0f) logit = -INFINITY;
    const float top = max_nan(max_nan(logit, *sink), -FLT_MAX);
    shift = exp2_unit(fmaf(logit - top, 1.44269504f, excess));
    sum = sum * shift + exp2_unit((*sink - top) * 1.44269504f);
    logit = top;
    excess = 0.0f;
  }
  // A sum is 0, or about 1 at least, for the reference was a maximum: nothing is too small for the
  // approximate instructions.
  factor = sum == 0.0f ? 0.0f : shift * reciprocal_unit(sum);
  return sum == 0.0f ? -INFINITY : fmaf(log2_unit(sum) + excess, 0.69314718f, logit);
}

#endif
