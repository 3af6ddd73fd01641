// Rows of 16-bit numbers that tensor cores rotate become E4M3 codes and their scales
// (quantize_rows.cuh).
//
// Compile with FA3_HEAD_DIM, which all rows have.
#include "quantize_rows.cuh"

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_rotated(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 0, true>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_turned_rotated(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 2, true>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_turned_rotated_by_floats(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 4, true>(p);
}
