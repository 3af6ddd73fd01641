// Rows become E4M3 codes and their scales, bit for bit as on the CPU (src/cpu/quantize.c), but for
// the mean, whose sum in double precision has another order. 16 neighbouring elements of a row are
// one thread's, which holds four rows; the next tile's are loaded while these are worked on.
// docs/notes/hopper-quantize.md has the figures.
#include <cuda_fp16.h>

#include "cluster.cuh"
#include "codes.cuh"
#include "quantize_params.h"
#include "registers.cuh"

#if FA3_FP32
enum { kElementBytes = 4 };
#else
enum { kElementBytes = 2 };
#endif
enum { kElements = FA3_QUANTIZE_ELEMENTS, kRows = FA3_QUANTIZE_ROWS, kMostDim = 256 };
enum { kVectors = kElements * kElementBytes / 16 };

struct tile {
  int batch, head;
  int row;  // the first, in its sequence
  int rows;
  int64_t input, codes, positions;  // offsets of the first row
  int64_t scale;
};

__device__ __forceinline__ tile find_tile(const fa3_quantize_params &p, int index) {
  tile t;
  int part;
  if (p.subtract_mean) {
    part = index % p.tiles;
    t.head = index / p.tiles % p.heads;
    t.batch = index / p.tiles / p.heads;
  } else {
    t.head = index % p.heads;
    part = index / p.heads % p.tiles;
    t.batch = index / p.heads / p.tiles;
  }
  const fa3_sequence sequence = fa3_find_sequence(&p.sequences, t.batch);
  const int span = part / p.span_tiles, before = part % p.span_tiles * p.tile_rows;
  t.row = span * p.span_rows + before;
  t.rows = min(min(p.tile_rows, p.span_rows - before), sequence.mask.queries - t.row);
  const int64_t row = sequence.query_row + (int64_t)t.row, batch = sequence.query_batch;
  t.input = batch * p.input.stride_batch + row * p.input.stride_row + t.head * p.input.stride_head;
  t.codes = batch * p.codes.stride_batch + row * p.codes.stride_row + t.head * p.codes.stride_head;
  t.positions = batch * p.positions_stride_batch + row * p.positions_stride_row;
  int64_t block = 0;
  if (p.scale_rows) {
    block = t.row / p.scale_rows;
    if (p.sequences.cu_seqlens_q) block += sequence.query_row / p.scale_rows + t.batch;
  }
  t.scale =
      t.batch * p.scale.stride_batch + t.head * p.scale.stride_head + block * p.scale.stride_row;
  return t;
}

// PTX ISA, "cp.async": 16 bytes to shared memory, or zeros.
__device__ __forceinline__ void copy_ahead(uint32_t to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// PTX ISA, "cp.async.wait_all": this thread's copies.
__device__ __forceinline__ void wait_for_copies(void) {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_bits(const char *from) {
  return kElementBytes == 4 ? *(const uint32_t *)from : *(const uint16_t *)from;
}

// PTX ISA, "st": an element.
__device__ __forceinline__ void store_shared_bits(uint32_t to, uint32_t bits) {
  if (kElementBytes == 4)
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
  else
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"((uint16_t)bits) : "memory");
}

// PTX ISA, "ld", likewise.
__device__ __forceinline__ uint32_t load_shared_bits(uint32_t from) {
  uint32_t bits;
  if (kElementBytes == 4)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
  else
    asm volatile("{\n\t.reg .b16 x;\n\tld.shared.b16 x, [%1];\n\tcvt.u32.u16 %0, x;\n\t}"
                 : "=r"(bits)
                 : "r"(from)
                 : "memory");
  return bits;
}

__device__ __forceinline__ float number_of(uint32_t bits) {
#if FA3_BF16
  return __uint_as_float(bits << 16);
#elif FA3_FP16
  return __half2float(__ushort_as_half((unsigned short)bits));
#else
  return __uint_as_float(bits);
#endif
}

// Where a byte of the thread's row r is: 16 bytes of each of its threads in turn, so that they load
// whole sectors; `stage` is the place of the thread with the row's first. What follows that is 16
// bytes further on each time, which keeps threads off each other's banks.
__device__ __forceinline__ uint32_t part(int r, int v) {
  return (r * kVectors + v) * (blockDim.x * 16 + 16);
}

__device__ __forceinline__ uint32_t place_of(const fa3_quantize_params &p, uint32_t stage, int r,
                                             int byte) {
  const int vector = byte / 16;
  return stage + part(r, vector >> p.log_lanes) + (vector & (p.lanes - 1)) * 16 + byte % 16;
}

// The thread's share of a tile on its way to shared memory, zeros where there is nothing. What
// can't be copied so is loaded and stored.
__device__ __forceinline__ void load_ahead(const fa3_quantize_params &p, const tile &t, int row,
                                           int row_step, int lane, uint32_t stage) {
  const char *from = (const char *)p.input.data + t.input * kElementBytes;
  if (p.vector_input) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int64_t at = (row + r * row_step) * p.input.stride_row * kElementBytes;
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        const int byte = (v * p.lanes + lane) * 16;
        const bool there = row + r * row_step < t.rows && byte < p.head_dim * kElementBytes;
        copy_ahead(stage + part(r, v) + lane * 16,
                   there ? from + at + byte : (const char *)p.input.data, there);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows * kElements; i++) {
    const int r = i / kElements, d = lane * kElements + i % kElements;
    const bool there = row + r * row_step < t.rows && d < p.head_dim;
    const int64_t at = (row + r * row_step) * p.input.stride_row + d;
    store_shared_bits(place_of(p, stage, r, d * kElementBytes),
                      there ? load_bits(from + at * kElementBytes) : 0);
  }
}

// 16 elements of a row, as floats.
__device__ __forceinline__ void read_row(const fa3_quantize_params &p, int r, int lane,
                                         uint32_t stage, float (&x)[kElements]) {
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    const uint4 raw = load_shared_vector(place_of(p, stage, r, (lane * kVectors + v) * 16));
    const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 16 / kElementBytes; i++)
      x[v * 16 / kElementBytes + i] = number_of(kElementBytes == 4 ? words[i]
                                                : i % 2            ? words[i / 2] >> 16
                                                                   : words[i / 2] & 0xffff);
  }
}

__device__ __forceinline__ float read_element(const fa3_quantize_params &p, int r, int d,
                                              uint32_t stage) {
  return number_of(load_shared_bits(place_of(p, stage, r, d * kElementBytes)));
}

__device__ __forceinline__ float load_angle(const fa3_quantize_params &p, const void *data,
                                            int64_t i) {
  return p.float_tables ? ((const float *)data)[i] : number_of(((const uint16_t *)data)[i]);
}

// Rotary embedding of a row of the stage, with nothing rounded in between that the CPU does not
// round. An element's other half of a pair is in the same warp. By way of shared memory, as a loop
// can't count through registers.
__device__ __forceinline__ void read_turned(const fa3_quantize_params &p, const tile &t, int r,
                                            int row, int lane, uint32_t stage,
                                            float (&x)[kElements]) {
  const uint32_t turned = stage + part(kRows, 0) + lane * 16;
  const int64_t position =
      p.positions ? p.positions[t.positions + row * p.positions_stride_row] : t.row + row;
  const bool known = position >= 0 && position < p.table_rows;
  const int64_t cos = known ? position * p.cos.stride_row : 0;
  const int64_t sin = known ? position * p.sin.stride_row : 0;
#pragma unroll 1
  for (int group = 0; group < kElements; group += 4) {
    float result[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int d = lane * kElements + group + i;
      const bool second = p.interleaved ? d & 1 : d >= p.pairs;
      const int pair = p.interleaved ? d / 2 : second ? d - p.pairs : d;
      const int other = p.interleaved ? d ^ 1 : second ? d - p.pairs : d + p.pairs;
      const float x = read_element(p, r, d, stage);
      result[i] = x;
      if (d >= 2 * p.pairs) continue;
      const float y = read_element(p, r, other, stage);
      const float c = known ? load_angle(p, p.cos.data, cos + pair) : NAN;
      const float s = known ? load_angle(p, p.sin.data, sin + pair) : NAN;
      result[i] = second ? __fadd_rn(__fmul_rn(y, s), __fmul_rn(x, c))
                         : __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
    }
    store_shared_floats(turned + group / 4 * blockDim.x * 16, result);
  }
#pragma unroll
  for (int group = 0; group < kElements; group += 4) {
    const float4 four = load_shared_floats(turned + group / 4 * blockDim.x * 16);
    x[group] = four.x, x[group + 1] = four.y, x[group + 2] = four.z, x[group + 3] = four.w;
  }
}

// A thread's place in its row. Read anew, nothing that follows from it stays in registers from tile
// to tile.
__device__ __forceinline__ int lane_again(const fa3_quantize_params &p) {
  return thread_again() & (p.lanes - 1);
}

// A row of the stage as floats, with rotary embedding.
__device__ __forceinline__ void read(const fa3_quantize_params &p, const tile &t, int r, int row,
                                     uint32_t stage, float (&x)[kElements]) {
  if (p.pairs && row < t.rows)
    read_turned(p, t, r, row, lane_again(p), stage, x);
  else
    read_row(p, r, lane_again(p), stage, x);
}

// Of the Hadamard transform of the block of elements that d is in: the head dim's highest bit that
// d lacks is the block's size.
__device__ __forceinline__ float factor_of(int d, int head_dim) {
  const int log_size = 31 - __clz(head_dim ^ d);
  const uint32_t half = (uint32_t)(127 - log_size / 2) << 23;
  return __uint_as_float(half) * (log_size % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

// The steps within a thread: 16 elements, of which `count` are there.
template <bool kAll>
__device__ __forceinline__ void transform_thread(int count, float (&x)[kRows][kElements]) {
#pragma unroll
  for (int half = 1; half < kElements; half *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++)
      if (!(i & half) && (kAll || (i & -2 * half) + 2 * half <= count))
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          const float a = x[r][i], b = x[r][i + half];
          x[r][i] = __fadd_rn(a, b);
          x[r][i + half] = __fsub_rn(a, b);
        }
}

// Random signs and the Hadamard transform, in the CPU's order.
__device__ __forceinline__ void rotate(const fa3_quantize_params &p, int first,
                                       float (&x)[kRows][kElements]) {
  const int count = p.head_dim - first;
  const uint32_t signs = (uint32_t)(p.signs[first / 64 % 4] >> first % 64);
  float factor = first < p.head_dim ? factor_of(first, p.head_dim) : 0;
#pragma unroll
  for (int i = 0; i < kElements; i++) {
    if (count < kElements && i > 0 && i < count) factor = factor_of(first + i, p.head_dim);
    const float f = __uint_as_float(__float_as_uint(factor) ^ (signs << (31 - i) & 0x80000000));
#pragma unroll
    for (int r = 0; r < kRows; r++) x[r][i] = __fmul_rn(x[r][i], f);
  }
  if (count >= kElements || count <= 0)
    transform_thread<true>(count, x);
  else
    transform_thread<false>(count, x);
#pragma unroll 1
  for (int half = kElements; 2 * half <= p.head_dim; half *= 2) {
    const bool whole = (first & -2 * half) + 2 * half <= p.head_dim;
    const float sign = first & half ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kElements; i++)
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float y = __shfl_xor_sync(0xffffffff, x[r][i], half / kElements);
        if (whole) x[r][i] = __fmaf_rn(x[r][i], sign, y); /* the sum, rounded once */
      }
  }
}

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

// A normal number, as on the CPU.
__device__ __forceinline__ float scale_for(float largest) {
  return fmaxf(__fdiv_rn(largest, 448), 0x1p-126f);
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

__device__ __forceinline__ void store_codes(const fa3_quantize_params &p, const tile &t, int row,
                                            int first, const uint32_t (&codes)[kElements / 4]) {
  if (row >= t.rows || first >= p.head_dim) return;
  char *to = (char *)p.codes.data + t.codes + row * p.codes.stride_row + first;
  if (p.vector_codes && first + kElements <= p.head_dim) {
    *(uint4 *)to = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    return;
  }
  const uint64_t low = (uint64_t)codes[1] << 32 | codes[0];
  const uint64_t high = (uint64_t)codes[3] << 32 | codes[2];
#pragma unroll 1
  for (int i = 0; i < kElements && first + i < p.head_dim; i++)
    to[i] = (char)((i < 8 ? low : high) >> i % 8 * 8);
}

struct shared {
  unsigned largest[4][FA3_QUANTIZE_TILE_ROWS];  // of each scale of a tile; bits of floats
  tile tiles[4];                                // this one, two that come, and the last
  double sums[kMostDim];                        // of the block's rows
  float mean[kMostDim];
  uint16_t slot[FA3_QUANTIZE_TILE_ROWS];  // of the tile's scales, for each of its rows
};

// Of the sequence's rows, in an order of its own: a thread's rows, a warp's threads, a block's
// warps, a cluster's blocks.
__device__ __forceinline__ void find_mean(const fa3_quantize_params &p, shared &s,
                                          double *warp_sums, int begin, int end, int step, int row,
                                          int row_step, int lane, uint32_t stage) {
  double sums[kElements];
#pragma unroll
  for (int i = 0; i < kElements; i++) sums[i] = 0;
  tile t = find_tile(p, begin);
  load_ahead(p, t, row, row_step, lane, stage);
#pragma unroll 1
  for (int index = begin; index < end; index += step) {
    float x[kRows][kElements];
    wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; r++) read(p, t, r, row + r * row_step, stage, x[r]);
    __syncwarp();
    t = find_tile(p, min(index + step, end - 1));
    if (index + step < end) load_ahead(p, t, row, row_step, lane, stage);
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int i = 0; i < kElements; i++) sums[i] += (double)x[r][i];
  }
  for (int offset = p.lanes; offset < 32; offset *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], offset);
  __syncthreads(); /* all have read what they had in the stages */
#pragma unroll
  for (int i = 0; i < kElements; i++)
    if (threadIdx.x % 32 < p.lanes)
      warp_sums[threadIdx.x / 32 * kMostDim + lane * kElements + i] = sums[i];
  __syncthreads();
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    double sum = 0;
    for (int w = 0; w < blockDim.x / 32; w++) sum += warp_sums[w * kMostDim + d];
    s.sums[d] = sum;
  }
  cluster_sync();
  const int rows = fa3_find_sequence(&p.sequences, t.batch).mask.queries;
  for (int d = threadIdx.x; d < kMostDim; d += blockDim.x) {
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

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize(const __grid_constant__ fa3_quantize_params p) {
  extern __shared__ __align__(16) unsigned char stages[];
  __shared__ shared s;
  const uint32_t stage = (uint32_t)__cvta_generic_to_shared(stages) + (threadIdx.x & -p.lanes) * 16;
  const int lane = threadIdx.x & (p.lanes - 1), first = lane * kElements;
  const int row = threadIdx.x / p.lanes, row_step = blockDim.x / p.lanes;
  int begin = blockIdx.x, end = p.batches * p.heads * p.tiles, step = gridDim.x;
  if (p.subtract_mean) {
    step = cluster_size();
    const int cluster = blockIdx.x / step;
    begin = cluster * p.tiles + cluster_rank();
    end = (cluster + 1) * p.tiles;
  }
  const bool own = p.from == FA3_QUANTIZE_OF_TILE && p.scale_rows;
  const int slot_rows = own ? min(p.scale_rows, p.tile_rows) : p.tile_rows;
  for (int i = threadIdx.x; i < FA3_QUANTIZE_TILE_ROWS; i += blockDim.x)
    s.largest[0][i] = s.largest[1][i] = s.largest[2][i] = s.largest[3][i] = 0;
  for (int i = threadIdx.x; i < kRows * row_step; i += blockDim.x) s.slot[i] = i / slot_rows;
  wait_for_prior_grids();
  if (threadIdx.x < 3 && begin + (int)threadIdx.x * step < end)
    s.tiles[threadIdx.x] = find_tile(p, begin + threadIdx.x * step);
  if (p.subtract_mean)
    find_mean(p, s, (double *)stages, begin, end, step, row, row_step, lane, stage);
  else
    __syncthreads();

  load_ahead(p, s.tiles[0], row, row_step, lane, stage);
  int turn_of = 0;
#pragma unroll 1
  for (int index = begin; index < end; index += step, turn_of = (turn_of + 1) % 4) {
    float x[kRows][kElements];
    const int rows = s.tiles[turn_of].rows;
    wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; r++) read(p, s.tiles[turn_of], r, row + r * row_step, stage, x[r]);
    __syncwarp();
    if (index + step < end) {
      const tile next = s.tiles[(turn_of + 1) % 4];
      load_ahead(p, next, row, row_step, lane, stage);
    }
    if (p.subtract_mean)
#pragma unroll
      for (int i = 0; i < kElements; i++) {
        const float mean = s.mean[first + i];
#pragma unroll
        for (int r = 0; r < kRows; r++) x[r][i] = __fsub_rn(x[r][i], mean);
      }
    if (p.rotate) rotate(p, lane_again(p) * kElements, x);

    if (p.from != FA3_QUANTIZE_USE) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float largest = largest_of(x[r]);
        for (int offset = p.lanes / 2; offset > 0; offset /= 2)
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, offset));
        if (lane == 0 && row + r * row_step < rows)
          atomicMax(&s.largest[turn_of][s.slot[row + r * row_step]], __float_as_uint(largest));
      }
    }
    /* From here on nobody reads what is of the last tile, which makes room for that after the next
     * two. A warp at a time finds where it is. */
    __syncthreads();
    const int last = (turn_of + 3) % 4;
    if (threadIdx.x == turn_of * 32 && index + 3 * step < end)
      s.tiles[last] = find_tile(p, index + 3 * step);
    const tile now = s.tiles[turn_of];
    if (p.from != FA3_QUANTIZE_USE) {
      write_scales(p, now, s.largest[turn_of], slot_rows);
      for (int i = threadIdx.x; i * slot_rows < p.tile_rows; i += blockDim.x)
        s.largest[last][i] = 0;
    }
    if (p.from != FA3_QUANTIZE_FIND) {
      divisor by = make_divisor(1);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int place = row + r * row_step;
        if (p.from == FA3_QUANTIZE_OF_TILE) {
          if (r == 0 || s.slot[place] != s.slot[place - row_step])
            by = make_divisor(scale_for(__uint_as_float(s.largest[turn_of][s.slot[place]])));
        } else if (r == 0 && rows > 0) {
          by = make_divisor(((const float *)p.scale.data)[now.scale]);
        }
        if (by.shift != 1)
#pragma unroll
          for (int i = 0; i < kElements; i++) x[r][i] = __fmul_rn(x[r][i], by.shift);
        uint32_t codes[kElements / 4];
#pragma unroll
        for (int i = 0; i < kElements; i += 4)
          codes[i / 4] = pack_codes(divide(x[r][i], by), divide(x[r][i + 1], by),
                                    divide(x[r][i + 2], by), divide(x[r][i + 3], by));
        store_codes(p, now, place, first, codes);
      }
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
