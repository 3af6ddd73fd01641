// Rows become E4M3 codes and their scales, bit for bit as on the CPU (src/cpu/quantize.c), but for
// the mean, whose sum in double precision has another order. A thread has 32 elements of one row, a
// chunk of either half; the next tile is loaded while these are worked on.
// docs/notes/hopper-quantize.md has the figures.
//
// Compile with FA3_HEAD_DIM, the largest that a row may have.
#include "cluster.cuh"
#include "codes.cuh"
#include "quantize_rotary.cuh"
#include "quantize_rotate.cuh"

// The largest finite magnitude, and whether there are others.
__device__ __forceinline__ float largest_of(const float (&x)[kElements], bool &infinite) {
  float parts[4] = {};
#pragma unroll
  for (int i = 0; i < kElements; i++)
    parts[i % 4] = fmaxf(parts[i % 4], fabsf(x[i])); /* no NaN passes */
  float most = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  infinite = most == INFINITY;
  if (infinite) {
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

// PTX ISA, "rcp"; a step of Newton's rounds it correctly.
__device__ __forceinline__ float invert(float x) {
  const float near = reciprocal_unit(x);
  return __fmaf_rn(near, __fmaf_rn(-x, near, 1.0f), near);
}

__device__ __forceinline__ divisor make_divisor(float scale) {
  const uint32_t bits = __float_as_uint(scale);
  const bool far = scale < 0x1p-60f || scale > 0x1p60f;
  divisor by;
  by.shift = far ? __uint_as_float((254 - (bits >> 23)) << 23) : 1;
  by.scale = far ? __uint_as_float((bits & 0x7fffff) | 127 << 23) : scale;
  by.inverse = invert(by.scale);
  return by;
}

__device__ __forceinline__ float divide(float x, const divisor &by) {
  x = __fmul_rn(x, by.shift);
  const float near = __fmul_rn(x, by.inverse);
  const float too_much = __fmaf_rn(by.scale, near, -x);
  return __fmaf_rn(-too_much, by.inverse, near);
}

// Of a finite number, for its code alone, with one operation less: the inverse is a float that is
// no larger, and another for what is missing. The sum is within 2^-45 of the quotient, and its code
// is that of the correctly rounded quotient unless the quotient is as near to where rounding to a
// float changes beside a number halfway between two codes. That number has 5 bits, so such a place
// is an odd 25-bit integer next to a multiple of 2^20. Times the scale's 24 bits it can be within
// 16 of a number's multiple of 2^24 only if the scale is within 16 of a multiple of 2^20.
struct inverse {
  float most, rest;
};

__device__ __forceinline__ bool has_inverse(float scale) {
  return scale >= 0x1p-60f && scale <= 0x1p60f && ((__float_as_uint(scale) + 16) & 0xfffff) > 32;
}

__device__ __forceinline__ inverse make_inverse(float scale) {
  const float near = invert(scale);
  const bool above = __fmaf_rn(-scale, near, 1.0f) < 0;
  const float most = __uint_as_float(__float_as_uint(near) - above);
  const float left = __fmaf_rn(-scale, most, 1.0f); /* exactly */
  return {most, __fmaf_rn(__fmul_rn(left, most), left, __fmul_rn(left, most))};
}

__device__ __forceinline__ float divide(float x, const inverse &by) {
  return __fmaf_rn(x, by.most, __fmul_rn(x, by.rest));
}

enum {
  kMostRows = FA3_QUANTIZE_THREADS / kLanes,
  kTileRows = kMostRows < FA3_QUANTIZE_TILE_ROWS ? kMostRows : FA3_QUANTIZE_TILE_ROWS,
  kFound = 8,       /* tiles that are found at a time, by a lane each */
  kLeastGroup = 128 /* threads that wait for each other: there are 15 named barriers */
};

struct shared {
  unsigned largest[4][kTileRows];           // of each scale of a tile; bits of floats
  tile tiles[2 * kFound];                   // a ring: at turn k it has tiles k to k + 7 at least
  tile whole;                               // all that a mean is of
  alignas(16) float factors[kNumbersRoom];  // of the rotation
  alignas(16) float mean[kNumbersRoom];
  double sums[kDim];       // of the block's rows
  float scale;             // of the sequence
  uint32_t start;          // of the dynamic shared memory
  int group;               // threads that wait for each other
  bool of_warp;            // whether all of a warp's rows have one scale
  uint32_t signs[kLanes];  // of the rotation
};

// What a block has in its dynamic shared memory: rows as they are loaded, each thread's places, and
// rows of angles. So many bytes an element.
template <int kBytes>
__device__ __forceinline__ uint32_t stage_of(uint32_t start) {
  return start + this_thread() / 32 * (32 * kElements) * kBytes;
}

template <int kBytes>
__device__ __forceinline__ uint32_t load_place_of(uint32_t start) {
  return start + blockDim.x * kElements * kBytes + this_thread() * (uint32_t)sizeof(load_place);
}

template <int kBytes>
__device__ __forceinline__ uint32_t row_place_of(uint32_t start) {
  return load_place_of<kBytes>(start) + blockDim.x * (uint32_t)sizeof(load_place);
}

template <int kBytes>
__device__ __forceinline__ uint32_t angle_place_of(uint32_t start) {
  return load_place_of<kBytes>(start) + 2 * blockDim.x * (uint32_t)sizeof(load_place);
}

template <int kBytes, int kAngleBytes>
__device__ __forceinline__ uint32_t tables_of(uint32_t start) {
  return start + blockDim.x * (kElements * kBytes + FA3_QUANTIZE_PLACE_BYTES) +
         this_thread() / 32 * (32 * kElements) * kAngleBytes;
}

// Where a number of the row's element d is among those that are read four at a time.
__device__ __forceinline__ int room_of(int d) {
  return d / kChunk * kChunkRoom + d % kChunk;
}

// How rows are taken. kAny: elements one at a time, as floats; else by vectors, and turned by
// tables of kAngleBytes an angle, if not 0.
template <bool kAny, int kAngleBytes>
__device__ __forceinline__ void load(const fa3_quantize_params &p, const tile &t, bool same_angles,
                                     uint32_t start) {
  constexpr int kBytes = kAny ? 4 : kElementBytes;
  if constexpr (kAny)
    load_any(p, t, stage_of<kBytes>(start));
  else
    load_ahead(p, t, load_place_of<kBytes>(start));
  if constexpr (kAngleBytes > 0) {
    if (same_angles) return;
    if (kDim * kAngleBytes <= 512 && !p.positions && p.cos.stride_row == p.sin.stride_row &&
        t.row + t.rows <= p.table_rows)
      load_angles<kAngleBytes>(p, t, angle_place_of<kBytes>(start));
    else
      load_tables<kAngleBytes>(p, t, tables_of<kBytes, kAngleBytes>(start));
  }
}

template <bool kAny, int kAngleBytes>
__device__ __forceinline__ void read(const fa3_quantize_params &p, uint32_t start, uint32_t signs,
                                     float (&x)[kElements]) {
  constexpr int kBytes = kAny ? 4 : kElementBytes;
  copy_async_wait_all();
  __syncwarp();
  read_row<kBytes>(stage_of<kBytes>(start), x, signs);
  if constexpr (kAngleBytes > 0) {
    const uint32_t tables = tables_of<kBytes, kAngleBytes>(start);
    if (p.interleaved || 2 * p.pairs == kDim)
      turn_own<kAngleBytes>(p, tables, x);
    else
      turn_parts<kAngleBytes>(p, stage_of<kBytes>(start), tables, x);
  }
  __syncwarp();
}

// Of all rows of `whole`, in an order of its own: a lane's rows, a warp's lanes, a block's warps, a
// cluster's blocks. A lane has two neighbouring columns of each 64.
template <bool kAny, int kAngleBytes>
__device__ __forceinline__ void find_mean(const fa3_quantize_params &p, shared &s,
                                          double *warp_sums, const tile &whole, uint32_t start) {
  constexpr int kBytes = kAny ? 4 : kElementBytes, kOwn = kDim / 32;
  const uint32_t stage = stage_of<kBytes>(start);
  const unsigned lane = threadIdx.x % 32;
  double sums[kOwn] = {};
#pragma unroll 1
  for (int part = (int)cluster_rank(); (int64_t)part * p.tile_rows < whole.rows;
       part += (int)cluster_size()) {
    tile t = whole;
    t.row = part * p.tile_rows;
    t.rows = min(p.tile_rows, whole.rows - t.row);
    t.input += t.row * p.input.stride_row * kElementBytes;
    t.positions += t.row * p.positions_stride_row;
    load<kAny, kAngleBytes>(p, t, false, start);
    copy_async_wait_all();
    __syncwarp();
    const uint32_t own = number_place<kBytes>(stage, 0, 2 * lane);
#pragma unroll(kAngleBytes ? 1 : 4)
    for (unsigned r = 0; r < kWarpRows; r++)
#pragma unroll
      for (int i = 0; i < kOwn; i += 2) {
        float x[2];
        if constexpr (kAngleBytes > 0) {
          const uint32_t tables = tables_of<kBytes, kAngleBytes>(start);
          const unsigned d = i * 32 + lane * 2;
          read_two_turned<kAngleBytes>(p, stage, tables, r, d, x);
        } else {
          const unsigned n = (r * kDim + i * 32) * kBytes / 16;
          const uint32_t from = (own ^ (place_of_vector<kDim * kBytes>(n) ^ n) * 16) + n * 16;
          load_two_numbers<kBytes>(from, x);
        }
        sums[i] += (double)x[0], sums[i + 1] += (double)x[1];
      }
    __syncwarp();
  }
  __syncthreads(); /* all have read what they had in the stages */
#pragma unroll
  for (int i = 0; i < kOwn; i++)
    warp_sums[threadIdx.x / 32 * kDim + i / 2 * 64 + lane * 2 + i % 2] = sums[i];
  __syncthreads();
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    double sum = 0;
    for (int w = 0; w < blockDim.x / 32; w++) sum += warp_sums[w * kDim + d];
    s.sums[d] = sum;
  }
  cluster_sync();
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    double sum = 0;
    for (int rank = 0; rank < (int)cluster_size() && d < p.head_dim; rank++)
      sum += cluster_load_double(cluster_map((uint32_t)__cvta_generic_to_shared(&s.sums[d]), rank));
    s.mean[room_of(d)] = (float)(sum / whole.rows);
  }
  cluster_sync();
}

// The scale of a sequence, from the largest magnitudes that the cluster's blocks have found. The
// first block writes it.
__device__ __forceinline__ void find_scale(shared &s, const tile &t) {
  cluster_sync();
  if (threadIdx.x < 32) {
    const uint32_t own = (uint32_t)__cvta_generic_to_shared(s.largest[0]);
    const uint32_t found =
        threadIdx.x < cluster_size() ? cluster_load_word(cluster_map(own, threadIdx.x)) : 0;
    const float scale = scale_for(__uint_as_float(__reduce_max_sync(0xffffffff, found)));
    if (threadIdx.x == 0) s.scale = scale;
    const bool there = t.row + t.rows > 0; /* rows of the sequence: those of a tile may be less */
    if (threadIdx.x == 0 && there && cluster_rank() == 0) *t.scale = scale;
  }
  cluster_sync();
}

__device__ __forceinline__ void subtract(uint32_t mean, float (&x)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const float4 m = four_of(mean, i);
    x[i] = __fsub_rn(x[i], m.x), x[i + 1] = __fsub_rn(x[i + 1], m.y);
    x[i + 2] = __fsub_rn(x[i + 2], m.z), x[i + 3] = __fsub_rn(x[i + 3], m.w);
  }
}

// Of all of a row's threads.
__device__ __forceinline__ unsigned largest_of_lanes(unsigned most) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(0xffffffff, most, offset));
  return most;
}

// Raises what the scale of the thread's row needs; where all of a warp's rows have one, together.
__device__ __forceinline__ void raise_largest(unsigned most, bool of_warp, unsigned *largest) {
  most = of_warp ? __reduce_max_sync(0xffffffff, most) : largest_of_lanes(most);
  if (this_thread() % (of_warp ? 32 : kLanes) == 0) atomicMax(largest, most);
}

// Threads that wait for each other at each tile: those of a scale of their own, if they can have a
// barrier; none where a row's threads have one; else all.
__device__ __forceinline__ int group_of(int slot_rows, bool own_scales) {
  const int threads = slot_rows * kLanes, group = max(threads, kLeastGroup);
  if (!own_scales || group % threads || blockDim.x % group) return blockDim.x;
  return slot_rows == 1 ? 0 : group;
}

// The thread's codes of a row. `to` is where its first chunk's are.
template <bool kAny, class divided_by>
__device__ __forceinline__ void encode(const fa3_quantize_params &p, const divided_by &by,
                                       bool there, char *to, const float (&x)[kElements]) {
#pragma unroll
  for (int chunk = 0; chunk < 2; chunk++) {
    uint32_t codes[kChunk / 4];
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float *const y = x + chunk * kChunk + i;
      codes[i / 4] =
          pack_codes(divide(y[0], by), divide(y[1], by), divide(y[2], by), divide(y[3], by));
    }
    const int left = there ? p.head_dim - first_of(chunk) : 0;
    if (!kAny && left > 0) store_global_vector(to + chunk * kHalf, codes);
#pragma unroll
    for (int word = 0; kAny && word < kChunk / 4; word++)
#pragma unroll 1
      for (int i = 0; i < 4 && 4 * word + i < left; i++)
        to[chunk * kHalf + 4 * word + i] = (char)(codes[word] >> i * 8);
  }
}

// kClusters: a cluster has all tiles of a head of a sequence.
template <bool kAny, int kAngleBytes, bool kClusters>
__device__ __forceinline__ void quantize_tiles(const fa3_quantize_params &p, shared &s) {
  extern __shared__ __align__(1024) unsigned char stages[];
  constexpr int kBytes = kAny ? 4 : kElementBytes;
  const uint32_t start = (uint32_t)__cvta_generic_to_shared(stages);
  int first = blockIdx.x * p.in_turn, step = gridDim.x * p.in_turn;
  int count = p.batches * p.heads * p.tiles - first;
  if (kClusters) {
    step = cluster_size();
    first = blockIdx.x / step * p.tiles;
    count = p.tiles - (int)cluster_rank();
  }
  count = (count + step - 1) / step * p.in_turn;
  const bool of_sequence = kClusters && p.from == FA3_QUANTIZE_OF_SEQUENCE;
  const int turns = of_sequence ? 2 * count : count;
  const bool own_scales = p.from == FA3_QUANTIZE_OF_TILE && p.scale_rows;
  const int slot_rows = own_scales ? min(p.scale_rows, p.tile_rows) : p.tile_rows;
  if (threadIdx.x == 0) {
    s.group = group_of(slot_rows, own_scales);
    s.of_warp = slot_rows == p.tile_rows || slot_rows % kWarpRows == 0;
  }
  for (int i = threadIdx.x; i < kTileRows; i += blockDim.x)
    s.largest[0][i] = s.largest[1][i] = s.largest[2][i] = s.largest[3][i] = 0;
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) s.factors[room_of(d)] = factor_of(p, d);
  /* Numbers of 16 bits get their signs as they are read, where nothing comes before. */
  constexpr bool kSigned = !kAny && !kAngleBytes && !kClusters && kElementBytes == 2;
  const bool whole = p.rotate && p.head_dim == kDim;
  if (kSigned && threadIdx.x / 32 < kLanes) {
    const int lane = (int)(threadIdx.x / 32);
    s.signs[lane] = whole ? find_signs(p, lane) : 0;
  }
  store_place(load_place_of<kBytes>(start), find_load_place(p, stage_of<kBytes>(start)));
  store_place(row_place_of<kBytes>(start), find_row_place(p, slot_rows));
  if constexpr (kAngleBytes > 0)
    store_place(angle_place_of<kBytes>(start),
                find_angle_place<kAngleBytes>(p, tables_of<kBytes, kAngleBytes>(start)));
  wait_for_prior_grids();
  if (threadIdx.x < 2 * kFound && (int)threadIdx.x < turns) {
    tile_number number = kClusters ? find_number(p, first) : find_turn(p, (int)threadIdx.x);
    if (kClusters) number.part = part_of_turn(p, count, (int)threadIdx.x);
    s.tiles[threadIdx.x] = find_tile(p, number);
  }
  if (threadIdx.x == 32 && kClusters && p.subtract_mean) {
    const tile_number number = find_number(p, first);
    s.whole = find_tile(p, number);
    s.whole.rows = fa3_find_sequence(&p.sequences, number.batch).mask.queries;
  }
  __syncthreads();
  if (kClusters && p.subtract_mean)
    find_mean<kAny, kAngleBytes>(p, s, (double *)stages, s.whole, start);

  load<kAny, kAngleBytes>(p, s.tiles[0], false, start);
#pragma unroll 1
  for (int k = 0; k < turns; k++) {
    const unsigned turn_of = (unsigned)k % 4;
    float x[kElements];
    const tile &now = s.tiles[k % (2 * kFound)], &next = s.tiles[(k + 1) % (2 * kFound)];
    const uint32_t factors = (uint32_t)__cvta_generic_to_shared(s.factors);
    read<kAny, kAngleBytes>(p, start, kSigned ? s.signs[this_thread() % kLanes] : 0, x);
    /* Where there are few tiles, the next grid would be in the way. */
    if (!kClusters && k > 2 && k + 1 == turns) let_next_grid_launch();
    if (k + 1 < turns)
      load<kAny, kAngleBytes>(
          p, next, next.number.part == now.number.part && next.number.batch == now.number.batch,
          start);
    if (kClusters && p.subtract_mean) subtract((uint32_t)__cvta_generic_to_shared(s.mean), x);
    if (!kAny && whole) rotate<true, false, kSigned>(p, factors, x);
    if (kAny ? p.rotate : p.rotate && p.head_dim < kDim) rotate<false, kAny, false>(p, factors, x);
    unsigned most = 0;
    const uint4 place = load_shared_vector(row_place_of<kBytes>(start));
    const bool there = (int)place.z < now.rows;
    bool infinite;
    const float largest = largest_of(x, infinite);
    const bool finds = of_sequence ? k < count : p.from != FA3_QUANTIZE_USE;
    const bool uses = of_sequence ? !finds : p.from != FA3_QUANTIZE_FIND;
    const int group = s.group;
    const bool row_scales = group == 0;
    if (finds) {
      most = there ? __float_as_uint(largest) : 0;
      if (row_scales)
        most = largest_of_lanes(most);
      else
        raise_largest(most, s.of_warp, &s.largest[of_sequence ? 0 : turn_of][place.w / 2]);
    }
    /* From here on none of the group reads what is of the last tile; of all, where they meet. */
    if (kClusters || group == (int)blockDim.x || k % (kFound / 2) == 0)
      __syncthreads();
    else if (group)
      named_barrier_sync(1 + (int)this_thread() / group, group);
    if (of_sequence && k == count - 1) find_scale(s, now);
    const bool writes = place.w % 2 && there && !of_sequence;
    if (uses) {
      float scale;
      if (of_sequence)
        scale = s.scale;
      else if (p.from == FA3_QUANTIZE_USE)
        scale = now.rows > 0 ? *now.scale : 1; /* what is not there has no scale */
      else
        scale = scale_for(__uint_as_float(row_scales ? most : s.largest[turn_of][place.w / 2]));
      char *const to = now.codes + (int64_t)((uint64_t)place.y << 32 | place.x);
      if (has_inverse(scale) && !infinite)
        encode<kAny>(p, make_inverse(scale), there, to, x);
      else
        encode<kAny>(p, make_divisor(scale), there, to, x);
      if (writes && p.from == FA3_QUANTIZE_OF_TILE)
        now.scale[place.w / 2 * p.scale.stride_row] = scale;
    } else if (writes) {
      const float scale = scale_for(__uint_as_float(s.largest[turn_of][0]));
      atomicMax((unsigned *)now.scale, __float_as_uint(scale)); /* in the order of the floats */
    }
    /* Turn k + 3 takes the place of turn k - 1. */
    if (place.w % 2 && !of_sequence) s.largest[(turn_of + 3) % 4][place.w / 2] = 0;
    /* What comes later, where none of the block reads any more. */
    if (kClusters) {
      const int later = k + 2 * kFound - 1;
      if (this_thread() / 32 != turn_of) continue;
      if (this_thread() % 32 == 0 && k && later < turns) {
        tile_number number = s.tiles[(turn_of + 2) % 4].number; /* all have one batch and head */
        number.part = part_of_turn(p, count, later);
        s.tiles[later % (2 * kFound)] = find_tile(p, number);
      }
      continue;
    }
    if (k % kFound || !k || this_thread() >= kFound) continue;
    const int later = k + kFound + (int)this_thread();
    if (later < turns) s.tiles[later % (2 * kFound)] = find_tile(p, find_turn(p, later));
  }
}

template <bool kAny, int kAngleBytes>
__device__ __forceinline__ void quantize_rows(const fa3_quantize_params &p) {
  __shared__ shared s;
  if (in_clusters(p))
    quantize_tiles<kAny, kAngleBytes, true>(p, s);
  else
    quantize_tiles<kAny, kAngleBytes, false>(p, s);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 0>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_turned(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, kElementBytes>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_THREADS, 1)
    quantize_turned_by_floats(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<false, 4>(p);
}

extern "C" __global__ void __launch_bounds__(FA3_QUANTIZE_ANY_THREADS, 1)
    quantize_any(const __grid_constant__ fa3_quantize_params p) {
  quantize_rows<true, 0>(p);
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
