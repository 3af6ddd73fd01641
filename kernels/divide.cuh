// Division by what the host has prepared (fa3_divisor).
#ifndef FA3_DIVIDE_CUH
#define FA3_DIVIDE_CUH

#include "decode_params.h"

__device__ __forceinline__ int divide(int n, const fa3_divisor &d) {
  return (int)(((uint32_t)n + __umulhi((uint32_t)n, d.factor)) >> d.shift);
}

#endif
