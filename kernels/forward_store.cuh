// How a forward kernel's output leaves, in 16 bits. Who includes it has forward_tiles.cuh, and
// kHeadDimV, kChunk, kUnits, kChunksV, kOChunks, kOChunkBytes, kOBytes, `swizzled` and `layout`.
#ifndef FA3_FORWARD_STORE_CUH
#define FA3_FORWARD_STORE_CUH

// PTX ISA, "cvt": two floats to a packed pair of bfloat16 or float16, the first in the low half.
template <bool kToBf16>
__device__ __forceinline__ uint32_t pack_pair_as(float low, float high) {
  uint32_t pair;
  if (kToBf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// What a thread has of a tile's results: of its two rows (softmax_rows) a part of O, still a sum,
// the factor that makes it the average, and the log-sum-exp.
struct results {
  float o[kHeadDimV / 2];
  float average[2], lse[2];
};

// Whether a result is no part of one. Of parts the sink is counted where they are put together.
__device__ __forceinline__ bool is_whole(const work &w) {
#if FA3_SPLITS
  return w.part == kWhole;
#else
  return true;
#endif
}

// One of a thread's two rows. Whoever is short of registers gives thread_again() as `thread`,
// others threadIdx.x.
struct output_row {
  int head, query;  // of all heads; within the sequence
  bool stored;      // else it is beyond the sequence's end, or the tile's heads
};

__device__ __forceinline__ output_row find_row(const fa3_forward_params &params, const work &w,
                                               int warpgroup, int r, int thread) {
  const int in_tile = (thread & 127) / 32 * 16 + (thread & 31) / 4 + 8 * r;
  const int step = queries_of_warpgroup(params);
  output_row row;
  row.head = head_of_row(params, w, in_tile);
  row.query = w.first + warpgroup * step + query_of_row(params, in_tile);
  row.stored = row.query < w.sequence.mask.queries && in_tile < step * heads_of_tile(params);
  return row;
}

// A chunk of the warp's 16 rows of O goes to shared memory, as the average.
template <bool kToBf16>
__device__ __forceinline__ void put_chunk(const float *o, const float (&average)[2], uint32_t to) {
  const int lane = thread_again() & 31;
#pragma unroll
  for (int j = 0; j < kUnits; j += 2) {
    const float *x = o + j * 4;
    store_matrices(to + swizzled(lane & 15, j + lane / 16),
                   pack_pair_as<kToBf16>(x[0] * average[0], x[1] * average[0]),
                   pack_pair_as<kToBf16>(x[2] * average[1], x[3] * average[1]),
                   pack_pair_as<kToBf16>(x[4] * average[0], x[5] * average[0]),
                   pack_pair_as<kToBf16>(x[6] * average[1], x[7] * average[1]));
  }
}

// The warp's rows leave by the copy engine. `query` is the first of them in its tile.
template <bool kToBf16>
__device__ __forceinline__ void store_by_tma(const fa3_forward_params &params, const work &w,
                                             const results &x, uint32_t staged, int query) {
  // Chunks that leave together: all, if there is room for them.
  constexpr int kTogether = kChunksV <= kOChunks ? kChunksV : 1;
#pragma unroll
  for (int c = 0; c < kChunksV; ++c) {
    if (c >= kOChunks) {
      tma_store_wait_read<kOChunks - 1>();
      __syncwarp();
    }
    put_chunk<kToBf16>(x.o + c * kUnits * 4, x.average, staged + c % kOChunks * kOChunkBytes);
    if ((c + 1) % kTogether != 0) continue;
    fence_proxy_async();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
      for (int leaving = c + 1 - kTogether; leaving <= c; ++leaving)
        tma_store_5d(&params.output, staged + leaving % kOChunks * kOChunkBytes, leaving * kChunk,
                     0, w.sequence.query_row + w.first + query, w.head, w.sequence.query_batch);
    }
    tma_store_commit();
  }
}

// Where O of one of a tile's rows goes; null where it is beyond the sequence's end, or the tile's
// heads.
__device__ __forceinline__ uint4 *place_of_output(const fa3_forward_params &params, const work &w,
                                                  int warpgroup, int in_tile) {
  const int step = queries_of_warpgroup(params);
  const int query = w.first + warpgroup * step + query_of_row(params, in_tile);
  const int head = head_of_row(params, w, in_tile);
  uint16_t *const to =
      (uint16_t *)params.output_data + w.sequence.query_batch * params.output_stride_batch +
      (w.sequence.query_row + query) * params.output_stride_row + head * params.output_stride_head;
  const bool stored = in_tile < step * heads_of_tile(params) && query < w.sequence.mask.queries;
  return stored ? (uint4 *)to : nullptr;
}

// How many stores of 16 bytes a lane has under way. With more at head dim 64 ptxas serialises the
// products of kernels for few last keys (C7511).
constexpr int kStoresAtOnce = kChunksV > 1 ? kUnits / 2 : 2;

// The warp's rows leave one by one: not all are of this sequence, or the queries of a warp are no
// whole number.
template <bool kToBf16>
__device__ __forceinline__ void store_by_threads(const fa3_forward_params &params, const work &w,
                                                 int warpgroup, const results &x, uint32_t staged,
                                                 int row0, int lane) {
  const int unit = lane % kUnits;
  // Each lane finds the place of one row, and the others ask it.
  uint4 *const place = place_of_output(params, w, warpgroup, row0 + (lane & 15));
#pragma unroll
  for (int c = 0; c < kChunksV; ++c) {
    const uint32_t chunk = staged + c % kOChunks * kOChunkBytes;
    put_chunk<kToBf16>(x.o + c * kUnits * 4, x.average, chunk);
    __syncwarp();
    const bool there = c * kUnits + unit < params.head_dim_v / 8;
#pragma unroll kStoresAtOnce
    for (int i = 0; i < kUnits / 2; ++i) {
      const int row = (32 * i + lane) / kUnits;
      uint4 *const to = (uint4 *)__shfl_sync(0xffffffff, (uint64_t)place, row);
      if (to != nullptr && there)
        to[c * kUnits + unit] = load_shared_vector(chunk + swizzled(row, unit));
    }
    __syncwarp();
  }
}

// A tile has seen its last scores: what turns O into the average, and the log-sum-exp. `scale`: of
// references.
__device__ __forceinline__ void finish_rows(const fa3_forward_params &params, const work &w,
                                            int warpgroup, const softmax_rows &rows,
                                            const fa3_softmax_scale &scale, results &x,
                                            int thread) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float *sink = nullptr;
    if (params.sink != nullptr && is_whole(w)) {
      const output_row row = find_row(params, w, warpgroup, r, thread);
      if (row.stored) sink = params.sink + row.head;
    }
    x.lse[r] = softmax_finish(rows, r, scale, sink, x.average[r]);
  }
}

// O leaves, in 16 bits.
template <bool kToBf16>
__device__ __forceinline__ void store_output(const fa3_forward_params &params, const layout &m,
                                             const work &w, int warpgroup, const results &x,
                                             int thread) {
  const int warp = (thread & 127) / 32, lane = thread & 31;
  const int queries = kDiagonal ? kRows / 4 : params.queries_per_warp;
  const int query = warpgroup * queries_of_warpgroup(params) + warp * queries;
  const uint32_t staged = m.o + (warpgroup * 4 + warp) * kOBytes;
  tma_store_wait_read<0>();  // by the tile before
  __syncwarp();
  // The copy engine clips at the tensor's end, not at the sequence's or the tile's.
  if (kDiagonal ||
      uniform(params.store_by_tma &&
              (!params.clip_output || w.first + query + queries <= w.sequence.mask.queries)))
    store_by_tma<kToBf16>(params, w, x, staged, query);
  else
    store_by_threads<kToBf16>(params, w, warpgroup, x, staged, warp * 16, lane);
}

__device__ __forceinline__ void store_lse(const fa3_forward_params &params, const work &w,
                                          int warpgroup, const results &x, int thread) {
  if (params.lse != nullptr && (thread & 3) == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const output_row row = find_row(params, w, warpgroup, r, thread);
      if (row.stored)
        params.lse[w.sequence.query_batch * params.lse_stride_batch +
                   row.head * params.lse_stride_head + w.sequence.query_row + row.query] = x.lse[r];
    }
  }
}

#if FA3_SPLITS
// A part of a tile's keys: averages and log-sum-exps as they are, for combine.cu. Of a row that
// sees none of them there is no average.
__device__ __forceinline__ void store_part(const fa3_forward_params &params, const work &w,
                                           int warpgroup, const results &x, int thread) {
  const int column = 2 * (thread & 3);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const output_row row = find_row(params, w, warpgroup, r, thread);
    if (!row.stored) continue;
    const int64_t place = w.part + row.query * params.part_stride + row.head;
    if (column == 0) params.partial_lse[place] = x.lse[r];
    if (x.lse[r] == -INFINITY) continue;
    float *const to = params.partial + place * params.head_dim_v + column;
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; ++j)
      if (8 * j < params.head_dim_v)
        *(float2 *)(to + 8 * j) =
            make_float2(x.o[4 * j + 2 * r] * x.average[r], x.o[4 * j + 2 * r + 1] * x.average[r]);
  }
}
#endif

#endif
