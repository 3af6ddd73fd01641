// Attention of few queries to a cache of E4M3 codes: decode.cu, with half the bytes to load.
//
// Codes stay codes in shared memory, and become float16, which holds each exactly, on their way to
// the products. So queries are float16 too: bfloat16's are multiplied by a power of 2 of their
// row's own, which leaves no more than float32 sums lose anyway, and codes are float16 as keys are.
// The scales of a step's keys and values come beside them, one for each row whatever they are
// shared by.
//
// Compile with -DFA3_E4M3=1, FA3_HEAD_DIM and FA3_STAGES.
#include "codes.cuh"
#include "decode_load.cuh"
#include "decode_merge.cuh"

__device__ float decode_no_scale = 1.0f;  // of operands without scales

// What a lane's queries are: rows lane / 4 + 8r, of 64 columns the 16 from 16 (lane % 4) on. A
// product of 16 columns takes four of each lane's, those of key and query alike.
struct queries {
  uint32_t x[kHeadDim / 16][4];  // or at `shared`
  uint32_t shared;
  float factor[2];  // of the rows' scores
};

__device__ __forceinline__ uint32_t address_of_query(const queries &q, int k) {
  return q.shared + (k * 32 + (threadIdx.x & 31)) * 16;
}

// The scale of a query.
__device__ __forceinline__ float scale_of_query(const fa3_decode_fp8_params &p, const work &w,
                                                const row_place &place) {
  const fa3_scales &scales = p.query_scale;
  if (scales.data == nullptr) return 1.0f;
  const int *const starts = p.decode.sequences.cu_seqlens_q;
  int64_t block = 0;
  if (scales.rows > 0) block = place.query / scales.rows;
  if (scales.rows > 0 && starts != nullptr) block += starts[w.batch] / scales.rows + w.batch;
  return scales
      .data[w.batch * scales.stride_batch +
            place.head / scales.heads_per_scale * scales.stride_head + block * scales.stride_block];
}

// A row of bfloat16 becomes float16, times a power of 2; its scores are to be multiplied by the
// inverse.
__device__ __forceinline__ float fit_row(queries &q, int r) {
  uint32_t top = 0;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
    for (int i = r; i < 4; i += 2) top = __vmaxu2(top, q.x[k][i] & 0x7fff7fff);
  top = max(top & 0xffff, top >> 16);
  top = max(top, __shfl_xor_sync(0xffffffff, top, 1));
  top = max(top, __shfl_xor_sync(0xffffffff, top, 2));
  const int exponent = max((int)(top >> 7) - 127, -100);  // 128 of what is not finite
  const float up = __int_as_float((127 + 14 - exponent) << 23);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
    for (int i = r; i < 4; i += 2)
      q.x[k][i] = pack_fp16(__int_as_float(q.x[k][i] << 16) * up,
                            __int_as_float(q.x[k][i] & 0xffff0000) * up);
  return __int_as_float((127 - 14 + exponent) << 23);
}

__device__ __forceinline__ void load_queries(const fa3_decode_fp8_params &p, const work &w,
                                             queries &q) {
  const int lane = threadIdx.x & 31;
  const bool codes = p.query == FA3_QUERY_E4M3;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const bool there = row < w.rows;
    const row_place place = place_of_row(p.decode, w, there ? row : 0);
    const fa3_decode_input &query = p.decode.query;
    const char *const from =
        query.data + ((uint64_t)w.sequence.query_batch * query.stride_batch +
                      (uint64_t)(w.sequence.query_row + place.query) * query.stride_row +
                      (uint64_t)place.head * query.stride_head) *
                         16;
#pragma unroll
    for (int c = 0; c < kHeadDim / 64; ++c) {
      const int column = 64 * c + 16 * (lane & 3);
      uint4 x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[h] = make_uint4(0, 0, 0, 0);
        if (there && column + 8 * h < p.decode.head_dim && !(codes && h == 1))
          x[h] = *(const uint4 *)(from + (codes ? column : 2 * (column + 8 * h)));
      }
      if (codes) {
        const uint4 y = x[0];
        unpack_codes(y.x, x[0].x, x[0].y);
        unpack_codes(y.y, x[0].z, x[0].w);
        unpack_codes(y.z, x[1].x, x[1].y);
        unpack_codes(y.w, x[1].z, x[1].w);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q.x[4 * c + 2 * h][r] = x[h].x;
        q.x[4 * c + 2 * h][r + 2] = x[h].y;
        q.x[4 * c + 2 * h + 1][r] = x[h].z;
        q.x[4 * c + 2 * h + 1][r + 2] = x[h].w;
      }
    }
    q.factor[r] = scale_of_query(p, w, place);
  }
  if (p.query == FA3_QUERY_BF16)
#pragma unroll
    for (int r = 0; r < 2; ++r) q.factor[r] *= fit_row(q, r);
  if (kSharedQueries)
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) store_shared_vector(address_of_query(q, k), q.x[k]);
}

// Where one scale of each step of this lane is: lanes 0 to 15 bring the keys', the others the
// values'.
struct lane_scales {
  const float *data;
  int64_t stride_batch, stride_block;
  int rows;  // of a block
};

__device__ __forceinline__ lane_scales find_scales(const fa3_decode_fp8_params &p, const work &w) {
  const fa3_scales &scales = (threadIdx.x & 16) == 0 ? p.key_scale : p.value_scale;
  if (scales.data == nullptr) return {&decode_no_scale, 0, 0, 1};
  return {scales.data + w.head / scales.heads_per_scale * scales.stride_head, scales.stride_batch,
          scales.rows > 0 ? scales.stride_block : 0, max(scales.rows, 1)};
}

// The scale of key number lane % 16 of the step at `key`, or of its value.
__device__ __forceinline__ void load_scale(const fa3_decode_fp8_params &p, const work &w,
                                           const lane_scales &s, int key, uint32_t stage) {
  place found[1];
  find_places(p.decode, w, key + (threadIdx.x & 15), 0, found);
  const place at = found[0];
  const bool there = at.page >= 0;
  const int *const starts = p.decode.sequences.cu_seqlens_k;
  int entry = there ? at.page : 0, row = there ? at.row : 0, first_block = 0;
  if (starts != nullptr) {  // packed: the sequence's blocks follow those of the ones before
    const int start = starts[w.batch];
    entry = w.batch;
    row = there ? row - start : 0;
    first_block = start / s.rows + w.batch;
  }
  const int block = first_block + (s.rows > 1 ? row / s.rows : row);
  copy_async_float(stage + kScalesAt + (threadIdx.x & 31) * 4,
                   s.data + entry * s.stride_batch + block * s.stride_block, there);
}

// S = Q K^T of 16 rows and 16 keys.
__device__ __forceinline__ void multiply_keys(float (&s)[2][4], const queries &q, uint32_t keys) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
#pragma unroll
  for (int c = 0; c < kHeadDim / 64; ++c) {
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n] = load_shared_vector(keys + tile_offset(8 * n + lane / 4, 4 * c + (lane & 3)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 query = kSharedQueries ? load_shared_vector(address_of_query(q, 4 * c + i))
                                         : make_uint4(q.x[4 * c + i][0], q.x[4 * c + i][1],
                                                      q.x[4 * c + i][2], q.x[4 * c + i][3]);
      const uint32_t rows[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t b0, b1;
        unpack_codes(i == 0 ? x[n].x : i == 1 ? x[n].y : i == 2 ? x[n].z : x[n].w, b0, b1);
        mma_16_8_16(s[n], rows, b0, b1);
      }
    }
  }
}

// O += P V of 16 rows and 16 keys. Codes are transposed in pairs of columns, of which one product
// has the even ones and another the odd: lane l's columns of 16 are the four from 4 (l % 4) on.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDim / 8][4],
                                                const uint32_t (&probabilities)[4],
                                                uint32_t values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int u = 0; u < kRowUnits; u += 2) {
    uint32_t x[4];
    load_matrices<true>(x, values + tile_offset(lane & 15, u + lane / 16));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t b0, b1;
        unpack_codes(__byte_perm(x[2 * i], x[2 * i + 1], odd ? 0x7531 : 0x6420), b0, b1);
        mma_16_8_16(o[2 * (u + i) + odd], probabilities, b0, b1);
      }
  }
}

__device__ __forceinline__ void store_columns(const attention &a, int r, float factor, float *row) {
#pragma unroll
  for (int u = 0; u < kRowUnits; ++u)
    *(float4 *)(row + 16 * u + 4 * (threadIdx.x & 3)) =
        make_float4(a.output[2 * u][2 * r] * factor, a.output[2 * u + 1][2 * r] * factor,
                    a.output[2 * u][2 * r + 1] * factor, a.output[2 * u + 1][2 * r + 1] * factor);
}

// Products become exponents of 2, or -inf where the row does not see the key.
__device__ __forceinline__ void adjust_scores(const fa3_decode_params &p, const float (&factor)[2],
                                              const fa3_range (&seen)[2], int key, uint32_t scales,
                                              float (&s)[2][4]) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 of_keys = load_shared_pair(scales + (8 * n + 2 * quad) * 4);
    const float of_key[2] = {of_keys.x, of_keys.y};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = s[n][e] * (factor[e / 2] * of_key[e & 1]);
      if (p.softcap_log2 != 0.0f)
        x = 1.0f - 2.0f * reciprocal_unit(1.0f + exp2_unit(x * p.softcap_log2));
      x *= p.scale_log2;
      const int k = key + 8 * n + 2 * quad + (e & 1);
      s[n][e] = k >= seen[e / 2].begin && k < seen[e / 2].end ? x : -INFINITY;
    }
  }
}

// The online softmax. What multiplies a value is its probability times its scale: the output is
// kept in units of the greatest of these, `unit` being its logarithm over the row's top.
__device__ __forceinline__ void exponentiate(attention &a, float (&unit)[2], float (&s)[2][4],
                                             uint32_t scales, uint32_t (&products)[4]) {
  float factor[2], of_value[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 x = load_shared_pair(scales + (kStepKeys + 8 * n + 2 * (threadIdx.x & 3)) * 4);
    of_value[n][0] = log2_unit(x.x);
    of_value[n][1] = log2_unit(x.y);
  }
  bool grown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float here = row_maximum(
        max_nan(max_nan(s[0][2 * r], s[0][2 * r + 1]), max_nan(s[1][2 * r], s[1][2 * r + 1])));
    const float top = max_nan(a.top[r], here), moved = a.top[r] - top;
    float greatest = FA3_NO_REFERENCE;
    a.top[r] = top;
    a.sum[r] *= exp2_unit(moved);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        s[n][e] -= top;
        a.sum[r] += exp2_unit(s[n][e]);
        s[n][e] += of_value[n][e & 1];
        greatest = max_nan(greatest, s[n][e]);
      }
    const float before = unit[r] + moved;
    unit[r] = max_nan(before, row_maximum(greatest));
    grown |= !(unit[r] == before);
    factor[r] = exp2_unit(before - unit[r]);
  }
  if (__any_sync(0xffffffff, grown))
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) a.output[n][e] *= factor[e / 2];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    products[i] = pack_fp16(exp2_unit(s[i / 2][2 * (i & 1)] - unit[i & 1]),
                            exp2_unit(s[i / 2][2 * (i & 1) + 1] - unit[i & 1]));
}

// This warp's keys of the block's range.
__device__ __forceinline__ void attend(const fa3_decode_fp8_params &fp8, const work &w,
                                       uint32_t ring, attention &a) {
  const fa3_decode_params &p = fp8.decode;
  const int lane = threadIdx.x & 31;
  const int units = w.units.end - w.units.begin;
  int key = w.units.begin * kUnitKeys + threadIdx.x / 32 * kStepKeys;  // of the next load

  const lane_scales scales = find_scales(fp8, w);
  queries q;
  q.shared = ring + kRingBytes;
  if (kSharedQueries) load_queries(fp8, w, q);
  fa3_range seen[2];
  float unit[2] = {FA3_NO_REFERENCE, FA3_NO_REFERENCE};
  uint32_t next = ring;  // to fill; the one behind it is next to compute with
#pragma unroll 1
  for (int i = 1 - kStages; i < units; ++i) {
    if (i >= 0) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
    }
    if (i + kStages - 1 < units) {
      load_step(p, w, key, next);
      load_scale(fp8, w, scales, key, next);
    }
    key += kUnitKeys;
    copy_async_commit();
    next = next + kStageBytes == ring + kRingBytes ? ring : next + kStageBytes;
    if (i == -1) {
      if (!kSharedQueries) load_queries(fp8, w, q);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        seen[r] =
            fa3_visible_keys(&w.sequence.mask, divide(w.first_row + lane / 4 + 8 * r, p.group));
    }
    if (i < 0) continue;

    const uint32_t stage = next;
    float s[2][4];
    uint32_t products[4];
    multiply_keys(s, q, stage);
    adjust_scores(p, q.factor, seen, key - kStages * kUnitKeys, stage + kScalesAt, s);
    exponentiate(a, unit, s, stage + kScalesAt, products);
    multiply_values(a.output, products, stage + kTileBytes);
  }
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) a.output[n][e] *= exp2_unit(unit[e / 2]);
}

extern "C" __global__ void __launch_bounds__(FA3_DECODE_THREADS, 2)
    decode_fp8(const __grid_constant__ fa3_decode_fp8_params p) {
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
  const work w = find_work(p.decode);
  if (w.rows <= 0) return;  // as all of the cluster
  begin_block(p.decode, w, base);
  if (w.rank >= w.active) return;
  attention a = no_attention();
  if (w.units.begin < w.units.end) attend(p, w, base + threadIdx.x / 32 * kWarpBytes, a);
  finish_block(p.decode, w, base, a);
}
