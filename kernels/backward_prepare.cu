// What the backward kernel needs of each row, before it, and the sink's gradient, after it. See
// backward_params.h.
#include "backward_sequence.cuh"

constexpr float kLog2E = 1.44269504f;
constexpr int kLanes = 8;  // that share a row

// Eight neighbouring elements as floats.
__device__ __forceinline__ void load_eight(const uint16_t *from, int vectors, float (&x)[8]) {
  uint32_t pairs[4];
  if (vectors) {
    const uint4 v = *(const uint4 *)from;
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = from[2 * i] | from[2 * i + 1] << 16;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack_pair(pairs[i]);
    x[2 * i] = f.x, x[2 * i + 1] = f.y;
  }
}

// The sum of all threads' values, in a fixed order, in thread 0.
template <int kThreads>
__device__ __forceinline__ float sum_of_block(float x) {
  __shared__ float of_warp[kThreads / 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) x += of_warp[i];
  return x;
}

extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_PREPARE_THREADS)
    backward_prepare(const __grid_constant__ fa3_backward_prepare_params p) {
  // The next kernel's blocks may move in as these move out; it waits for their results by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int block = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  if ((block | head | batch) == 0 && threadIdx.x == 0) *p.next_tile = 0;
  const sequence s = find_sequence(p.sequences, batch);
  const int tile_m = p.sequences.tile_m, first = block * tile_m;
  if (first >= s.mask.queries) return;
  const int64_t slot = (int64_t)head * p.slots + s.slot + block;
  const fa3_range tiles = fa3_visible_tiles(&s.mask, first, first + tile_m, p.sequences.tile_n);
  const bool seen = tiles.begin < tiles.end;
  if (threadIdx.x == 0) p.counters[slot] = 0;

  const int lane = threadIdx.x % kLanes;
  float of_sink = 0.0f;
  for (int in_tile = threadIdx.x / kLanes; in_tile < tile_m;
       in_tile += FA3_BACKWARD_PREPARE_THREADS / kLanes) {
    const int row = s.query_row + first + in_tile;
    const bool in_use = first + in_tile < s.mask.queries;
    float product = 0.0f;
    if (in_use) {
      const uint16_t *o = (const uint16_t *)p.output + s.query_batch * p.output_stride_batch +
                          row * p.output_stride_row + head * p.output_stride_head;
      const uint16_t *grad = (const uint16_t *)p.grad_output +
                             s.query_batch * p.grad_output_stride_batch +
                             row * p.grad_output_stride_row + head * p.grad_output_stride_head;
#pragma unroll 4
      for (int column = 8 * lane; column < p.head_dim_v; column += 8 * kLanes) {
        float x[8], y[8];
        load_eight(o + column, p.vectors, x);
        load_eight(grad + column, p.vectors, y);
#pragma unroll
        for (int i = 0; i < 8; ++i) product = fmaf(x[i], y[i], product);
      }
      if (!seen && !p.grad_query.accumulate) {
        float zeros[8] = {};
        for (int column = 8 * lane; column < p.grad_query.head_dim; column += 8 * kLanes)
          store_gradient(p.grad_query, s.query_batch, row, head, column, zeros);
      }
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
      product += __shfl_xor_sync(0xffffffff, product, lanes);
    if (lane != 0) continue;
    float lse = -INFINITY;
    if (in_use) {
      lse = p.lse[s.query_batch * p.lse_stride_batch + row * p.lse_stride_row +
                  head * p.lse_stride_head];
      if (p.grad_lse)
        product -= p.grad_lse[s.query_batch * p.grad_lse_stride_batch +
                              row * p.grad_lse_stride_row + head * p.grad_lse_stride_head];
    }
    float *to = p.rows + slot * 2 * tile_m + in_tile;
    to[0] = lse == -INFINITY ? INFINITY : lse * kLog2E;
    to[tile_m] = product;
    if (p.sink && lse != -INFINITY) of_sink -= exp2_unit((p.sink[head] - lse) * kLog2E) * product;
  }
  if (p.sink) {
    of_sink = sum_of_block<FA3_BACKWARD_PREPARE_THREADS>(of_sink);
    if (threadIdx.x == 0) p.sinks[slot] = of_sink;
  }
}

extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_SINK_THREADS)
    backward_sink(const __grid_constant__ fa3_backward_sink_params p) {
  const int head = blockIdx.x;
  float sum = 0.0f;
  for (int batch = 0; batch < p.batches; ++batch) {
    const int row = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
    const int queries = p.used_q         ? p.used_q[batch]
                        : p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - row
                                         : p.seqlen_q;
    const int slot = p.cu_seqlens_q ? row / p.tile_m + batch : batch * p.blocks_q;
    const int blocks = (queries + p.tile_m - 1) / p.tile_m;
    for (int block = threadIdx.x; block < blocks; block += FA3_BACKWARD_SINK_THREADS)
      sum += p.sinks[(int64_t)head * p.slots + slot + block];
  }
  sum = sum_of_block<FA3_BACKWARD_SINK_THREADS>(sum);
  if (threadIdx.x != 0) return;
  const int64_t at = head * p.stride;
  float *whole = (float *)p.grad_sink + at;
  __half *half = (__half *)p.grad_sink + at;
  __nv_bfloat16 *brain = (__nv_bfloat16 *)p.grad_sink + at;
  if (p.accumulate)
    sum += p.kind == 0 ? *whole : p.kind == 1 ? __half2float(*half) : __bfloat162float(*brain);
  if (p.kind == 0)
    *whole = sum;
  else if (p.kind == 1)
    *half = __float2half_rn(sum);
  else
    *brain = __float2bfloat16_rn(sum);
}
