// The quantise kernel's rotary embedding before a rotation by tensor cores, of the words of its
// first operand (quantize_products.cuh). A lane has both elements of each pair of neighbours, or of
// halves of a whole head. With tables of floats the results are floats, which pack_pair rounds.
#ifndef FA3_QUANTIZE_ROTARY_WORDS_CUH
#define FA3_QUANTIZE_ROTARY_WORDS_CUH

#include "quantize_products.cuh"
#include "quantize_rotary.cuh"

// Where a lane's words of vector v are: its row among the warp's, and the first of eight elements.
struct word_place {
  unsigned row, first;
};

__device__ __forceinline__ word_place place_of_words(unsigned lane, int v) {
  const unsigned g = lane / 4, t = lane % 4, vector = t + v / 2 * 4;
  if (kDim == 64) return {g + v % 2 * 8, vector * 8};
  const unsigned quarter = (unsigned)quarter_of((int)lane);
  return {lane / kLanes, quarter * kSegment + v % 2 * kHalf + vector * 8};
}

// The words of neighbouring angles: kWords of them are read at once.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t from, uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
    const uint4 x = load_shared_vector(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else {
    const float2 x = load_shared_pair(from);
    words[0] = __float_as_uint(x.x), words[1] = __float_as_uint(x.y);
  }
}

// Of floats: the angles of words n and n + 1 of a vector whose first cosine is at `from`.
__device__ __forceinline__ void load_float_angles(uint32_t from, int n, float (&cos)[4],
                                                  float (&sin)[4]) {
  load_numbers<4>(from ^ n * 8, cos);
  load_numbers<4>(from ^ (2 * n + kHalf) * 4, sin);
}

// One word of each half.
__device__ __forceinline__ void turn_word_pair(uint32_t c, uint32_t s, uint32_t &first,
                                               uint32_t &second) {
  const uint32_t x = first, y = second;
  first = multiply_add_pairs(x, c, negate_pair(multiply_pairs(y, s)));
  second = multiply_add_pairs(y, c, multiply_pairs(x, s));
}

// Pairs of halves of a whole head. `angles` is where the lane's first vector of cosines is.
template <int kAngleBytes>
__device__ __forceinline__ void turn_halves(uint32_t angles, uint32_t (&words)[4][4]) {
#pragma unroll
  for (int v = 0; v < 2; v++) {
    uint32_t(&first)[4] = words[kDim == 64 ? v : 2 * v];
    uint32_t(&second)[4] = words[kDim == 64 ? v + 2 : 2 * v + 1];
    const uint32_t from =
        kDim == 64 ? angles + v * 8 * kDim * kAngleBytes : angles ^ v * 32 * kAngleBytes;
    if constexpr (kAngleBytes == 2) {
      uint32_t cos[4], sin[4];
      load_words<4>(from, cos);
      load_words<4>(from ^ kHalf * 2, sin);
#pragma unroll
      for (int n = 0; n < 4; n++) turn_word_pair(cos[n], sin[n], first[n], second[n]);
    } else {
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        float cos[4], sin[4];
        load_float_angles(from, n, cos, sin);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float2 x = numbers_of(first[n + i]), y = numbers_of(second[n + i]);
          turn<4, false>(cos[2 * i], sin[2 * i], x.x, y.x);
          turn<4, false>(cos[2 * i + 1], sin[2 * i + 1], x.y, y.y);
          first[n + i] = pack_pair(x.x, x.y), second[n + i] = pack_pair(y.x, y.y);
        }
      }
    }
  }
}

// Pairs of neighbours, which a word has.
template <int kAngleBytes>
__device__ __forceinline__ void turn_neighbours(const fa3_quantize_params &p, uint32_t tables,
                                                uint32_t (&words)[4][4]) {
#pragma unroll
  for (int v = 0; v < 4; v++) {
    const word_place at = place_of_words(this_thread() % 32, v);
    const unsigned pair = at.first / 2;
    if (pair >= (unsigned)p.pairs) continue;
    const uint32_t from = number_place<kAngleBytes, true>(tables, at.row, pair);
    const uint32_t of_sines = number_place<kAngleBytes, true>(tables, at.row, pair + kHalf);
    if constexpr (kAngleBytes == 2) {
      uint32_t cos[2], sin[2];
      load_words<2>(from, cos);
      load_words<2>(of_sines, sin);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const uint32_t both = n % 2 ? 0x3232 : 0x1010, x = words[v][n];
        const uint32_t c = __byte_perm(cos[n / 2], 0, both);
        const uint32_t s = __byte_perm(sin[n / 2], 0, both) ^ 0x8000; /* -s and s */
        words[v][n] = multiply_add_pairs(x, c, multiply_pairs(__byte_perm(x, 0, 0x1032), s));
      }
    } else {
      float cos[4], sin[4];
      load_numbers<4>(from, cos);
      load_numbers<4>(of_sines, sin);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float2 x = numbers_of(words[v][n]);
        turn<4, false>(cos[n], sin[n], x.x, x.y);
        words[v][n] = pack_pair(x.x, x.y);
      }
    }
  }
}

// Pairs of halves of less than the head: the others of a vector's elements are read from the stage.
template <int kAngleBytes>
__device__ __forceinline__ void turn_some_words(const fa3_quantize_params &p, uint32_t stage,
                                                uint32_t tables, uint32_t (&words)[4][4]) {
#pragma unroll
  for (int v = 0; v < 4; v++) {
    const word_place at = place_of_words(this_thread() % 32, v);
    if (at.first >= 2u * p.pairs) continue;
    const pair_place pair = pair_of(p, at.first);
    const uint32_t sign = pair.second ? 0 : 0x80008000;
    const uint32_t from = number_place<kAngleBytes, true>(tables, at.row, pair.pair);
    uint32_t other[4];
    load_words<4>(number_place<2, true>(stage, at.row, pair.other), other);
    if constexpr (kAngleBytes == 2) {
      uint32_t cos[4], sin[4];
      load_words<4>(from, cos);
      load_words<4>(from ^ kHalf * 2, sin);
#pragma unroll
      for (int n = 0; n < 4; n++)
        words[v][n] =
            multiply_add_pairs(words[v][n], cos[n], multiply_pairs(other[n], sin[n]) ^ sign);
    } else {
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        float cos[4], sin[4];
        load_float_angles(from, n, cos, sin);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 x = numbers_of(words[v][n + i]), y = numbers_of(other[n + i]);
          words[v][n + i] =
              pack_pair(turn_one<4, false>(cos[2 * i], sin[2 * i], x.x, y.x, pair.second),
                        turn_one<4, false>(cos[2 * i + 1], sin[2 * i + 1], x.y, y.y, pair.second));
        }
      }
    }
  }
}

template <int kAngleBytes>
__device__ __forceinline__ void turn_words(const fa3_quantize_params &p, uint32_t stage,
                                           uint32_t tables, uint32_t (&words)[4][4]) {
  if (p.interleaved) {
    turn_neighbours<kAngleBytes>(p, tables, words);
  } else if (2 * p.pairs == kDim) {
    const word_place at = place_of_words(this_thread() % 32, 0);
    turn_halves<kAngleBytes>(number_place<kAngleBytes, true>(tables, at.row, at.first), words);
  } else {
    turn_some_words<kAngleBytes>(p, stage, tables, words);
  }
}

#endif
