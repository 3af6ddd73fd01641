// How the FP8 forward kernel's output leaves: in 16 bits as forward_store.cuh has it, or as
// float32.
#ifndef FA3_FORWARD_FP8_STORE_CUH
#define FA3_FORWARD_FP8_STORE_CUH

#include "forward_fp8_work.cuh"
#include "forward_store.cuh"

// O leaves as float32, from the registers.
__device__ __forceinline__ void store_output_floats(const fa3_forward_params &params, const work &w,
                                                    int warpgroup, const results &x, int thread) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const output_row row = find_row(params, w, warpgroup, r, thread);
    float *to = (float *)params.output_data + w.sequence.query_batch * params.output_stride_batch +
                (w.sequence.query_row + row.query) * params.output_stride_row +
                row.head * params.output_stride_head + 2 * (thread & 3);
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; ++j)
      if (row.stored && 8 * j < params.head_dim_v)
        *(float2 *)(to + 8 * j) =
            make_float2(x.o[4 * j + 2 * r] * x.average[r], x.o[4 * j + 2 * r + 1] * x.average[r]);
  }
}

#endif
