// The quantise kernel's rotary embedding.
#ifndef FA3_QUANTIZE_ROTARY_CUH
#define FA3_QUANTIZE_ROTARY_CUH

#include "quantize_tile.cuh"

// Where the angles of a row are; -1: there are none, and the row is NaN.
__device__ __forceinline__ int position_of(const fa3_quantize_params &p, const tile &t, int row) {
  const int position =
      p.positions ? p.positions[t.positions + row * p.positions_stride_row] : t.row + row;
  return position < p.table_rows ? position : -1;
}

// Where the thread begins to load its warp's rows of angles: of each row the cosines, then the
// sines.
template <int kAngleBytes, bool kProducts>
__device__ __forceinline__ load_place find_angle_place(const fa3_quantize_params &p,
                                                       uint32_t tables) {
  constexpr unsigned kVectors = kDim * kAngleBytes / 16;
  const unsigned lane = threadIdx.x % 32, v = lane % (kVectors / 2);
  const unsigned row = threadIdx.x / 32 * kWarpRows + lane / kVectors;
  const fa3_operand &table = lane % kVectors < kVectors / 2 ? p.cos : p.sin;
  const bool there = (int)v * 16 < p.pairs * kAngleBytes;
  return {(int64_t)table.data + row * table.stride_row * kAngleBytes + v * 16,
          there ? (int)row : INT32_MAX / 2, vector_at<kDim * kAngleBytes, kProducts>(tables, lane)};
}

// Their angles on their way to shared memory, of neighbouring rows of both tables alike.
template <int kAngleBytes, bool kProducts>
__device__ __forceinline__ void load_angles(const fa3_quantize_params &p, const tile &t,
                                            uint32_t place) {
  constexpr int kBytes = kDim * kAngleBytes, kVectors = kBytes / 16;
  const int64_t row_bytes = p.cos.stride_row * kAngleBytes;
  const uint4 at = load_shared_vector(place);
  const char *from = (const char *)((uint64_t)at.y << 32 | at.x) + t.row * row_bytes;
  const int rows = t.rows - (int)at.z;
#pragma unroll
  for (int n = 0; n < kWarpRows * kVectors; n += 32, from += 32 / kVectors * row_bytes)
    copy_async((at.w ^ (place_of_vector<kBytes, kProducts>(n) ^ n) * 16) + n * 16, from,
               n / kVectors < rows);
}

// The same, wherever the rows of angles are.
template <int kAngleBytes, bool kProducts>
__device__ __forceinline__ void load_tables(const fa3_quantize_params &p, const tile &t,
                                            uint32_t tables) {
  constexpr int kBytes = kDim * kAngleBytes, kVectors = kBytes / 16;
  const unsigned lane = this_thread() % 32;
#pragma unroll 1
  for (unsigned n = lane; n < kWarpRows * kVectors; n += 32) {
    const int row = warp_row() + (int)(n / kVectors), v = (int)(n % (kVectors / 2));
    const fa3_operand &table = n % kVectors < kVectors / 2 ? p.cos : p.sin;
    const bool wanted = row < t.rows && v * 16 < p.pairs * kAngleBytes;
    const int position = wanted ? position_of(p, t, row) : 0;
    const uint32_t to = vector_at<kBytes, kProducts>(tables, n);
    if (position < 0) {
      constexpr uint32_t kNan = kAngleBytes == 4 ? 0x7fffffff : 0x7fff7fff;
      const uint32_t nans[] = {kNan, kNan, kNan, kNan};
      store_shared_vector(to, nans);
    } else {
      copy_async(to, (const char *)table.data + position * table.stride_row * kAngleBytes + v * 16,
                 wanted);
    }
  }
}

// Whether angles have the input's dtype, and 16 bits. Before a rotation the arithmetic is that
// dtype's, then.
template <int kAngleBytes>
constexpr bool kOwnArithmetic = kElementBytes == 2 && kAngleBytes == 2;

__device__ __forceinline__ float2 numbers_of(uint32_t pair) {
  const uint32_t words[4] = {pair};
  return make_float2(number_in<2>(words, 0), number_in<2>(words, 1));
}

// Two elements of a row, turned, with nothing rounded in between that the CPU does not round. If
// the row is rotated next, kThenRotated, the results are rounded to the input's dtype.
template <int kAngleBytes, bool kThenRotated>
__device__ __forceinline__ void turn(float c, float s, float &first, float &second) {
  const float x = first, y = second;
  if (kThenRotated && kOwnArithmetic<kAngleBytes>) {
    const uint32_t product = multiply_pairs(pack_pair(y, x), pack_pair(-s, s));
    const float2 z = numbers_of(multiply_add_pairs(pack_pair(x, y), pack_pair(c, c), product));
    first = z.x, second = z.y;
    return;
  }
  first = __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
  second = __fadd_rn(__fmul_rn(x, s), __fmul_rn(y, c));
  if (kThenRotated && kElementBytes == 2) {
    const float2 z = numbers_of(pack_pair(first, second));
    first = z.x, second = z.y;
  }
}

// An element of which half a pair is, and which of them.
struct pair_place {
  unsigned pair;
  unsigned other;  // the pair's other element
  bool second;
};

__device__ __forceinline__ pair_place pair_of(const fa3_quantize_params &p, unsigned d) {
  if (p.interleaved) return {d / 2, d ^ 1, (d & 1) != 0};
  const bool second = d >= (unsigned)p.pairs;
  return {second ? d - p.pairs : d, second ? d - p.pairs : d + p.pairs, second};
}

// One of them, as turn makes it.
template <int kAngleBytes, bool kThenRotated>
__device__ __forceinline__ float turn_one(float c, float s, float x, float other, bool second) {
  const float sine = second ? s : -s;
  if (kThenRotated && kOwnArithmetic<kAngleBytes>) {
    const uint32_t product = multiply_pairs(pack_pair(other, 0), pack_pair(sine, 0));
    return numbers_of(multiply_add_pairs(pack_pair(x, 0), pack_pair(c, 0), product)).x;
  }
  const float y = __fadd_rn(__fmul_rn(x, c), __fmul_rn(other, sine));
  return kThenRotated && kElementBytes == 2 ? numbers_of(pack_pair(y, 0)).x : y;
}

// A row's pairs of neighbours, or of halves of a whole head: a thread has both elements of each.
template <int kAngleBytes, bool kThenRotated>
__device__ __forceinline__ void turn_own(const fa3_quantize_params &p, uint32_t tables,
                                         float (&x)[kElements]) {
  constexpr int kBytes = kDim * kAngleBytes, kNumbers = 16 / kAngleBytes;
  float cos[kNumbers], sin[kNumbers];
  if (!p.interleaved) {
    const uint32_t own = own_vector<kBytes>(tables);
#pragma unroll
    for (int i = 0; i < kChunk; i += kNumbers) {
      load_numbers<kAngleBytes>(own ^ i * kAngleBytes, cos);
      load_numbers<kAngleBytes>(own ^ (i + kHalf) * kAngleBytes, sin);
#pragma unroll
      for (int j = 0; j < kNumbers; j++)
        turn<kAngleBytes, kThenRotated>(cos[j], sin[j], x[i + j], x[kChunk + i + j]);
    }
    return;
  }
  const unsigned row = this_thread() % 32 / kLanes;
#pragma unroll
  for (int i = 0; i < kElements; i += 2 * kNumbers) {
    const int pair = (first_of(i / kChunk) + i % kChunk) / 2;
    if (pair >= p.pairs) continue;
    load_numbers<kAngleBytes>(number_place<kAngleBytes>(tables, row, pair), cos);
    load_numbers<kAngleBytes>(number_place<kAngleBytes>(tables, row, pair + kHalf), sin);
#pragma unroll
    for (int j = 0; j < kNumbers; j++)
      turn<kAngleBytes, kThenRotated>(cos[j], sin[j], x[i + 2 * j], x[i + 2 * j + 1]);
  }
}

// A row's pairs of halves of less than kDim elements: the others of a vector's elements are read
// from the stage.
template <int kAngleBytes, bool kThenRotated>
__device__ __forceinline__ void turn_parts(const fa3_quantize_params &p, uint32_t stage,
                                           uint32_t tables, float (&x)[kElements]) {
  constexpr int kNumbers = 16 / kElementBytes, kAngles = 16 / kAngleBytes;
  const unsigned row = this_thread() % 32 / kLanes;
#pragma unroll
  for (int i = 0; i < kElements; i += kNumbers) {
    const unsigned d = first_of(i / kChunk) + i % kChunk;
    if (d >= 2u * p.pairs) continue;
    const pair_place at = pair_of(p, d);
    float other[kNumbers], cos[kAngles], sin[kAngles];
    load_numbers<kElementBytes>(number_place<kElementBytes>(stage, row, at.other), other);
#pragma unroll
    for (int j = 0; j < kNumbers; j++) {
      if (j % kAngles == 0) {
        load_numbers<kAngleBytes>(number_place<kAngleBytes>(tables, row, at.pair + j), cos);
        load_numbers<kAngleBytes>(number_place<kAngleBytes>(tables, row, at.pair + j + kHalf), sin);
      }
      x[i + j] = turn_one<kAngleBytes, kThenRotated>(cos[j % kAngles], sin[j % kAngles], x[i + j],
                                                     other[j], at.second);
    }
  }
}

template <int kAngleBytes, bool kThenRotated>
__device__ __forceinline__ void turn_row(const fa3_quantize_params &p, uint32_t stage,
                                         uint32_t tables, float (&x)[kElements]) {
  if (p.interleaved || 2 * p.pairs == kDim)
    turn_own<kAngleBytes, kThenRotated>(p, tables, x);
  else
    turn_parts<kAngleBytes, kThenRotated>(p, stage, tables, x);
}

// Elements d and d + 1 of row r of the warp's, alone.
template <int kAngleBytes, bool kProducts, bool kThenRotated>
__device__ __forceinline__ void turn_two(const fa3_quantize_params &p, uint32_t stage,
                                         uint32_t tables, unsigned r, unsigned d, float (&x)[2]) {
  const pair_place at = pair_of(p, d);
  if (p.interleaved) {
    turn<kAngleBytes, kThenRotated>(number_at<kAngleBytes, kProducts>(tables, r, at.pair),
                                    number_at<kAngleBytes, kProducts>(tables, r, at.pair + kHalf),
                                    x[0], x[1]);
    return;
  }
  float other[2], cos[2], sin[2];
  load_two_numbers<kElementBytes>(number_place<kElementBytes, kProducts>(stage, r, at.other),
                                  other);
  load_two_numbers<kAngleBytes>(number_place<kAngleBytes, kProducts>(tables, r, at.pair), cos);
  load_two_numbers<kAngleBytes>(number_place<kAngleBytes, kProducts>(tables, r, at.pair + kHalf),
                                sin);
#pragma unroll
  for (int i = 0; i < 2; i++)
    x[i] = turn_one<kAngleBytes, kThenRotated>(cos[i], sin[i], x[i], other[i], at.second);
}

template <int kAngleBytes, bool kProducts>
__device__ __forceinline__ void read_two_turned(const fa3_quantize_params &p, uint32_t stage,
                                                uint32_t tables, unsigned r, unsigned d,
                                                float (&x)[2]) {
  load_two_numbers<kElementBytes>(number_place<kElementBytes, kProducts>(stage, r, d), x);
  if (d >= 2u * p.pairs) return;
  if (kProducts || p.rotate)
    turn_two<kAngleBytes, kProducts, true>(p, stage, tables, r, d, x);
  else
    turn_two<kAngleBytes, kProducts, false>(p, stage, tables, r, d, x);
}

__device__ __forceinline__ float load_angle(const fa3_quantize_params &p, const void *table,
                                            int64_t i) {
  return p.float_tables ? ((const float *)table)[i] : number_of(((const uint16_t *)table)[i]);
}

__device__ __forceinline__ float load_element(const char *row, unsigned d) {
  return kElementBytes == 4 ? ((const float *)row)[d] : number_of(((const uint16_t *)row)[d]);
}

// The warp's rows of a tile, turned, as floats in shared memory: an element at a time, of any rows
// and tables.
__device__ __forceinline__ void load_any(const fa3_quantize_params &p, const tile &t,
                                         uint32_t stage) {
#pragma unroll 1
  for (unsigned n = this_thread() % 32; n < kWarpRows * kDim; n += 32) {
    const unsigned d = n % kDim;
    const int row = warp_row() + (int)(n / kDim);
    float x = 0;
    if (row < t.rows && d < (unsigned)p.head_dim) {
      const char *const from = t.input + row * p.input.stride_row * kElementBytes;
      x = load_element(from, d);
      if (d < 2u * p.pairs) {
        const pair_place at = pair_of(p, d);
        const int64_t position = position_of(p, t, row);
        float c = NAN, s = NAN;
        if (position >= 0) {
          c = load_angle(p, p.cos.data, position * p.cos.stride_row + at.pair);
          s = load_angle(p, p.sin.data, position * p.sin.stride_row + at.pair);
        }
        const float other = load_element(from, at.other);
        if (!p.rotate)
          x = turn_one<4, false>(c, s, x, other, at.second);
        else if (p.float_tables)
          x = turn_one<4, true>(c, s, x, other, at.second);
        else
          x = turn_one<2, true>(c, s, x, other, at.second);
      }
    }
    store_shared_word(number_place<4>(stage, n / kDim, d), __float_as_uint(x));
  }
}

#endif
