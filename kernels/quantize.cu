// Rows become E4M3 codes and their scales, bit for bit as on the CPU (src/cpu/quantize.c), but for
// the mean, whose sum in double precision has another order. A row's threads have 16 elements of it
// each, eight neighbours of either half, and four rows; the next tile's are loaded while these are
// worked on. docs/notes/hopper-quantize.md has the figures.
//
// Compile with FA3_HEAD_DIM, the largest that a row may have.
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
enum {
  kDim = FA3_HEAD_DIM,
  kElements = FA3_QUANTIZE_ELEMENTS,
  kRows = FA3_QUANTIZE_ROWS,
  kChunk = 8, /* neighbours */
  kChunks = kElements / kChunk,
  kStride = kDim / kChunks,  /* from a thread's chunk to its next one */
  kLanes = kDim / kElements, /* threads of a row */
  kVectors = kElements * kElementBytes / 16,
  kPartBytes = FA3_QUANTIZE_STAGE_BYTES / (kRows * kVectors) /* 16 for each thread at most */
};

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

// The first element of a chunk of the thread's. Read anew, nothing that follows from it stays in
// registers from tile to tile.
__device__ __forceinline__ int first_of(int chunk) {
  return chunk * kStride + thread_again() % kLanes * kChunk;
}

// Element i of the thread's.
__device__ __forceinline__ int index_of(int i) {
  return first_of(i / kChunk) + i % kChunk;
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

// Number i of those that words hold.
__device__ __forceinline__ float pair_number_of(const uint32_t *words, int i) {
#if FA3_BF16
  return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
#else
  return number_of(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
#endif
}

__device__ __forceinline__ float number_of(const uint32_t *words, int i) {
  return kElementBytes == 4 ? __uint_as_float(words[i]) : pair_number_of(words, i);
}

// Where vector v of the thread's row r is: 16 bytes of each thread in turn.
__device__ __forceinline__ uint32_t place_of(uint32_t stage, int r, int v, int thread) {
  return stage + (r * kVectors + v) * kPartBytes + thread * 16;
}

// The same of element d of that row, which another of the row's threads may have.
__device__ __forceinline__ uint32_t place_of_element(uint32_t stage, int r, int d) {
  const int chunk = d / kStride, within = d % kStride, byte = within % kChunk * kElementBytes;
  return place_of(stage, r, chunk * kVectors / kChunks + byte / 16,
                  threadIdx.x / kLanes * kLanes + within / kChunk) +
         byte % 16;
}

// The thread's share of a tile on its way to shared memory, zeros where there is nothing. What
// can't be copied so is loaded and stored.
__device__ __forceinline__ void load_ahead(const fa3_quantize_params &p, const tile &t,
                                           uint32_t stage) {
  const int row = threadIdx.x / kLanes, row_step = blockDim.x / kLanes;
  const int64_t row_bytes = p.input.stride_row * kElementBytes;
  const char *from = (const char *)p.input.data + t.input * kElementBytes + row * row_bytes;
  if (p.vector_input) {
#pragma unroll
    for (int r = 0; r < kRows; r++, from += row_step * row_bytes)
#pragma unroll
      for (int v = 0; v < kVectors; v++) {
        const int first = index_of(v * 16 / kElementBytes);
        copy_ahead(place_of(stage, r, v, threadIdx.x), from + first * kElementBytes,
                   row + r * row_step < t.rows && first < p.head_dim);
      }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRows * kElements; i++) {
    const int r = i / kElements, d = index_of(i % kElements);
    const bool there = row + r * row_step < t.rows && d < p.head_dim;
    store_shared_bits(place_of_element(stage, r, d),
                      there ? load_bits(from + r * row_step * row_bytes + d * kElementBytes) : 0);
  }
}

// The thread's elements of its row r, as floats.
__device__ __forceinline__ void read_row(int r, uint32_t stage, float (&x)[kElements]) {
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    const uint4 raw = load_shared_vector(place_of(stage, r, v, threadIdx.x));
    const uint32_t words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 16 / kElementBytes; i++)
      x[v * 16 / kElementBytes + i] = number_of(words, i);
  }
}

__device__ __forceinline__ float read_element(int r, int d, uint32_t stage) {
  return number_of(load_shared_bits(place_of_element(stage, r, d)));
}

__device__ __forceinline__ float load_angle(const fa3_quantize_params &p, const void *data,
                                            int64_t i) {
  return p.float_tables ? ((const float *)data)[i] : number_of(((const uint16_t *)data)[i]);
}

// Two elements of a row, turned, with nothing rounded in between that the CPU does not round.
__device__ __forceinline__ void turn(float c, float s, float &first, float &second) {
  const float x = first, y = second;
  first = __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
  second = __fadd_rn(__fmul_rn(x, s), __fmul_rn(y, c));
}

// Where the angles of a row are; -1: there are none, and the row is NaN.
__device__ __forceinline__ int position_of(const fa3_quantize_params &p, const tile &t, int row) {
  const int position =
      p.positions ? p.positions[t.positions + row * p.positions_stride_row] : t.row + row;
  return position < p.table_rows ? position : -1;
}

// Four neighbouring angles' cosines or sines, as they are in the tables.
template <bool kFloats>
struct four_angles {
  uint32_t words[kFloats ? 4 : 2];
};

template <bool kFloats>
__device__ __forceinline__ four_angles<kFloats> load_four(const void *data, int64_t i) {
  if constexpr (kFloats) {
    const uint4 x = __ldg((const uint4 *)((const float *)data + i));
    return {{x.x, x.y, x.z, x.w}};
  } else {
    const uint2 x = __ldg((const uint2 *)((const uint16_t *)data + i));
    return {{x.x, x.y}};
  }
}

template <bool kFloats>
__device__ __forceinline__ float angle_of(const four_angles<kFloats> &four, int i) {
  return kFloats ? __uint_as_float(four.words[i]) : pair_number_of(four.words, i);
}

// The thread's angles of a row: of the pairs in either chunk, or of those in both.
template <bool kFloats>
struct angles {
  bool known;
  four_angles<kFloats> cos[2], sin[2];
};

__device__ __forceinline__ int first_pair(const fa3_quantize_params &p, int half) {
  return p.interleaved ? first_of(half) / 2 : first_of(0) + 4 * half;
}

template <bool kFloats>
__device__ __forceinline__ angles<kFloats> load_angles(const fa3_quantize_params &p, const tile &t,
                                                       int r) {
  const int row = (threadIdx.x + r * blockDim.x) / kLanes;
  const int position = position_of(p, t, min(row, t.rows - 1)), from = max(position, 0);
  angles<kFloats> a;
  a.known = position >= 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int pair = first_pair(p, half), at = pair < p.pairs ? pair : 0;
    a.cos[half] = load_four<kFloats>(p.cos.data, from * p.cos.stride_row + at);
    a.sin[half] = load_four<kFloats>(p.sin.data, from * p.sin.stride_row + at);
  }
  return a;
}

// Rotary embedding where both elements of every pair are the thread's.
template <bool kFloats>
__device__ __forceinline__ void turn_own(const fa3_quantize_params &p, const angles<kFloats> &a,
                                         float (&x)[kElements]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (first_pair(p, half) >= p.pairs) continue;
    float cos[4], sin[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      cos[i] = a.known ? angle_of<kFloats>(a.cos[half], i) : NAN;
      sin[i] = a.known ? angle_of<kFloats>(a.sin[half], i) : NAN;
    }
    if (p.interleaved) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        turn(cos[i], sin[i], x[half * kChunk + 2 * i], x[half * kChunk + 2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) turn(cos[i], sin[i], x[4 * half + i], x[kChunk + 4 * half + i]);
    }
  }
}

// Two rows at a time, whose angles are under way together.
template <bool kFloats>
__device__ __forceinline__ void read_own(const fa3_quantize_params &p, const tile &t, int r,
                                         uint32_t stage, float (&x)[kElements],
                                         float (&y)[kElements]) {
  const angles<kFloats> a = load_angles<kFloats>(p, t, r), b = load_angles<kFloats>(p, t, r + 1);
  read_row(r, stage, x);
  read_row(r + 1, stage, y);
  turn_own<kFloats>(p, a, x);
  turn_own<kFloats>(p, b, y);
}

// Rotary embedding of any pairs. An element's other half of a pair is in the same warp. By way of
// shared memory, as a loop can't count through registers.
__device__ __forceinline__ void read_turned(const fa3_quantize_params &p, int position, int r,
                                            uint32_t stage, float (&x)[kElements]) {
  const uint32_t turned = place_of(stage, kRows, 0, threadIdx.x);
  const int64_t cos = position * p.cos.stride_row, sin = position * p.sin.stride_row;
#pragma unroll 1
  for (int group = 0; group < kElements; group += 4) {
    float result[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int d = index_of(group + i);
      const bool second = p.interleaved ? d & 1 : d >= p.pairs;
      const int pair = p.interleaved ? d / 2 : second ? d - p.pairs : d;
      const int other = p.interleaved ? d ^ 1 : second ? d - p.pairs : d + p.pairs;
      result[i] = read_element(r, d, stage);
      if (d >= 2 * p.pairs) continue;
      float y = read_element(r, other, stage);
      const float c = position >= 0 ? load_angle(p, p.cos.data, cos + pair) : NAN;
      const float s = position >= 0 ? load_angle(p, p.sin.data, sin + pair) : NAN;
      if (second)
        turn(c, s, y, result[i]);
      else
        turn(c, s, result[i], y);
    }
    store_shared_floats(turned + group / 4 * FA3_QUANTIZE_THREADS * 16, result);
  }
#pragma unroll
  for (int group = 0; group < kElements; group += 4) {
    const float4 four = load_shared_floats(turned + group / 4 * FA3_QUANTIZE_THREADS * 16);
    x[group] = four.x, x[group + 1] = four.y, x[group + 2] = four.z, x[group + 3] = four.w;
  }
}

// The thread's elements of rows r and r + 1 of the stage, with rotary embedding.
__device__ __forceinline__ void read(const fa3_quantize_params &p, const tile &t, int r,
                                     uint32_t stage, float (&x)[kElements], float (&y)[kElements]) {
  const int row = (threadIdx.x + r * blockDim.x) / kLanes, next = row + blockDim.x / kLanes;
  if (!p.pairs || t.rows <= 0) {
    read_row(r, stage, x);
    read_row(r + 1, stage, y);
  } else if (!p.own_pairs) {
    read_turned(p, position_of(p, t, min(row, t.rows - 1)), r, stage, x);
    read_turned(p, position_of(p, t, min(next, t.rows - 1)), r + 1, stage, y);
  } else if (p.float_tables) {
    read_own<true>(p, t, r, stage, x, y);
  } else {
    read_own<false>(p, t, r, stage, x, y);
  }
}

// Of the Hadamard transform of the block of elements that d is in: the head dim's highest bit that
// d lacks is the block's size.
__device__ __forceinline__ float factor_of(int d, int head_dim) {
  if (d >= head_dim) return 0.0f;
  const int log_size = 31 - __clz(head_dim ^ d);
  const uint32_t half = (uint32_t)(127 - log_size / 2) << 23;
  return __uint_as_float(half) * (log_size % 2 ? 0x1.6a09e6p-1f : 1.0f);
}

// The random signs of the thread's elements, a bit each.
__device__ __forceinline__ uint32_t find_signs(const fa3_quantize_params &p) {
  uint32_t signs = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk++) {
    const int first = first_of(chunk);
    signs |= (uint32_t)(p.signs[first / 64] >> first % 64 & 0xff) << chunk * kChunk;
  }
  return signs;
}

// A step of the Hadamard transform on two of the thread's own elements.
__device__ __forceinline__ void add_and_subtract(float &a, float &b) {
  const float x = a, y = b;
  a = __fadd_rn(x, y);
  b = __fsub_rn(x, y);
}

// Random signs, and what makes the transform orthonormal.
template <bool kWhole>
__device__ __forceinline__ void multiply(const fa3_quantize_params &p,
                                         float (&x)[kRows][kElements]) {
  const uint32_t signs = find_signs(p);
  float factor = factor_of(0, kDim);
#pragma unroll
  for (int i = 0; i < kElements; i++) {
    if (!kWhole) factor = factor_of(index_of(i), p.head_dim);
    const float f = __uint_as_float(__float_as_uint(factor) ^ (signs << (31 - i) & 0x80000000));
#pragma unroll
    for (int r = 0; r < kRows; r++) x[r][i] = __fmul_rn(x[r][i], f);
  }
}

// The Hadamard transform of a row, in the CPU's order. Without kWhole the head dim may be less than
// kDim: a step is made where its pair of blocks is there.
template <bool kWhole>
__device__ __forceinline__ void transform(const fa3_quantize_params &p, float (&x)[kElements]) {
#pragma unroll
  for (int half = 1; half < kChunk; half *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++)
      if (!(i & half) &&
          (kWhole || first_of(i / kChunk) + (i % kChunk & -2 * half) + 2 * half <= p.head_dim))
        add_and_subtract(x[i], x[i + half]);
#pragma unroll
  for (int half = kChunk; half < kStride; half *= 2) {
    const float sign = first_of(0) & half ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      const bool there = kWhole || (first_of(i / kChunk) & -2 * half) + 2 * half <= p.head_dim;
      const float y = __shfl_xor_sync(0xffffffff, x[i], half / kChunk);
      if (there) x[i] = __fmaf_rn(x[i], sign, y); /* the sum, rounded once */
    }
  }
#pragma unroll
  for (int half = 1; half < kChunks; half *= 2)
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      const int chunk = i / kChunk;
      if (!(chunk & half) &&
          (kWhole || (first_of(chunk) & -2 * half * kStride) + 2 * half * kStride <= p.head_dim))
        add_and_subtract(x[i], x[i + half * kChunk]);
    }
}

template <bool kWhole>
__device__ __forceinline__ void rotate(const fa3_quantize_params &p, float (&x)[kRows][kElements]) {
  multiply<kWhole>(p, x);
#pragma unroll
  for (int r = 0; r < kRows; r++) transform<kWhole>(p, x[r]);
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
    wait_for_copies();
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
    wait_for_copies();
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
