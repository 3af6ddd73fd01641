// From products of queries and keys to what multiplies values, in speculative_fp8.cu.
#ifndef FA3_SPECULATIVE_SOFTMAX_CUH
#define FA3_SPECULATIVE_SOFTMAX_CUH

#include "chunk_units.cuh"
#include "speculative_block.cuh"
#include "tma.cuh"

// Products become logits, as in chunk_fp8.cu. `of_key`: the scales of the thread's two keys.
template <bool kAlike>
__device__ __forceinline__ void adjust_scores(const fa3_decode_params &p, const block_work &w,
                                              int tile, uint32_t factors, const float (&of_key)[2],
                                              consumer &c) {
  if (!kAlike) {
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
      const float2 factor = load_shared_pair(factors + own_row(i / 2) * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        c.s[i + j] = __fmul_rn(c.s[i + j], __fmul_rn(j % 2 ? factor.y : factor.x, of_key[j / 2]));
    }
    if (p.softcap_log2 != 0.0f)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) c.s[i] = cap_score(p, c.s[i]);
  }
  const int first = (w.units.begin + tile) * kUnitKeys;
  if (uniform(first >= w.common.begin && first + kUnitKeys <= w.common.end)) return;
  const int thread = thread_again() & 127, key = first + thread / 32 * 16 + (thread & 31) / 4;
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) {
    const fa3_range seen =
        fa3_visible_keys(&w.sequence.mask, divide(w.first_row + own_row(n), p.group));
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (key + 8 * r < seen.begin || key + 8 * r >= seen.end)
        c.s[n / 2 * 4 + 2 * r + n % 2] = -INFINITY;
  }
}

// What makes exponents of 2 of differences of two neighbouring rows' scores.
template <bool kAlike>
__device__ __forceinline__ float2 exponent_factors(const layout &m, int n) {
  if (!kAlike) return make_float2(kLog2e, kLog2e);
  const float2 whole = load_shared_pair(m.whole_factors + own_row(n) * 4);
  return make_float2(whole.x * kLog2e, whole.y * kLog2e);
}

// Of each row the greatest number of all the warpgroup's keys. By all of its threads.
__device__ __forceinline__ void find_greatest(const consumer &c, const layout &m, int group,
                                              float (&greatest)[kOwnRows]) {
  const int lane = thread_again() & 31, warp = thread_again() / 32 % kGroupWarps;
  const uint32_t maxima = m.maxima + group * (kGroupWarps * kRows * 4);
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) {
    float x = max_nan(c.s[n / 2 * 4 + n % 2], c.s[n / 2 * 4 + 2 + n % 2]);
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2)
      x = max_nan(x, __shfl_xor_sync(0xffffffff, x, apart));
    if (lane < 4) store_shared_float(maxima + (warp * kRows + own_row(n)) * 4, x);
  }
  named_barrier_sync(kBarrierGroup + group, 128);
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) {
    greatest[n] = load_shared_float(maxima + own_row(n) * 4);
#pragma unroll
    for (int i = 1; i < kGroupWarps; ++i)
      greatest[n] = max_nan(greatest[n], load_shared_float(maxima + (i * kRows + own_row(n)) * 4));
  }
}

__device__ __forceinline__ void rescale_output(consumer &c, const float (&factor)[kOwnRows]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) c.o[b][i] *= factor[row_of_score(i)];
}

// How far the scores of two neighbouring rows may exceed their tops.
template <bool kAlike>
__device__ __forceinline__ float2 room_of_rows(const layout &m, int n) {
  if (kAlike) return load_shared_pair(m.rooms + own_row(n) * 4);
  return make_float2(kTopRoom / kLog2e, kTopRoom / kLog2e);
}

// Whether a score of the thread exceeds its row's top by more than the room, or is NaN.
template <bool kAlike>
__device__ __forceinline__ bool exceeds_room(const consumer &c, const layout &m) {
  bool beyond = false;
#pragma unroll
  for (int i = 0; i < kRows / 2; i += 4) {
    const float2 room = room_of_rows<kAlike>(m, i / 2);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      beyond |= !(c.s[i + j] <= c.top[i / 2 + j % 2] + (j % 2 ? room.y : room.x));
  }
  return beyond;
}

// As in chunk_fp8.cu, for all rows of the warpgroup. Rows whose scores stay within their room are
// left as they are.
template <bool kAlike>
__device__ __forceinline__ void follow_maxima(const layout &m, int group, consumer &c) {
  float greatest[kOwnRows], factor[kOwnRows];
  find_greatest(c, m, group, greatest);
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) {
    factor[n] = 1.0f;
    const float2 room = room_of_rows<kAlike>(m, n / 2 * 2);
    if (greatest[n] <= c.top[n] + (n % 2 ? room.y : room.x)) continue;  // not of NaN
    const float2 exponents = exponent_factors<kAlike>(m, n / 2 * 2);
    factor[n] = raise_top<kAlike>(greatest[n], n % 2 ? exponents.y : exponents.x, c.top[n],
                                  c.unit[n], c.sum[n]);
  }
  rescale_output(c, factor);
}

__device__ __forceinline__ void follow_units(const layout &m, int group, consumer &c) {
  float greatest[kOwnRows], factor[kOwnRows];
  find_greatest(c, m, group, greatest);
#pragma unroll
  for (int n = 0; n < kOwnRows; ++n) factor[n] = follow_unit(greatest[n], c.unit[n], c.sum[n]);
  rescale_output(c, factor);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) c.s[i] *= factor[row_of_score(i)];
}

// Scores become what multiplies values. `of_value`: the scales of the thread's two values.
template <bool kAlike>
__device__ __forceinline__ void exponentiate(const layout &m, int group, const float (&of_value)[2],
                                             consumer &c) {
  if (kAlike) {
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
      const float2 factor = exponent_factors<true>(m, i / 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = i / 2 + j % 2;
        c.s[i + j] = exp2_unit(__fmul_rn(c.s[i + j] - c.top[n], j % 2 ? factor.y : factor.x));
        c.sum[n] += c.s[i + j];
      }
    }
    return;
  }
  bool outgrown = false;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int n = row_of_score(i);
    const float x = exp2_unit(fmaf(c.s[i] - c.top[n], kLog2e, -c.unit[n]));
    c.sum[n] += x;
    c.s[i] = x * of_value[i / 2 % 2];
    outgrown |= !(c.s[i] <= (c.unit[n] == kNoUnit ? 0.0f : kMostUnits));
  }
  if (named_barrier_any(kBarrierGroup + group, 128, outgrown)) follow_units(m, group, c);
}

// P^T to shared memory, a row's keys side by side.
__device__ __forceinline__ void store_probabilities(const consumer &c, uint32_t tile) {
  const int lane = thread_again() & 31, warp = thread_again() / 32 % kGroupWarps;
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    const float *const s = c.s + 4 * j;
    store_matrices<true>(
        tile + place_in_tile<kRows>(8 * (j + lane / 16) + (lane & 7), 2 * warp + lane / 8 % 2),
        pack_fp16(s[0], s[1]), pack_fp16(s[2], s[3]), pack_fp16(s[4], s[5]), pack_fp16(s[6], s[7]));
  }
  fence_proxy_async();
}

#endif
