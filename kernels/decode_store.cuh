// How results of the decode kernels leave: whole, or as a part that combine.cu puts together.
#ifndef FA3_DECODE_STORE_CUH
#define FA3_DECODE_STORE_CUH

#include "codes.cuh"
#include "decode_logits.cuh"
#include "softmax.cuh"

// Two neighbouring numbers of the output, of 16 bits.
__device__ __forceinline__ uint32_t pack_output(const fa3_decode_params &p, float a, float b) {
#if FA3_E4M3
  return p.output_kind == FA3_OUTPUT_BF16 ? pack_bf16(a, b) : pack_fp16(a, b);
#else
  return pack_pair(a, b);
#endif
}

// Four columns of a row leave, `top` and `sum` being the row's.
__device__ __forceinline__ void store_result(const fa3_decode_params &p, const work &w, int row,
                                             int column, float4 x, float top, float sum) {
  const row_place place = place_of_row(p, w, row);
  float logit = top;
  if (p.sink != nullptr && w.part < 0) {
    const float sink = p.sink[place.head];
    if (sum == 0.0f) logit = -INFINITY;
    const float higher = max_nan(max_nan(logit, sink), -FLT_MAX);
    const float shift = exp2_unit(exponent_of(logit - higher));
    sum = sum * shift + exp2_unit(exponent_of(sink - higher));
    logit = higher;
    x.x *= shift, x.y *= shift, x.z *= shift, x.w *= shift;
  }
  const float factor = sum == 0.0f ? 0.0f : reciprocal_unit(sum);
  const float lse = sum == 0.0f ? -INFINITY : fmaf(log2_unit(sum), 0.69314718f, logit);
  x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
  if (w.part >= 0) {
    int64_t at = (int64_t)w.part * kRows + row;
    if (p.parts == nullptr && p.begun == nullptr)
      at = (((int64_t)w.part * p.batch + w.batch) * p.sequences.seqlen_q + place.query) *
               (int)(p.heads_k.divisor * p.group.divisor) +
           place.head;
    if (column == 0) p.partial_lse[at] = lse;
    if (column < p.head_dim_v) *(float4 *)(p.partial + at * p.head_dim_v + column) = x;
    return;
  }
  if (column == 0 && p.lse != nullptr)
    p.lse[w.sequence.query_batch * p.lse_stride_batch + place.head * p.lse_stride_head +
          (w.sequence.query_row + place.query) * p.lse_stride_row] = lse;
  if (column >= p.head_dim_v) return;
  const int64_t at = w.sequence.query_batch * p.output_stride_batch +
                     (w.sequence.query_row + place.query) * p.output_stride_row +
                     place.head * p.output_stride_head + column;
  if (p.output_kind == FA3_OUTPUT_FP32) {
    float *const to = (float *)p.output + at;
    if (((uintptr_t)to & 15) == 0)
      *(float4 *)to = x;
    else
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    return;
  }
  const uint2 packed = make_uint2(pack_output(p, x.x, x.y), pack_output(p, x.z, x.w));
  uint16_t *const to = (uint16_t *)p.output + at;
  if (((uintptr_t)to & 7) == 0) {
    *(uint2 *)to = packed;
  } else {
    to[0] = (uint16_t)packed.x, to[1] = (uint16_t)(packed.x >> 16);
    to[2] = (uint16_t)packed.y, to[3] = (uint16_t)(packed.y >> 16);
  }
}

#endif
