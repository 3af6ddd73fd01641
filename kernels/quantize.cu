// Rows become E4M3 codes and their scales, bit for bit as on the CPU (src/cpu/quantize.c), but for
// the mean, whose sum in double precision has another order. A row's threads have 16 elements of it
// each, eight neighbours of either half, and four rows; the next tile's are loaded while these are
// worked on. docs/notes/hopper-quantize.md has the figures.
//
// Compile with FA3_HEAD_DIM, the largest that a row may have.
#include "cluster.cuh"
#include "codes.cuh"
#include "quantize_rotary.cuh"
#include "quantize_rotate.cuh"

// The largest finite magnitude.
__device__ __forceinline__ float largest_of(const float (&x)[kElements]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < kElements; i++) most = fmaxf(most, fabsf(x[i])); /* no NaN passes */
  if (most == INFINITY) {
    most = 0;
#pragma unroll
    for (int i = 0; i < kElements; i++)
      if (fabsf(x[i]) < INFINITY) most = fmaxf(most, fabsf(x[i]));
  }
  return most;
}

// A normal number, as on the CPU: the largest over 448, divided as below.
__device__ __forceinline__ float scale_for(float largest) {
  const float inverse = 1.0f / 448.0f, near = __fmul_rn(largest, inverse);
  return fmaxf(__fmaf_rn(__fmaf_rn(-448.0f, near, largest), inverse, near), 0x1p-126f);
}

// Division by a scale, correctly rounded: the quotient by its inverse is corrected once (Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). Where the
// correction could underflow, scale and numbers are shifted. A quotient of 0 keeps its sign.
struct divisor {
  float shift, scale, inverse;
};

__device__ __forceinline__ divisor make_divisor(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  const bool far = scale < 0x1p-60f || scale > 0x1p60f;
  divisor by;
  by.shift = far ? __uint_as_float((254 - (bits >> 23)) << 23) : 1;
  by.scale = far ? __uint_as_float((bits & 0x7fffff) | 127 << 23) : scale;
  by.inverse = __frcp_rn(by.scale);
  return by;
}

__device__ __forceinline__ float divide(float x, const divisor &by) {
  const float near = __fmul_rn(x, by.inverse);
  const float too_much = __fmaf_rn(by.scale, near, -x);
  return __fmaf_rn(-too_much, by.inverse, near);
}

// The thread's codes of a row that begins at `to`.
__device__ __forceinline__ void store_codes(const fa3_quantize_params &p, char *to,
                                            const uint32_t (&codes)[kElements / 4]) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk++) {
    const int first = first_of(chunk);
    const uint64_t eight = (uint64_t)codes[2 * chunk + 1] << 32 | codes[2 * chunk];
    if (p.vector_codes) {
      if (first < p.head_dim) *(uint64_t *)(to + first) = eight;
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < kChunk && first + i < p.head_dim; i++)
      to[first + i] = (char)(eight >> i * 8);
  }
}

struct shared {
  unsigned largest[4][FA3_QUANTIZE_TILE_ROWS];  // of each scale of a tile; bits of floats
  tile tiles[4];                                // this one, two that come, and the last
  double sums[kDim];                            // of the block's rows
  float mean[kDim];
  uint16_t slot[FA3_QUANTIZE_TILE_ROWS];  // of the tile's scales, for each of its rows
};

// Of the sequence's rows, in an order of its own: a thread's rows, a warp's threads, a block's
// warps, a cluster's blocks.
__device__ __forceinline__ void find_mean(const fa3_quantize_params &p, shared &s,
                                          double *warp_sums, int begin, int end, int step,
                                          uint32_t stage) {
  double sums[kElements];
#pragma unroll
  for (int i = 0; i < kElements; i++) sums[i] = 0;
  tile t = find_tile(p, begin);
  load_ahead(p, t, stage);
#pragma unroll 1
  for (int index = begin; index < end; index += step) {
    copy_async_wait_all();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; r += 2) {
      float x[kElements], y[kElements];
      read(p, t, r, stage, x, y);
      if (r == kRows - 2) {
        __syncwarp();
        t = find_tile(p, min(index + step, end - 1));
        if (index + step < end) load_ahead(p, t, stage);
      }
#pragma unroll
      for (int i = 0; i < kElements; i++) {
        sums[i] += (double)x[i];
        sums[i] += (double)y[i];
      }
    }
  }
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], offset);
  __syncthreads(); /* all have read what they had in the stages */
#pragma unroll
  for (int i = 0; i < kElements; i++)
    if (threadIdx.x % 32 < kLanes) warp_sums[threadIdx.x / 32 * kDim + index_of(i)] = sums[i];
  __syncthreads();
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    double sum = 0;
    for (int w = 0; w < blockDim.x / 32; w++) sum += warp_sums[w * kDim + d];
    s.sums[d] = sum;
  }
  cluster_sync();
  const int rows = fa3_find_sequence(&p.sequences, t.batch).mask.queries;
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    double sum = 0;
    for (int rank = 0; rank < step && d < p.head_dim; rank++)
      sum += cluster_load_double(cluster_map((uint32_t)__cvta_generic_to_shared(&s.sums[d]), rank));
    s.mean[d] = (float)(sum / rows);
  }
  cluster_sync();
}

// The scales of a tile, from the largest magnitudes of its rows.
__device__ __forceinline__ void write_scales(const fa3_quantize_params &p, const tile &t,
                                             const unsigned *largest, int slot_rows) {
  float *const scale = (float *)p.scale.data + t.scale;
  for (int i = threadIdx.x; i * slot_rows < t.rows; i += blockDim.x) {
    const float found = scale_for(__uint_as_float(largest[i]));
    if (p.from == FA3_QUANTIZE_OF_TILE)
      scale[i * p.scale.stride_row] = found;
    else
      atomicMax((unsigned *)scale, __float_as_uint(found)); /* in the order of the floats */
  }
}

// Of the thread's row r: bits, which are in the order of the floats; 0 where it is not there.
__device__ __forceinline__ unsigned largest_of_row(const float (&x)[kElements], int r, int rows) {
  const int row = (thread_again() + r * blockDim.x) / kLanes;
  return row < rows ? __float_as_uint(largest_of(x)) : 0;
}

// Of all of its threads.
__device__ __forceinline__ unsigned largest_of_lanes(unsigned most) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(0xffffffff, most, offset));
  return most;
}

// Raises what the scales of the thread's rows need.
__device__ __forceinline__ void raise_largest(const float (&x)[kRows][kElements], int rows,
                                              int slot_rows, bool one_scale, const uint16_t *slots,
                                              unsigned *largest) {
  const bool of_warp = slot_rows % (32 / kLanes) == 0; /* a warp's rows are neighbours */
  unsigned most = 0;
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    most = max(most, largest_of_row(x[r], r, rows));
    if (one_scale) continue;
    most = of_warp ? __reduce_max_sync(0xffffffff, most) : largest_of_lanes(most);
    const int row = (thread_again() + r * blockDim.x) / kLanes;
    if (threadIdx.x % (of_warp ? 32 : kLanes) == 0) atomicMax(&largest[slots[row]], most);
    most = 0;
  }
  if (!one_scale) return;
  most = __reduce_max_sync(0xffffffff, most);
  if (threadIdx.x % 32 == 0) atomicMax(largest, most);
}

__device__ __forceinline__ void encode(const fa3_quantize_params &p, const divisor &by, char *to,
                                       float (&x)[kElements]) {
  if (by.shift != 1)
#pragma unroll
    for (int i = 0; i < kElements; i++) x[i] = __fmul_rn(x[i], by.shift);
  uint32_t codes[kElements / 4];
#pragma unroll
  for (int i = 0; i < kElements; i += 4)
    codes[i / 4] = pack_codes(divide(x[i], by), divide(x[i + 1], by), divide(x[i + 2], by),
                              divide(x[i + 3], by));
  store_codes(p, to, codes);
}

// With a scale for each row, which its threads have among themselves.
__device__ __forceinline__ void encode_rows(const fa3_quantize_params &p, const tile &t,
                                            float (&x)[kRows][kElements]) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int row = (thread_again() + r * blockDim.x) / kLanes;
    const unsigned most = largest_of_lanes(largest_of_row(x[r], r, t.rows));
    const float scale = scale_for(__uint_as_float(most));
    if (row >= t.rows) continue;
    if (threadIdx.x % kLanes == 0)
      ((float *)p.scale.data)[t.scale + row * p.scale.stride_row] = scale;
    char *const codes = (char *)p.codes.data + t.codes + row * p.codes.stride_row;
    encode(p, make_divisor(scale), codes, x[r]);
  }
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize(const __grid_constant__ fa3_quantize_params p) {
  extern __shared__ __align__(16) unsigned char stages[];
  __shared__ shared s;
  const uint32_t stage = (uint32_t)__cvta_generic_to_shared(stages);
  const int row_step = blockDim.x / kLanes;
  int begin = blockIdx.x, end = p.batches * p.heads * p.tiles, step = gridDim.x;
  if (p.subtract_mean) {
    step = cluster_size();
    const int cluster = blockIdx.x / step;
    begin = cluster * p.tiles + cluster_rank();
    end = (cluster + 1) * p.tiles;
  }
  const bool own = p.from == FA3_QUANTIZE_OF_TILE && p.scale_rows;
  const int slot_rows = own ? min(p.scale_rows, p.tile_rows) : p.tile_rows;
  const bool one_scale = slot_rows >= p.tile_rows, row_scales = own && slot_rows == 1;
  for (int i = threadIdx.x; i < FA3_QUANTIZE_TILE_ROWS; i += blockDim.x)
    s.largest[0][i] = s.largest[1][i] = s.largest[2][i] = s.largest[3][i] = 0;
  for (int i = threadIdx.x; i < kRows * row_step; i += blockDim.x) s.slot[i] = i / slot_rows;
  wait_for_prior_grids();
  if (threadIdx.x < 3 && begin + (int)threadIdx.x * step < end)
    s.tiles[threadIdx.x] = find_tile(p, begin + threadIdx.x * step);
  if (p.subtract_mean)
    find_mean(p, s, (double *)stages, begin, end, step, stage);
  else
    __syncthreads();

  load_ahead(p, s.tiles[0], stage);
  int turn_of = 0;
#pragma unroll 1
  for (int index = begin; index < end; index += step, turn_of = (turn_of + 1) % 4) {
    float x[kRows][kElements];
    const int rows = s.tiles[turn_of].rows;
    copy_async_wait_all();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; r += 2) read(p, s.tiles[turn_of], r, stage, x[r], x[r + 1]);
    __syncwarp();
    if (index + step < end) load_ahead(p, s.tiles[(turn_of + 1) % 4], stage);
    if (p.subtract_mean)
#pragma unroll
      for (int i = 0; i < kElements; i++) {
        const float mean = s.mean[index_of(i)];
#pragma unroll
        for (int r = 0; r < kRows; r++) x[r][i] = __fsub_rn(x[r][i], mean);
      }
    if (p.rotate && p.head_dim == kDim) rotate<true>(p, x);
    if (p.rotate && p.head_dim < kDim) rotate<false>(p, x);
    if (row_scales)
      encode_rows(p, s.tiles[turn_of], x);
    else if (p.from != FA3_QUANTIZE_USE)
      raise_largest(x, rows, slot_rows, one_scale, s.slot, s.largest[turn_of]);
    /* From here on nobody reads what is of the last tile, which makes room for that after the next
     * two. A warp at a time finds where it is. */
    __syncthreads();
    const int last = (turn_of + 3) % 4;
    if (threadIdx.x == turn_of * 32 && index + 3 * step < end)
      s.tiles[last] = find_tile(p, index + 3 * step);
    const tile &now = s.tiles[turn_of];
    if (p.from != FA3_QUANTIZE_USE && !row_scales) {
      write_scales(p, now, s.largest[turn_of], slot_rows);
      for (int i = threadIdx.x; i * slot_rows < p.tile_rows; i += blockDim.x)
        s.largest[last][i] = 0;
    }
    if (p.from == FA3_QUANTIZE_FIND || row_scales) continue;
    const int row = thread_again() / kLanes;
    char *to = (char *)p.codes.data + now.codes + row * p.codes.stride_row;
    divisor by = make_divisor(1);
#pragma unroll
    for (int r = 0; r < kRows; r++, to += row_step * p.codes.stride_row) {
      if (row + r * row_step >= rows) break;
      if (p.from == FA3_QUANTIZE_OF_TILE && (r == 0 || !one_scale)) {
        const unsigned bits = s.largest[turn_of][s.slot[row + r * row_step]];
        by = make_divisor(scale_for(__uint_as_float(bits)));
      } else if (p.from == FA3_QUANTIZE_USE && r == 0) {
        by = make_divisor(((const float *)p.scale.data)[now.scale]);
      }
      encode(p, by, to, x[r]);
    }
  }
}

// Scales that several tiles raise begin as 0; those of no row stay as they are.
extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS)
    quantize_clear(const __grid_constant__ fa3_quantize_params p) {
  wait_for_prior_grids();
  const int spans = p.tiles / p.span_tiles, index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= p.batches * p.heads * spans) return;
  const int head = index % p.heads, span = index / p.heads % spans, batch = index / p.heads / spans;
  const int part = span * p.span_tiles;
  const tile t = find_tile(p, p.subtract_mean ? (batch * p.heads + head) * p.tiles + part
                                              : (batch * p.tiles + part) * p.heads + head);
  if (t.rows > 0) ((float *)p.scale.data)[t.scale] = 0;
}
