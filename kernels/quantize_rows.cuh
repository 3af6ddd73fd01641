// Rows become E4M3 codes and their scales, bit for bit as on the CPU (src/cpu/quantize.c), but for
// the mean, whose sum in double precision has another order, and rotations by tensor cores
// (quantize_products.cuh). A thread has 32 elements of one row, a chunk of either half; of rows of
// 64, where tensor cores rotate, a chunk of each of two. The next tile is loaded while these are
// worked on.
// docs/notes/hopper-quantize.md has the figures.
#ifndef FA3_QUANTIZE_ROWS_CUH
#define FA3_QUANTIZE_ROWS_CUH

#include "quantize_block.cuh"
#include "quantize_divide.cuh"

// The largest finite magnitude of so many neighbours, and whether there are others.
template <bool kProducts, int kCount>
__device__ __forceinline__ float largest_of(const float (&x)[kElements], int first,
                                            bool &infinite) {
  float parts[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; i++)
    parts[i % 4] = fmaxf(parts[i % 4], fabsf(x[first + i])); /* no NaN passes */
  float most = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
  if (kProducts) most = finish_product(most);
  infinite = most == INFINITY;
  if (infinite) {
    most = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const float y = fabsf(kProducts ? finish_product(x[first + i]) : x[first + i]);
      if (y < INFINITY) most = fmaxf(most, y);
    }
  }
  return most;
}

// Of all rows of `whole`, in an order of its own: a lane's rows, a warp's lanes, a block's warps, a
// cluster's blocks. A lane has two neighbouring columns of each 64.
template <bool kAny, int kAngleBytes, bool kProducts>
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
    load<kAny, kAngleBytes, kProducts>(p, t, false, start);
    copy_async_wait_all();
    __syncwarp();
    const uint32_t own = number_place<kBytes, kProducts>(stage, 0, 2 * lane);
#pragma unroll(kAngleBytes ? 1 : 4)
    for (unsigned r = 0; r < kWarpRows; r++)
#pragma unroll
      for (int i = 0; i < kOwn; i += 2) {
        float x[2];
        if constexpr (kAngleBytes > 0) {
          const uint32_t tables = tables_of<kBytes, kAngleBytes>(start);
          const unsigned d = i * 32 + lane * 2;
          read_two_turned<kAngleBytes, kProducts>(p, stage, tables, r, d, x);
        } else {
          const unsigned n = (r * kDim + i * 32) * kBytes / 16;
          const unsigned swizzle = place_of_vector<kDim * kBytes, kProducts>(n) ^ n;
          const uint32_t from = (own ^ swizzle * 16) + n * 16;
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
  if constexpr (kProducts) {
    if (threadIdx.x < 32) rotate_mean(p, s.mean);
    __syncthreads();
  }
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
template <bool kProducts>
__device__ __forceinline__ unsigned largest_of_lanes(unsigned most) {
#pragma unroll
  for (int offset = (kProducts ? kProductLanes : kLanes) / 2; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(0xffffffff, most, offset));
  return most;
}

// Raises what the scale of the thread's row needs; where all of a warp's rows have one, together.
template <bool kProducts>
__device__ __forceinline__ void raise_largest(unsigned most, bool of_warp, unsigned *largest) {
  const unsigned lane = this_thread() % 32;
  if (of_warp) {
    most = __reduce_max_sync(0xffffffff, most);
    if (lane == 0) atomicMax(largest, most);
  } else {
    most = largest_of_lanes<kProducts>(most);
    if (lane % (kProducts ? kProductLanes : kLanes) == 0) atomicMax(largest, most);
  }
}

// Which scale of the tile's the thread's row number r has, eight rows after the first if it is the
// second; and whether the thread writes it.
__device__ __forceinline__ int slot_of(const shared &s, const uint4 &place, int r) {
  if (r == 0 || s.of_warp) return (int)place.w / 2;
  return min((int)place.z + 8, s.tile_rows - 1) / s.slot_rows;
}

__device__ __forceinline__ bool writes_slot(const shared &s, const uint4 &place, int r) {
  if (r == 0) return place.w % 2;
  const int row = (int)place.z + 8;
  return this_thread() % 4 == 0 && row < s.tile_rows && row % s.slot_rows == 0 && !s.of_warp;
}

// Threads that wait for each other at each tile: those of a scale of their own, if they can have a
// barrier; none where a row's threads have one; else all.
__device__ __forceinline__ int group_of(int slot_rows, bool own_scales) {
  const int threads = slot_rows * kLanes, group = max(threads, kLeastGroup);
  if (!own_scales || group % threads || blockDim.x % group) return blockDim.x;
  return slot_rows == 1 ? 0 : group;
}

// The thread's codes of a row, or of its row number r. `to` is where its first chunk's are.
template <bool kAny, int kRows, class divided_by>
__device__ __forceinline__ void encode(const fa3_quantize_params &p, const divided_by &by, int r,
                                       bool there, char *to, const float (&x)[kElements]) {
#pragma unroll
  for (int chunk = r; chunk < (kRows == 1 ? 2 : r + 1); chunk++) {
    uint32_t codes[kChunk / 4];
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float *const y = x + chunk * kChunk + i;
      codes[i / 4] =
          pack_codes(divide(y[0], by), divide(y[1], by), divide(y[2], by), divide(y[3], by));
    }
    const int left = there ? p.head_dim - (kRows == 1 ? first_of(chunk) : 0) : 0;
    if (!kAny && left > 0) store_global_vector(to + (kRows == 1 ? chunk * kHalf : 0), codes);
#pragma unroll
    for (int word = 0; kAny && word < kChunk / 4; word++)
#pragma unroll 1
      for (int i = 0; i < 4 && 4 * word + i < left; i++)
        to[chunk * kHalf + 4 * word + i] = (char)(codes[word] >> i * 8);
  }
}

// kClusters: a cluster has all tiles of a head of a sequence. kProducts: tensor cores rotate.
template <bool kAny, int kAngleBytes, bool kClusters, bool kProducts>
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
    s.tile_rows = p.tile_rows, s.slot_rows = slot_rows;
    s.of_warp = slot_rows == p.tile_rows || slot_rows % kWarpRows == 0;
  }
  for (int i = threadIdx.x; i < kTileRows; i += blockDim.x)
    s.largest[0][i] = s.largest[1][i] = s.largest[2][i] = s.largest[3][i] = 0;
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) s.factors[room_of(d)] = factor_of(p, d);
  /* Whole rows of 16-bit numbers are rotated by products. */
  constexpr bool kSteps = !kAny && kElementBytes == 4;
  const bool whole = p.rotate && p.head_dim == kDim;
  if constexpr (kProducts) {
    for (unsigned i = threadIdx.x / 32; i < 8; i += blockDim.x / 32)
      s.signs[i] = find_signs(p, (int)i % 4, kDim == 256 ? (int)i / 4 : 0);
    if (threadIdx.x < 32) s.matrix[threadIdx.x] = find_matrix((int)threadIdx.x);
  }
  store_place(load_place_of<kBytes>(start), find_load_place<kProducts>(p, stage_of<kBytes>(start)));
  store_place(row_place_of<kBytes>(start),
              kProducts ? find_row_place(p, slot_rows, product_row(), product_first())
                        : find_row_place(p, slot_rows, row_of(), first_of(0)));
  if constexpr (kAngleBytes > 0)
    store_place(angle_place_of<kBytes>(start),
                find_angle_place<kAngleBytes, kProducts>(p, tables_of<kBytes, kAngleBytes>(start)));
  else if (!kAny && !kProducts)
    store_shared_word(angle_place_of<kBytes>(start),
                      own_vector<kRowBytes>(stage_of<kBytes>(start)));
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
  if constexpr (kProducts && !kAngleBytes)
    store_place(angle_place_of<kBytes>(start),
                find_product_place(stage_of<kBytes>(start), s.signs));
  if (kClusters && p.subtract_mean)
    find_mean<kAny, kAngleBytes, kProducts>(p, s, (double *)stages, s.whole, start);

  load<kAny, kAngleBytes, kProducts>(p, s.tiles[0], false, start);
#pragma unroll 1
  for (int k = 0; k < turns; k++) {
    const unsigned turn_of = (unsigned)k % 4;
    float x[kElements];
    const tile &now = s.tiles[k % (2 * kFound)], &next = s.tiles[(k + 1) % (2 * kFound)];
    const uint32_t factors = (uint32_t)__cvta_generic_to_shared(s.factors);
    if constexpr (kProducts) {
      copy_async_wait_all();
      __syncwarp();
      const uint32_t stage = stage_of<kBytes>(start);
      uint32_t words[4][4];
      /* With angles its place in shared memory is theirs. */
      const product_place at = kAngleBytes ? find_product_place(stage, s.signs)
                                           : load_product_place(angle_place_of<kBytes>(start));
      read_words(at, words);
      if constexpr (kAngleBytes > 0)
        turn_words<kAngleBytes>(p, stage, tables_of<kBytes, kAngleBytes>(start), words);
      multiply_words(at, (uint32_t)__cvta_generic_to_shared(s.matrix), words, x);
      if (kClusters && p.subtract_mean)
        subtract_from_products((uint32_t)__cvta_generic_to_shared(s.mean), x);
      __syncwarp();
    } else {
      read<kAny, kAngleBytes>(p, start, x);
    }
    /* Where there are few tiles, the next grid would be in the way. */
    if (!kClusters && k > 2 && k + 1 == turns) let_next_grid_launch();
    if (k + 1 < turns)
      load<kAny, kAngleBytes, kProducts>(
          p, next, next.number.part == now.number.part && next.number.batch == now.number.batch,
          start);
    if constexpr (!kProducts) {
      if (kClusters && p.subtract_mean) subtract((uint32_t)__cvta_generic_to_shared(s.mean), x);
      if (kSteps && whole) rotate<true, false>(p, factors, x);
      if (kAny ? p.rotate : p.rotate && p.head_dim < kDim) rotate<false, kAny>(p, factors, x);
    }
    constexpr int kRows = kProducts ? kProductRows : 1;
    float largest[kRows];
    unsigned most[kRows] = {};
    bool infinite[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++)
      largest[r] =
          largest_of<kProducts, kElements / kRows>(x, r * (kElements / kRows), infinite[r]);
    const uint4 place = load_shared_vector(row_place_of<kBytes>(start));
    const int row = (int)place.z;
    const bool finds = of_sequence ? k < count : p.from != FA3_QUANTIZE_USE;
    const bool uses = of_sequence ? !finds : p.from != FA3_QUANTIZE_FIND;
    const int group = s.group;
    const bool row_scales = group == 0;
    unsigned *const raised = s.largest[of_sequence ? 0 : turn_of];
    if (finds) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        most[r] = row + 8 * r < now.rows ? __float_as_uint(largest[r]) : 0;
        if (row_scales)
          most[r] = largest_of_lanes<kProducts>(most[r]);
        else if (kRows == 1 || !s.of_warp)
          raise_largest<kProducts>(most[r], s.of_warp, &raised[slot_of(s, place, r)]);
        else
          most[0] = max(most[0], most[r]);
      }
      if (kRows > 1 && s.of_warp && !row_scales)
        raise_largest<kProducts>(most[0], true, &raised[place.w / 2]);
    }
    /* From here on none of the group reads what is of the last tile; of all, where they meet. */
    if (kClusters || group == (int)blockDim.x || k % (kFound / 2) == 0)
      __syncthreads();
    else if (group)
      named_barrier_sync(1 + (int)this_thread() / group, group);
    if (of_sequence && k == count - 1) find_scale(s, now);
    if (uses) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int slot = slot_of(s, place, r);
        float scale;
        if (of_sequence)
          scale = s.scale;
        else if (p.from == FA3_QUANTIZE_USE)
          scale = now.rows > 0 ? *now.scale : 1; /* what is not there has no scale */
        else
          scale = scale_for(__uint_as_float(row_scales ? most[r] : raised[slot]));
        char *const to =
            now.codes + (int64_t)((uint64_t)place.y << 32 | place.x) + r * 8 * p.codes.stride_row;
        const bool there = row + 8 * r < now.rows;
        if (kProducts && !infinite[r])
          encode<kAny, kRows>(p, factor{finish_product(invert(scale))}, r, there, to, x);
        else if (kProducts)
          encode<kAny, kRows>(p, careful_factor{invert(scale)}, r, there, to, x);
        else if (has_inverse(scale) && !infinite[r])
          encode<kAny, kRows>(p, make_inverse(scale), r, there, to, x);
        else
          encode<kAny, kRows>(p, make_divisor(scale), r, there, to, x);
        if (p.from == FA3_QUANTIZE_OF_TILE && there && writes_slot(s, place, r))
          now.scale[slot * p.scale.stride_row] = scale;
      }
    } else if (place.w % 2 && row < now.rows && !of_sequence) {
      const float scale = scale_for(__uint_as_float(s.largest[turn_of][0]));
      atomicMax((unsigned *)now.scale, __float_as_uint(scale)); /* in the order of the floats */
    }
    /* Turn k + 3 takes the place of turn k - 1. */
#pragma unroll
    for (int r = 0; r < kRows && !of_sequence; r++)
      if (writes_slot(s, place, r)) s.largest[(turn_of + 3) % 4][slot_of(s, place, r)] = 0;
    /* What comes later, where none of the block reads any more. */
    if (kClusters) {
      const int later = k + 2 * kFound - 1;
      /* Warp turn_of, found anew: kept until here, turn_of would be spilled. */
      if ((this_thread() / 32 - (unsigned)k) % 4 || this_thread() >= 128) continue;
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

template <bool kAny, int kAngleBytes, bool kProducts>
__device__ __forceinline__ void quantize_rows(const fa3_quantize_params &p) {
  __shared__ shared s;
  if (in_clusters(p))
    quantize_tiles<kAny, kAngleBytes, true, kProducts>(p, s);
  else
    quantize_tiles<kAny, kAngleBytes, false, kProducts>(p, s);
}

#endif
