// The scales of codes in the kernels for caches of them.
#ifndef FA3_DECODE_SCALES_CUH
#define FA3_DECODE_SCALES_CUH

#include "decode_load.cuh"

__device__ float decode_no_scale = 1.0f;  // of operands without scales

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

// Where one scale of each load of this lane is: lanes 0 to 15 bring the keys', the others the
// values'.
struct lane_scales {
  const float *data;
  int64_t stride_page, stride_block;
  int64_t next_head;  // from a head's to the next one's
  fa3_divisor rows;   // of a block
  int first_row;      // of the first block
};

__device__ __forceinline__ lane_scales find_scales(const fa3_decode_fp8_params &p, const work &w) {
  const bool key = (threadIdx.x & 16) == 0;
  const fa3_scales &scales = key ? p.key_scale : p.value_scale;
  lane_scales found = {&decode_no_scale, 0, 0, 0, key ? p.key_scale_rows : p.value_scale_rows, 0};
  if (scales.data == nullptr) return found;
  const int head = w.head * kHeads, scale = head / scales.heads_per_scale;
  found.data = scales.data + scale * scales.stride_head;
  if (kHeads > 1)
    found.next_head = ((head + 1) / scales.heads_per_scale - scale) * scales.stride_head;
  found.stride_page = scales.stride_batch;
  if (scales.rows > 0) found.stride_block = scales.stride_block;
  const int *const starts = p.decode.sequences.cu_seqlens_k;
  if (starts != nullptr) {  // packed: the sequence's blocks follow those of the ones before
    found.first_row = starts[w.batch];
    const int block = divide(found.first_row, found.rows) + w.batch;
    found.data += w.batch * found.stride_page + block * found.stride_block;
    found.stride_page = 0;
  }
  return found;
}

// The scale of key number lane % 16 of a load, or of its value, of each head: to place `number`.
__device__ __forceinline__ void load_scale(const lane_scales &s, const place &at, uint32_t stage,
                                           int number) {
  const bool there = at.page >= 0;
  const int page = there ? at.page : 0, row = there ? at.row - s.first_row : 0;
  const float *const from = s.data + page * s.stride_page + divide(row, s.rows) * s.stride_block;
#pragma unroll
  for (int n = 0; n < kHeads; ++n)
    copy_async_float(stage + kScalesAt + n * kScaleBytes + number * 4, from + n * s.next_head,
                     there);
}

#endif
