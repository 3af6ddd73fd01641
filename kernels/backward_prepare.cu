// What the backward kernel needs of each row, before it, and the sink's gradient, after it. See
// backward_params.h.
#include "backward_gradient.cuh"

constexpr float kLog2E = 1.44269504f;
constexpr int kLanes = 8;                            // that share a row
constexpr int kPart = FA3_BACKWARD_PREPARE_COLUMNS;  // of a row, eight columns a lane
constexpr int kRowsAtOnce = 2;  // of a thread: all their loads are in flight together
constexpr int kRowsApart = FA3_BACKWARD_PREPARE_THREADS / kLanes;
static_assert(kPart == 8 * kLanes, "a vector a lane");
static_assert(FA3_BACKWARD_MOST_QUERIES <= FA3_BACKWARD_PREPARE_THREADS, "a thread for each row");

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

// The rows of O or of dO that a thread reads, from its first column on.
struct rows_read {
  const uint16_t *first;
  int64_t apart;  // from one of the rows to the next, in elements
};

// Adds the thread's share of the columns to the products of rows of O and dO. Only the first `rows`
// are there. kParts of their columns are read at once.
template <bool kVectors, int kParts>
__device__ __forceinline__ void add_row_products(const rows_read &x, const rows_read &y, int rows,
                                                 int columns, float (&product)[kRowsAtOnce]) {
#pragma unroll 1
  for (int column = 0; column < columns; column += kParts * kPart) {
    uint4 a[kRowsAtOnce][kParts], b[kRowsAtOnce][kParts];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int at = column + part * kPart;
        a[i][part] = b[i][part] = make_uint4(0, 0, 0, 0);
        if (i * kRowsApart < rows && (part == 0 || at < columns)) {
          a[i][part] = load_eight<kVectors>(x.first + i * x.apart + at);
          b[i][part] = load_eight<kVectors>(y.first + i * y.apart + at);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        product[i] = add_products(product[i], a[i][part].x, b[i][part].x);
        product[i] = add_products(product[i], a[i][part].y, b[i][part].y);
        product[i] = add_products(product[i], a[i][part].z, b[i][part].z);
        product[i] = add_products(product[i], a[i][part].w, b[i][part].w);
      }
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
__device__ __forceinline__ void let_backward_launch(const fa3_backward_prepare_params &p) {
  if (p.next_tile && (blockIdx.x | blockIdx.y | blockIdx.z) == 0) {
    if (threadIdx.x == 0) {
      atomicExch(p.next_tile, 0u);
      __threadfence();
    }
    __syncthreads();
  }
  let_next_grid_launch();
}

// A block of rows, or zeros for a tile of keys that no query sees. It is to have few instructions:
// a multiprocessor would take longer to issue more of them than memory takes for the loads.
template <int kParts>
__device__ __forceinline__ void prepare(const fa3_backward_prepare_params &p) {
  if (p.early) let_next_grid_launch();
  if (!p.lengths_known) wait_for_prior_grids();
  // The last heads first: dO of the first ones, which the backward kernel begins with, is in the L2
  // cache then.
  const int block = gridDim.x - 1 - blockIdx.x, head = gridDim.y - 1 - blockIdx.y;
  const int batch = gridDim.z - 1 - blockIdx.z;
  const fa3_sequence s = fa3_find_sequence(&p.sequences, batch);
  const int tile_q = p.blocks.tile_q, first = block * tile_q;
  const int lane = threadIdx.x % kLanes, in_tile = threadIdx.x / kLanes;
  const int64_t slot = (int64_t)head * p.slots + block +
                       fa3_backward_slot(&p.sequences, &p.blocks, batch, s.query_row);
  const int64_t first_row = s.query_row + first;
  rows_read x = {(const uint16_t *)p.output + s.query_batch * p.output_stride_batch +
                     (first_row + in_tile) * p.output_stride_row + head * p.output_stride_head +
                     8 * lane,
                 kRowsApart * p.output_stride_row};
  rows_read y = {(const uint16_t *)p.grad_output + s.query_batch * p.grad_output_stride_batch +
                     (first_row + in_tile) * p.grad_output_stride_row +
                     head * p.grad_output_stride_head + 8 * lane,
                 kRowsApart * p.grad_output_stride_row};
  const int64_t row = first_row + threadIdx.x;  // the thread's own, once their products are known
  const float *lse = p.lse + s.query_batch * p.lse_stride_batch + row * p.lse_stride_row +
                     head * p.lse_stride_head;
  // So far nothing was read that a kernel before may write.
  if (p.lengths_known) wait_for_prior_grids();
  if (!p.early) let_backward_launch(p);

  if ((block | head | batch) == 0)
    for (int i = threadIdx.x; i < p.arrival_words; i += FA3_BACKWARD_PREPARE_THREADS)
      p.arrivals[i] = 0;
  if (block >= p.blocks.blocks_q && block < p.blocks.blocks_q + p.unseen)
    clear_unseen(p, s, block - p.blocks.blocks_q, head);
  if (block >= p.blocks.blocks_q || first >= s.mask.queries) return;
  static_assert(2 * FA3_MOST_SUMS <= FA3_BACKWARD_PREPARE_THREADS, "a thread clears each counter");
  if (threadIdx.x < 2 * p.sums) p.counters[(int64_t)threadIdx.x * gridDim.y * p.slots + slot] = 0;

  const int left = s.mask.queries - first;
  const int rows = tile_q < left ? tile_q : left;  // of the block that are in use
  const bool has_row = threadIdx.x < rows;
  float log_sum = -INFINITY, grad_lse = 0.0f;
  if (has_row) {
    log_sum = *lse;
    if (p.grad_lse)
      grad_lse = p.grad_lse[s.query_batch * p.grad_lse_stride_batch + row * p.grad_lse_stride_row +
                            head * p.grad_lse_stride_head];
  }
  __shared__ float products[FA3_BACKWARD_MOST_QUERIES];
#pragma unroll 1
  for (int begin = in_tile; begin - in_tile < rows; begin += kRowsAtOnce * kRowsApart) {
    float product[kRowsAtOnce] = {};
    const int columns = p.head_dim_v - 8 * lane;
    // Apart, for a load that may take two forms is waited for before the next.
    if (p.vectors)
      add_row_products<true, kParts>(x, y, rows - begin, columns, product);
    else
      add_row_products<false, kParts>(x, y, rows - begin, columns, product);
    x.first += kRowsAtOnce * x.apart, y.first += kRowsAtOnce * y.apart;
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
#pragma unroll
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2)
        product[i] += __shfl_xor_sync(0xffffffff, product[i], lanes);
      if (lane == 0 && begin + i * kRowsApart < rows) products[begin + i * kRowsApart] = product[i];
    }
  }
  const bool takes_part = log_sum != -INFINITY;
  const bool large = __syncthreads_or(takes_part && fabsf(log_sum) > FA3_LARGE_LSE);

  float *statistics = p.rows + slot * FA3_BACKWARD_STATISTICS(tile_q);
  const float d = has_row ? products[threadIdx.x] - grad_lse : 0.0f;
  if (threadIdx.x < tile_q) {
    statistics[threadIdx.x] = !takes_part ? INFINITY : large ? log_sum : log_sum * kLog2E;
    statistics[tile_q + threadIdx.x] = d;
  }
  if (threadIdx.x < 8) statistics[2 * tile_q + threadIdx.x] = large;
  const fa3_range tiles = fa3_visible_tiles(&s.mask, first, first + tile_q, p.blocks.tile_k);
  if (tiles.begin >= tiles.end && !p.grad_query.accumulate)
    clear_rows(p.grad_query, s.query_batch, s.query_row + first, {0, rows}, head);
  if (p.sink) {
    const float of_row = takes_part ? -exp2_unit((p.sink[head] - log_sum) * kLog2E) * d : 0.0f;
    const float of_block = sum_of_block<FA3_BACKWARD_PREPARE_THREADS>(of_row);
    if (threadIdx.x == 0) p.sinks[slot] = of_block;
  }
}

// Where rows of O have up to FA3_BACKWARD_PREPARE_COLUMNS.
extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_PREPARE_THREADS, 6)
    backward_prepare(const __grid_constant__ fa3_backward_prepare_params p) {
  prepare<1>(p);
}

// Where they have more.
extern "C" __global__ void __launch_bounds__(FA3_BACKWARD_PREPARE_THREADS, 4)
    backward_prepare_long(const __grid_constant__ fa3_backward_prepare_params p) {
  prepare<2>(p);
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
