// K1: one kernel, tile by tile. A block keeps 64 rows of queries and their output,
// walks over the keys 64 at a time, and never writes a score to global memory: the
// online softmax corrects what was summed before whenever a row's maximum grows
// (FlashAttention, section 3.1). All arithmetic is on the CUDA cores, in float32.
#include "ladder.cuh"

constexpr int kQueries = 64;
constexpr int kKeys = 64;
constexpr int kThreads = 256;  // 16 x 16: each computes 4 rows x 4 keys, then 4 rows x 8 columns

// Shared memory, in floats. Four floats more per row spread the rows over the banks.
constexpr int kPitch = kHeadDim + 4;
constexpr int kProbabilityPitch = kKeys + 4;
constexpr int kQueryAt = 0;
constexpr int kTileAt = kQueryAt + kQueries * kPitch;  // the keys, then the values
constexpr int kProbabilityAt = kTileAt + kKeys * kPitch;
constexpr int kSharedBytes = (kProbabilityAt + kQueries * kProbabilityPitch) * 4;

// 64 rows, from bf16 in global memory to float32 in shared memory: a warp to a row.
static __device__ __forceinline__ void load_tile(float *to, const attention &a, const bf16 *from) {
  const int column = threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < 64; i += kThreads / 32) {
    const int row = i + threadIdx.x / 32;
    const uint2 four = *(const uint2 *)(from + (int64_t)row * a.heads * kHeadDim + column);
    *(float4 *)&to[row * kPitch + column] =  // a bf16 is the upper half of a float
        make_float4(__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xffff0000),
                    __uint_as_float(four.y << 16), __uint_as_float(four.y & 0xffff0000));
  }
}

static __global__ void __launch_bounds__(kThreads, 2) k1_kernel(attention a) {
  extern __shared__ float4 shared_floats[];
  float *query = (float *)shared_floats + kQueryAt;
  float *tile = (float *)shared_floats + kTileAt;
  float *probability = (float *)shared_floats + kProbabilityAt;

  // Under a causal mask the last rows see the most keys: start them first.
  const int first = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int head = blockIdx.y, batch = blockIdx.z;
  const int row0 = threadIdx.x / 16 * 4;  // this thread's rows: row0 + 0..3
  const int lane = threadIdx.x % 16;  // its keys: lane + 16 j; its columns: 4 lane + 64 c + 0..3

  float o[4][2][4] = {};
  float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  float sum[4] = {};
  load_tile(query, a, a.query + row_at(a, batch, first, head));

  const int keys = a.causal ? first + kQueries : a.seqlen;
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    __syncthreads();  // all are done with the values
    load_tile(tile, a, a.key + row_at(a, batch, key0, head));
    __syncthreads();

    float s[4][4] = {};
    for (int d = 0; d < kHeadDim; d += 4) {
      float4 q[4], k[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[i] = *(const float4 *)&query[(row0 + i) * kPitch + d];
        k[i] = *(const float4 *)&tile[(lane + 16 * i) * kPitch + d];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          s[i][j] += q[i].x * k[j].x + q[i].y * k[j].y + q[i].z * k[j].z + q[i].w * k[j].w;
    }

    // The online softmax. A row is spread over 16 threads.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float tile_top = -INFINITY;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (a.causal && key0 + lane + 16 * j > first + row0 + i) s[i][j] = -INFINITY;
        tile_top = fmaxf(tile_top, s[i][j]);
      }
#pragma unroll
      for (int distance = 1; distance < 16; distance *= 2)
        tile_top = fmaxf(tile_top, __shfl_xor_sync(0xffffffff, tile_top, distance));
      const float new_top = fmaxf(top[i], tile_top * kScaleLog2);
      const float factor = exp2f(top[i] - new_top);  // 0 for the first tile
      top[i] = new_top;
      sum[i] *= factor;
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][c][e] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float p = exp2f(s[i][j] * kScaleLog2 - new_top);
        sum[i] += p;  // of this thread's keys; the others' are added at the end
        probability[(row0 + i) * kProbabilityPitch + lane + 16 * j] = p;
      }
    }

    __syncthreads();  // all are done with the keys
    load_tile(tile, a, a.value + row_at(a, batch, key0, head));
    __syncthreads();

    for (int key = 0; key < kKeys; key += 4) {
      float p[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *(float4 *)p[i] = *(const float4 *)&probability[(row0 + i) * kProbabilityPitch + key];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float v[4];
          *(float4 *)v = *(const float4 *)&tile[(key + k) * kPitch + 4 * lane + 64 * c];
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[i][c][e] += p[i][k] * v[e];
        }
    }
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2)
      sum[i] += __shfl_xor_sync(0xffffffff, sum[i], distance);
    bf16 *to = a.out + row_at(a, batch, first + row0 + i, head) + 4 * lane;
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[64 * c + e] = __float2bfloat16(o[i][c][e] / sum[i]);
  }
}

static void launch(const attention &a) {
  cudaFuncSetAttribute(k1_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  k1_kernel<<<dim3(a.seqlen / kQueries, a.heads, a.batch), kThreads, kSharedBytes>>>(a);
}

const step k1_tiled = {
    "k1_tiled", "tiles, online softmax", (const void *)k1_kernel, kThreads, kSharedBytes, launch,
};
