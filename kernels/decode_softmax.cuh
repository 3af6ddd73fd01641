// The online softmax of the decode kernels. Scores are products of queries and keys: a lane l has,
// of each 8 rows, number l / 4, and of each 8 keys 2 (l % 4) and the one behind it. These are, as
// they are, the second operand of what follows, the product of values' columns and probabilities,
// which few rows fill: of it a lane has, of 16 columns, number l / 4 and the one 8 on, and of each
// 8 rows number 2 (l % 4) and the one behind it.
#ifndef FA3_DECODE_SOFTMAX_CUH
#define FA3_DECODE_SOFTMAX_CUH

#include "decode_logits.cuh"
#include "softmax.cuh"

// Of a row, of a step's keys: what a lane has.
constexpr int kScores = kStepKeys / 4;

// Scales of values are part of what multiplies them.
constexpr bool kScaledValues = kElementBytes == 1;
// What multiplies a value may be up to 2^10 in the output's unit before the unit follows. Float16
// ends at 2^16.
constexpr float kUnitRoom = 10.0f;

// What a warp keeps of its rows.
struct attention {
  float output[kRowTiles][kHeadDim / 16][4];  // [e]: column e / 2 and row e % 2 of the lane's
  // Of row 8t + l / 4:
  float top[kRowTiles];   // its maximum, a logit
  float sum[kRowTiles];   // of this lane's keys
  float unit[kRowTiles];  // with scaled values: the output's, as a power of 2 over the top
};

__device__ __forceinline__ attention no_attention(void) {
  attention a;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int m = 0; m < kHeadDim / 16; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) a.output[t][m][e] = 0.0f;
    a.top[t] = a.unit[t] = FA3_NO_REFERENCE;
    a.sum[t] = 0.0f;
  }
  return a;
}

// What the lane has in row number r of its two of the output, of what it has in its row of scores.
__device__ __forceinline__ float of_output_row(float x, int r) {
  return __shfl_sync(0xffffffff, x, 8 * (threadIdx.x & 3) + 4 * r);
}

// The first operand of a score's products has 16 rows, of 16 columns. Where a head of keys has 8
// rows, the next 16 columns of these are in the place of the others: then of one part there are two
// steps, each with half a result.
constexpr int kProductTiles = kRowTiles / kHeads;
constexpr int kQueryParts = kHeadDim / 16 * kProductTiles / 2;

__device__ __forceinline__ int part_of_step(int k) {
  return kProductTiles == 2 ? k : k / 2;
}

// Where in it half i of the 16 columns of step k is, of rows 8t to 8t + 7.
__device__ __forceinline__ int place_in_part(int k, int t, int i) {
  return (kProductTiles == 2 ? t : k % 2) + 2 * i;
}

// The scores of 16 keys from the sums of even steps and of odd ones, for 8 keys each: [t][2n + i]
// is of key 8n + 2 (l % 4) + i.
__device__ __forceinline__ void add_sums(const float (&sums)[2][2][4],
                                         float (&s)[kProductTiles][4]) {
#pragma unroll
  for (int t = 0; t < kProductTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[t][i] = sums[i / 2][0][place_in_part(0, t, 0) * 2 + i % 2] +
                sums[i / 2][1][place_in_part(1, t, 0) * 2 + i % 2];
}

// Of scaled products: the cap, and -inf where a row does not see the key.
__device__ __forceinline__ void adjust_scores(const fa3_decode_params &p, const work &w,
                                              const fa3_range &common, int key,
                                              float (&s)[kRowTiles][kScores]) {
  if (p.softcap_log2 != 0.0f)
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int e = 0; e < kScores; ++e) s[t][e] = cap_score(p, s[t][e]);
  if (key >= common.begin && key + kStepKeys <= common.end) return;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const int query = kHeads > 1 ? 0 : divide(w.first_row + 8 * t + lane / 4, p.group);
    const fa3_range seen = fa3_visible_keys(&w.sequence.mask, query);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int k = key + 8 * (i / 2) + 2 * (lane & 3) + i % 2;
      if (k < seen.begin || k >= seen.end) s[t][i] = -INFINITY;
    }
  }
}

__device__ __forceinline__ void rescale_output(attention &a, int t, float factor) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float of_row = of_output_row(factor, r);
#pragma unroll
    for (int m = 0; m < kHeadDim / 16; ++m) {
      a.output[t][m][r] *= of_row;
      a.output[t][m][r + 2] *= of_row;
    }
  }
}

// The maxima follow scores that are beyond them, and what was summed before is rescaled; but with
// scaled values the output stays as it is, in a unit that is less over the new top.
__device__ __forceinline__ void follow_maxima(attention &a, const float (&s)[kRowTiles][kScores]) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    float top = s[t][0];
#pragma unroll
    for (int i = 1; i < kScores; ++i) top = max_nan(top, s[t][i]);
    top = max_nan(a.top[t], row_maximum(top));
    const float moved = exponent_of(a.top[t] - top), factor = exp2_unit(moved);
    a.top[t] = top;
    a.sum[t] *= factor;
    if (kScaledValues)
      a.unit[t] = max_nan(a.unit[t] + moved, FA3_NO_REFERENCE);
    else
      rescale_output(a, t, factor);
  }
}

// The output's unit follows what multiplies values, whose exponents over the tops these are: only
// in rows where these are beyond its room, so that no row's rounding depends on others.
__device__ __forceinline__ void follow_units(attention &a,
                                             const float (&exponents)[kRowTiles][kScores]) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    float most = exponents[t][0];
#pragma unroll
    for (int i = 1; i < kScores; ++i) most = max_nan(most, exponents[t][i]);
    most = row_maximum(most);
    const float before = a.unit[t];
    if (!(most <= before + kUnitRoom)) a.unit[t] = most;
    rescale_output(a, t, exp2_unit(before - a.unit[t]));
  }
}

// Scores become what multiplies the values, packed as the product takes it. `of_value`: the
// logarithms of the scales of this lane's values, of each head.
__device__ __forceinline__ void exponentiate(attention &a, const float (&s)[kRowTiles][kScores],
                                             const float (&of_value)[kHeads][kScores],
                                             uint32_t (&packed)[kRowTiles][kScores / 2]) {
  bool beyond = false;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int i = 0; i < kScores; ++i) beyond |= !(s[t][i] <= a.top[t]);
  if (__any_sync(0xffffffff, beyond)) follow_maxima(a, s);
  float factors[kRowTiles][kScores];  // or, of scaled values, their exponents
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float less = s[t][i] - a.top[t], probability = exp2_unit(exponent_of(less));
      a.sum[t] += probability;
      factors[t][i] = kScaledValues ? fmaf(less, kLog2e, of_value[t % kHeads][i]) : probability;
    }
  if (kScaledValues) {
    bool outgrown = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < kScores; ++i) outgrown |= !(factors[t][i] <= a.unit[t] + kUnitRoom);
    if (__any_sync(0xffffffff, outgrown)) follow_units(a, factors);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < kScores; ++i) factors[t][i] = exp2_unit(factors[t][i] - a.unit[t]);
  }
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < kScores / 2; ++n)
      packed[t][n] = pack_pair(factors[t][2 * n], factors[t][2 * n + 1]);
}

#endif
