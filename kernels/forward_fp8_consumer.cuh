// What the consumers of the FP8 forward kernel have in hand, and what they do in either loop
// (forward_fp8_turns.cuh, forward_fp8_heads.cuh).
#ifndef FA3_FORWARD_FP8_CONSUMER_CUH
#define FA3_FORWARD_FP8_CONSUMER_CUH

#include "forward_fp8_softmax.cuh"
#include "forward_fp8_store.cuh"
#include "wgmma_fp8.cuh"

constexpr int kPartKeys = 32;  // whose P one product takes

constexpr uint32_t kCodesHigh = wgmma_descriptor_high<kCodes>();
constexpr uint32_t kKeysHigh = wgmma_descriptor_high<kKeys>();

// Columns of its queries that a consumer keeps in registers, as far as there is room for them: a
// product that reads them from shared memory takes more of its bandwidth, and more instructions.
constexpr int kQInRegisters = !kHeadScales      ? 0
                              : kHeadDim == 64  ? 64
                              : kHeadDim == 128 ? (kWarpgroups == 3 ? 32 : 64)
                                                : 0;

// What a consumer has in hand.
struct consumer {
  int warpgroup;
  bool hands_back;  // this lane, tiles of K (forward_fp8_turns.cuh)
  uint32_t q[kQInRegisters ? kQInRegisters / 8 : 1];
  float s[kTileK / 2];     // S, then P
  uint32_t p[kTileK / 8];  // P, as the second product takes it
  softmax_rows rows;
  results out;
  float largest_sum;  // of a thread's P that references need not follow (forward_fp8_heads.cuh),
  float share;        // and how many times what the thread has summed before
  bool accumulate;    // O holds a product of this tile already
  float scale[2];     // of the scores in hand
  float value_scale;  // of the tile in hand
  float unit;         // the greatest of V's scales so far; 1 where a head has one
  uint32_t used;      // tiles of K and V taken
};

// Counted from the first consumer's.
__device__ __forceinline__ int consumer_thread(void) {
  return thread_again() - 128;
}

// The low word of the descriptor of the buffer for use `use`: one multiplication and addition.
template <int kDepth, int kBytes>
__device__ __forceinline__ uint32_t descriptor_of(const ring<kDepth, kBytes> &r, uint32_t use) {
  static_assert(kBytes % 16 == 0, "a descriptor counts in 16 bytes");
  return (r.data >> 4) + use % kDepth * (kBytes >> 4);
}

// The scores in hand, of all keys of a tile or of its first ones.
template <int kCount>
__device__ __forceinline__ float (&scores_of(consumer &c))[kCount / 2] {
  return reinterpret_cast<float(&)[kCount / 2]>(c.s);
}

// S = Q K^T, of codes, for so many keys of a tile.
template <int kCount = kTileK>
__device__ __forceinline__ void issue_scores(consumer &c, uint32_t q_at, uint32_t k_at) {
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 32) {
    const int chunk = k / kCodes, inside = k % kCodes;
    const uint32_t part = k_at + ((chunk * kTileK * kCodes + inside) >> 4);
    if (k < kQInRegisters)
      wgmma_fp8_registers<kCount>(scores_of<kCount>(c), c.q + k / 8, part, kCodesHigh, k > 0);
    else
      wgmma_fp8_shared<kCount>(scores_of<kCount>(c),
                               q_at + ((chunk * kRows * kCodes + inside) >> 4), part, kCodesHigh,
                               k > 0);
  }
  wgmma_commit();
}

// O += P V, or O = P V, of a part of the tile's keys: kPartKeys from key `k` on.
__device__ __forceinline__ void issue_output(consumer &c, uint32_t v_at, int k) {
  const int chunk = k / kKeys, inside = k % kKeys;
  wgmma_fp8_registers<kHeadDimV>(c.out.o, c.p + k / 8,
                                 v_at + ((chunk * kHeadDimV * kKeys + inside) >> 4), kKeysHigh,
                                 k > 0 || c.accumulate);
}

// Where a thread keeps its sums: four in a row, and the other threads' between them. Loads and
// stores are volatile, or the compiler would fetch them all before it uses one.
struct kept_sums {
  uint32_t in_shared;
  float *in_global;
};

__device__ __forceinline__ kept_sums sums_of(const fa3_forward_fp8_params &fp8, const layout &m,
                                             int warpgroup) {
  const int at = warpgroup * kSumBytes + (thread_again() & 127) * 16;
  if (kSharedSums) return {m.sums + at, nullptr};
  return {0, fp8.sums + blockIdx.x * (kWarpgroups * kSumBytes / 4) + at / 4};
}

// And what they are counted in: the references of its rows, and V's unit (where a head has one
// scale, that scale). Then 1, or 0 if there are none.
__device__ __forceinline__ uint32_t units_of(const layout &m) {
  return m.units + consumer_thread() * 16;
}

// A tile begins: no sums of it are kept.
__device__ __forceinline__ void forget_kept(const layout &m, float unit) {
  store_shared_pair(units_of(m) + 8, unit, 0.0f);
}

// What sums in memory are to be multiplied by, to be of the units of those in hand. False if there
// are none.
__device__ __forceinline__ bool find_kept_factor(const layout &m, const consumer &c,
                                                 float (&factor)[2]) {
  if (!uniform(load_shared_float(units_of(m) + 12) != 0.0f)) return false;
  const float4 then = load_shared_floats(units_of(m));
  const float units = kHeadScales || then.z == c.unit ? 1.0f : then.z * reciprocal_unit(c.unit);
  factor[0] = exp2_unit(then.x - c.rows.reference[0]) * units;
  factor[1] = exp2_unit(then.y - c.rows.reference[1]) * units;
  return true;
}

// What is in memory, multiplied by `factor`, joins O.
__device__ __forceinline__ void add_kept(const kept_sums &sums, int i, const float (&factor)[2],
                                         float (&o)[kHeadDimV / 2]) {
  const float4 x = kSharedSums ? load_shared_floats(sums.in_shared + i * 2048)
                               : load_global_floats(sums.in_global + i * 512);
  o[4 * i] = fmaf(x.x, factor[0], o[4 * i]);
  o[4 * i + 1] = fmaf(x.y, factor[0], o[4 * i + 1]);
  o[4 * i + 2] = fmaf(x.z, factor[1], o[4 * i + 2]);
  o[4 * i + 3] = fmaf(x.w, factor[1], o[4 * i + 3]);
}

// O moves to memory.
__device__ __forceinline__ void keep_output(const fa3_forward_fp8_params &fp8, const layout &m,
                                            consumer &c) {
  const kept_sums sums = sums_of(fp8, m, c.warpgroup);
  float factor[2];
  if (find_kept_factor(m, c, factor)) {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 8; ++i) {
      if (i % 8 == 0) __syncwarp();  // or more would be fetched at once than there is room for
      add_kept(sums, i, factor, c.out.o);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadDimV / 8; ++i) {
    if (kSharedSums)
      store_shared_floats(sums.in_shared + i * 2048, c.out.o + 4 * i);
    else
      store_global_floats(sums.in_global + i * 512, c.out.o + 4 * i);
  }
  store_shared_pair(units_of(m), c.rows.reference[0], c.rows.reference[1]);
  if (!kHeadScales) store_shared_float(units_of(m) + 8, c.unit);
  store_shared_float(units_of(m) + 12, 1.0f);
}

// A tile has seen its last product.
__device__ __forceinline__ void store_codes_tile(const fa3_forward_fp8_params &fp8, const layout &m,
                                                 uint32_t t, consumer &c) {
  const work &w = work_again(t);
  float factor[2];
  if (find_kept_factor(m, c, factor)) {
    const kept_sums sums = sums_of(fp8, m, c.warpgroup);
#pragma unroll
    for (int i = 0; i < kHeadDimV / 8; ++i) {
      if (i % 2 == 0)
        __syncwarp();  // or more would be fetched at once than there are registers for
      add_kept(sums, i, factor, c.out.o);
    }
  }
  // References are exponents of 2, and subtracted as they are: none has a rounding to be undone.
  const fa3_softmax_scale scale = {0.69314718f, 1.0f, 1.0f, -1.0f, FA3_NO_REFERENCE};
  finish_rows(fp8.forward, w, c.warpgroup, c.rows, scale, c.out, thread_again());
  const float unit = kHeadScales ? load_shared_float(units_of(m) + 8) : c.unit;
  c.out.average[0] *= unit;
  c.out.average[1] *= unit;
  if (fp8.output == FA3_OUTPUT_FP32)
    store_output_floats(fp8.forward, w, c.warpgroup, c.out, thread_again());
  else if (fp8.output == FA3_OUTPUT_BF16)
    store_output<true>(fp8.forward, m, w, c.warpgroup, c.out, thread_again());
  else
    store_output<false>(fp8.forward, m, w, c.warpgroup, c.out, thread_again());
  store_lse(fp8.forward, w, c.warpgroup, c.out, thread_again());
  finish_work(m, t);
}

// A tile whose rows see no key.
__device__ __forceinline__ void skip_tile(const layout &m, consumer &c, uint32_t t) {
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) c.out.o[i] = 0.0f;
  ring_release(ring_beside(m.q, c.warpgroup), t);
}

// Where a thread keeps the scales of its rows, that scores are multiplied by beside the keys'.
__device__ __forceinline__ uint32_t row_scales_at(const layout &m) {
  return m.row_scales + consumer_thread() * 8;
}

__device__ __forceinline__ void find_row_scales(const fa3_forward_fp8_params &fp8, const layout &m,
                                                const work &w, int warpgroup) {
  const float of_all = w.scales.score[warpgroup];
  float scales[2] = {of_all, of_all};
  if (of_all == 0.0f) {
    const float of_keys = kHeadScales ? head_scale(fp8, fp8.key_scale, w) : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const output_row row = find_row(fp8.forward, w, warpgroup, r, thread_again());
      float scale = fp8.forward.scale.log2 * of_keys;
      if (row.stored)
        scale *= scale_of(fp8.query_scale, w.batch, row.head, row.query,
                          fp8.forward.sequences.cu_seqlens_q);
      scales[r] = positive_scale(scale);
    }
  }
  store_shared_pair(row_scales_at(m), scales[0], scales[1]);
}

// Cap and mask, where they are needed. `scale` is that of the scores, before and after.
template <int kCount = kTileK>
__device__ __forceinline__ void cap_and_mask(const fa3_forward_params &params, const work &w,
                                             consumer &c, int n, float (&scale)[2]) {
  if (FA3_SOFTCAP && params.softcap_log2 != 0.0f) {
    const float inverse = reciprocal_unit(params.scale.log2);
    // In parts, each behind a question (always no) that the compiler can't answer: it would take
    // registers for all at once.
    constexpr int kPart = kTileK > 128 ? 8 : kTileK / (kHeadScales ? 16 : 8);
#pragma unroll
    for (int i = 0; i < kCount / 2; i += kPart) {
      if (thread_again() < 128) continue;
#pragma unroll
      for (int j = i; j < i + kPart; ++j) c.s[j] *= scale[j / 2 % 2] * inverse;
      cap_scores(reinterpret_cast<float(&)[kPart]>(c.s[i]), params.softcap_log2);
    }
    scale[0] = scale[1] = params.scale.log2;
  }
  const fa3_range whole = w.warpgroup[c.warpgroup].whole;
  if (n >= whole.begin && n < whole.end) return;
  fa3_range seen[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    seen[r] = fa3_visible_keys(&w.sequence.mask,
                               find_row(params, w, c.warpgroup, r, thread_again()).query);
  constexpr int kMask = kCount <= 128 ? kCount : kCount / 2;  // keys that a call can take
#pragma unroll
  for (int k = 0; k < kCount; k += kMask)
    mask_scores(reinterpret_cast<float(&)[kMask / 2]>(c.s[k / 2]), seen,
                n * kTileK + k + 2 * (thread_again() & 3));
}

#endif
