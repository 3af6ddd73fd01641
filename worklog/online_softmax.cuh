// The online softmax of K2 to K6: a tile's scores become probabilities, without shortcuts.
#ifndef WORKLOG_ONLINE_SOFTMAX_CUH
#define WORKLOG_ONLINE_SOFTMAX_CUH

#include "softmax.cuh"

// References are exponents of 2 here. What was summed before is to be multiplied by `factor`.
template <int kCount>
__device__ __forceinline__ void online_softmax(float (&s)[kCount], softmax_rows &rows, float scale,
                                               float (&factor)[2]) {
  float top[2];
  thread_maxima(s, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float greatest = row_maximum(top[r]) * scale;
    factor[r] = 1.0f;
    if (!(greatest <= rows.reference[r])) {  // also for NaN
      factor[r] = exp2_unit(rows.reference[r] - greatest);
      rows.reference[r] = greatest;
    }
    rows.sum[r] *= factor[r];
  }
  softmax_exponents(s, rows.reference, scale);
  softmax_exponentials<0, kCount>(s, rows);
}

#endif
