// Rows become E4M3 codes and their scales (quantize_rows.cuh).
//
// Compile with FA3_HEAD_DIM, the largest that a row may have.
#include "quantize_rows.cuh"

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 0, false>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_turned(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, kElementBytes, false>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_turned_by_floats(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 4, false>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_ANY_THREADS, 1)
    quantize_any(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<true, 0, false>(p);
}

// Scales that several tiles raise begin as 0; those of no row stay as they are.
extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS)
    quantize_clear(const __grid_constant__ fa3_quantize_params p) {
  wait_for_prior_grids();
  const int spans = p.tiles / p.span_tiles, index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= p.batches * p.heads * spans) return;
  const int head = index % p.heads, span = index / p.heads % spans, batch = index / p.heads / spans;
  const tile t = find_tile(p, {batch, span * p.span_tiles, head});
  if (t.rows > 0) *t.scale = 0;
}
