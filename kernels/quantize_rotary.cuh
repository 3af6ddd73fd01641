// The quantise kernel's rotary embedding.
#ifndef FA3_QUANTIZE_ROTARY_CUH
#define FA3_QUANTIZE_ROTARY_CUH

#include "quantize_tile.cuh"

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

#endif
