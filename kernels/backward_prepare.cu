// What the backward kernel needs of each row, before it, and the sink's gradient, after it. See
// backward_params.h.
#include "backward_gradient.cuh"

constexpr float kLog2E = 1.44269504f;
constexpr int kLanes = 8;       // that share a row
constexpr int kRowsAtOnce = 4;  // of a thread: all their loads are in flight together
constexpr int kRowsApart = FA3_BACKWARD_PREPARE_THREADS / kLanes;

// Eight neighbouring elements, in pairs.
template <bool kVectors>
__device__ __forceinline__ uint4 load_eight(const uint16_t *from) {
  if (kVectors) return *(const uint4 *)from;
  return make_uint4(from[0] | from[1] << 16, from[2] | from[3] << 16, from[4] | from[5] << 16,
                    from[6] | from[7] << 16);
}

__device__ __forceinline__ float add_products(float sum, uint32_t x, uint32_t y) {
  const float2 a = unpack_pair(x), b = unpack_pair(y);
  return fmaf(a.y, b.y, fmaf(a.x, b.x, sum));
}

// Adds to the products of rows of O and dO, of which the first begin at `x` and `y`, the thread's
// share of the columns. Only the first `rows` are there.
template <bool kVectors>
__device__ __forceinline__ void add_row_products(const fa3_backward_prepare_params &p,
                                                 const uint16_t *x, const uint16_t *y, int rows,
                                                 int columns, float (&product)[kRowsAtOnce]) {
  for (int column = 0; column < columns; column += 8 * kLanes) {
    uint4 a[kRowsAtOnce], b[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int row = i * kRowsApart;
      a[i] = b[i] = make_uint4(0, 0, 0, 0);
      if (row < rows) {
        a[i] = load_eight<kVectors>(x + row * p.output_stride_row + column);
        b[i] = load_eight<kVectors>(y + row * p.grad_output_stride_row + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      product[i] = add_products(product[i], a[i].x, b[i].x);
      product[i] = add_products(product[i], a[i].y, b[i].y);
      product[i] = add_products(product[i], a[i].z, b[i].z);
      product[i] = add_products(product[i], a[i].w, b[i].w);
    }
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

// Zeros in rows of a gradient that is not added to.
__device__ __forceinline__ void clear_rows(fa3_gradient g, int batch, int first, fa3_range rows,
                                           int head) {
  g.accumulate = 0;
#pragma unroll 1
  for (int row = rows.begin + threadIdx.x / kLanes; row < rows.end; row += kRowsApart) {
#pragma unroll 1
    for (int column = threadIdx.x % kLanes * 8; column < g.head_dim; column += 8 * kLanes) {
      float zeros[8] = {};
      store_gradient(g, batch, first + row, head, column, zeros);
    }
  }
}

// Zeros in dK and dV of a tile of keys that no query sees. Each query head of the group has a share
// of the rows.
__device__ __forceinline__ void clear_unseen(const fa3_backward_prepare_params &p,
                                             const fa3_sequence &s, int tile, int query_head) {
  const int head = query_head / p.queries_per_key, share = query_head % p.queries_per_key;
  const fa3_range all = {tile * p.blocks.tile_k, (tile + 1) * p.blocks.tile_k};
  const fa3_range rows = fa3_share_of(all, share, p.queries_per_key);
  clear_rows(p.grad_key, s.key_batch, s.key_row, rows, head);
  clear_rows(p.grad_value, s.key_batch, s.key_row, rows, head);
}

// The next kernel's blocks may move in as these move out. They load what the caller has given, and
// take tiles. PTX promises that they see this grid's writes only once griddepcontrol.wait returns,
// yet the counter is clear for them: it is written and taken from by atomic operations alone, which
// the L2 cache performs, the fence returns when it has been written there, and the blocks do not
// exist before all of this grid's have come to the last line. For the rest they wait.
__device__ __forceinline__ void begin_grid(const fa3_backward_prepare_params &p) {
  wait_for_prior_grids();
  if (p.next_tile && (blockIdx.x | blockIdx.y | blockIdx.z) == 0) {
    if (threadIdx.x == 0) {
      atomicExch(p.next_tile, 0u);
      __threadfence();
    }
    __syncthreads();
  }
  let_next_grid_launch();
}

extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_PREPARE_THREADS, 4)
    backward_prepare(const __grid_constant__ fa3_backward_prepare_params p) {
  if (p.early)
    let_next_grid_launch();
  else
    begin_grid(p);
  const int block = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const fa3_sequence s = fa3_find_sequence(&p.sequences, batch);
  const int tile_q = p.blocks.tile_q, first = block * tile_q;
  const int lane = threadIdx.x % kLanes;
  const int64_t slot = (int64_t)head * p.slots + block +
                       fa3_backward_slot(&p.sequences, &p.blocks, batch, s.query_row);
  const uint16_t *output = (const uint16_t *)p.output + s.query_batch * p.output_stride_batch +
                           head * p.output_stride_head + 8 * lane;
  const uint16_t *grad_output = (const uint16_t *)p.grad_output +
                                s.query_batch * p.grad_output_stride_batch +
                                head * p.grad_output_stride_head + 8 * lane;
  const float *lse = p.lse + s.query_batch * p.lse_stride_batch + head * p.lse_stride_head;
  // So far nothing was read from memory, where lengths are known.
  if (p.early) wait_for_prior_grids();

  if ((block | head | batch) == 0)
    for (int i = threadIdx.x; i < p.arrival_words; i += FA3_BACKWARD_PREPARE_THREADS)
      p.arrivals[i] = 0;
  if (block >= p.blocks.blocks_q && block < p.blocks.blocks_q + p.unseen)
    clear_unseen(p, s, block - p.blocks.blocks_q, head);
  if (block >= p.blocks.blocks_q || first >= s.mask.queries) return;
  static_assert(2 * FA3_MOST_SUMS <= FA3_BACKWARD_PREPARE_THREADS, "a thread clears each counter");
  if (threadIdx.x < 2 * p.sums) p.counters[(int64_t)threadIdx.x * gridDim.y * p.slots + slot] = 0;

  const int left = s.mask.queries - first;  // rows of the block that are in use
  float of_sink = 0.0f;
  bool large = false;
  float *statistics = p.rows + slot * FA3_BACKWARD_STATISTICS(tile_q);
  for (int begin = threadIdx.x / kLanes; begin < tile_q; begin += kRowsAtOnce * kRowsApart) {
    float log_sum[kRowsAtOnce], product[kRowsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int in_tile = begin + i * kRowsApart;
      log_sum[i] = -INFINITY;
      if (lane == 0 && in_tile < tile_q && in_tile < left)
        log_sum[i] = lse[(s.query_row + first + in_tile) * p.lse_stride_row];
    }
    const int64_t row = s.query_row + first + begin;
    const uint16_t *x = output + row * p.output_stride_row,
                   *y = grad_output + row * p.grad_output_stride_row;
    const int rows = (tile_q < left ? tile_q : left) - begin, columns = p.head_dim_v - 8 * lane;
    // Apart, for a load that may take two forms is waited for before the next.
    if (p.vectors)
      add_row_products<true>(p, x, y, rows, columns, product);
    else
      add_row_products<false>(p, x, y, rows, columns, product);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
        product[i] += __shfl_xor_sync(0xffffffff, product[i], lanes);
      const int in_tile = begin + i * kRowsApart, row = s.query_row + first + in_tile;
      if (in_tile >= tile_q) continue;
      if (lane != 0) continue;
      if (in_tile < left && p.grad_lse)
        product[i] -= p.grad_lse[s.query_batch * p.grad_lse_stride_batch +
                                 row * p.grad_lse_stride_row + head * p.grad_lse_stride_head];
      statistics[in_tile] = log_sum[i] == -INFINITY ? INFINITY : log_sum[i] * kLog2E;
      statistics[tile_q + in_tile] = product[i];
      if (log_sum[i] == -INFINITY) continue;
      large |= fabsf(log_sum[i]) > FA3_LARGE_LSE;
      if (p.sink) of_sink -= exp2_unit((p.sink[head] - log_sum[i]) * kLog2E) * product[i];
    }
  }
  large = __syncthreads_or(large);
  if (threadIdx.x < 8) statistics[2 * tile_q + threadIdx.x] = large;
  for (int in_tile = threadIdx.x; large && in_tile < tile_q && in_tile < left;
       in_tile += FA3_BACKWARD_PREPARE_THREADS) {
    const float log_sum = lse[(s.query_row + first + in_tile) * p.lse_stride_row];
    statistics[in_tile] = log_sum == -INFINITY ? INFINITY : log_sum;
  }
  const fa3_range tiles = fa3_visible_tiles(&s.mask, first, first + tile_q, p.blocks.tile_k);
  if (tiles.begin >= tiles.end && !p.grad_query.accumulate)
    clear_rows(p.grad_query, s.query_batch, s.query_row + first, {0, tile_q < left ? tile_q : left},
               head);
  if (p.sink) {
    of_sink = sum_of_block<FA3_BACKWARD_PREPARE_THREADS>(of_sink);
    if (threadIdx.x == 0) p.sinks[slot] = of_sink;
  }
}

// Adds up one gradient of a key, eight columns a thread.
__device__ __forceinline__ void sum_parts(const fa3_gradient &parts, int count,
                                          const fa3_gradient &g, int batch, int64_t row, int head,
                                          int column) {
  const float *from = (const float *)parts.data + batch * parts.stride_batch +
                      row * parts.stride_row + head * count * parts.stride_head + column;
  float x[8] = {};
#pragma unroll 4
  for (int part = 0; part < count; ++part, from += parts.stride_head) {
    const float4 low = ((const float4 *)from)[0], high = ((const float4 *)from)[1];
    x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
    x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
  }
  store_gradient(g, batch, row, head, column, x);
}

// dK and dV, from the sums of each part.
extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_SUM_THREADS)
    backward_sum(const __grid_constant__ fa3_backward_sum_params p) {
  wait_for_prior_grids();
  let_next_grid_launch();
  const int head = blockIdx.y, batch = blockIdx.z;
  const fa3_sequence s = fa3_find_sequence(&p.sequences, batch);
  const int of_row = (p.grad_key.head_dim + p.grad_value.head_dim) / 8;
  const int64_t item = (int64_t)blockIdx.x * FA3_BACKWARD_SUM_THREADS + threadIdx.x;
  const int row = p.first + (int)(item / of_row), column = (int)(item % of_row) * 8;
  if (row >= s.mask.keys) return;
  if (column < p.grad_key.head_dim)
    sum_parts(p.part_key, p.parts, p.grad_key, s.key_batch, s.key_row + row, head, column);
  else
    sum_parts(p.part_value, p.parts, p.grad_value, s.key_batch, s.key_row + row, head,
              column - p.grad_key.head_dim);
}

extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_SINK_THREADS)
    backward_sink(const __grid_constant__ fa3_backward_sink_params p) {
  const int head = blockIdx.x;
  float sum = 0.0f;
  for (int batch = 0; batch < p.batches; ++batch) {
    const fa3_sequence s = fa3_find_sequence(&p.sequences, batch);
    const int slot = fa3_backward_slot(&p.sequences, &p.blocks, batch, s.query_row);
    const int blocks = (s.mask.queries + p.blocks.tile_q - 1) / p.blocks.tile_q;
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
