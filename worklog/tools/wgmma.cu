// WGMMA: one product of 64 x 16 and 16 x 128 numbers, checked; which thread has which of the
// results; and how long such instructions take, by their width.
#include <cuda_bf16.h>

#include "tools.cuh"
#include "wgmma.cuh"

constexpr int kM = 64, kK = 16, kTimes = 512;
constexpr int kRowBytes = 128;  // 64 columns of 16 bits; a product over 16 uses a quarter
constexpr uint32_t kHigh = wgmma_descriptor_high<kRowBytes>();

// A row's numbers where the swizzle has them.
static __device__ __forceinline__ void put(unsigned char *tile, int row, int column, float x) {
  const int byte = column * 2, unit = byte / 16 ^ row % 8;
  *(__nv_bfloat16 *)(tile + row * kRowBytes + unit * 16 + byte % 16) = __float2bfloat16(x);
}

// Small whole numbers, so that the sums are exact.
static __host__ __device__ float a_of(int row, int k) {
  return (float)((row * 3 + k * 5) % 7 - 3);
}
static __host__ __device__ float b_of(int column, int k) {
  return (float)((column * 2 + k * 3) % 5 - 2);
}

template <int kN>
static __global__ void __launch_bounds__(128) multiply(float *out, int *owner, int *clocks) {
  extern __shared__ unsigned char memory[];
  const uint32_t base = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) & ~1023;
  unsigned char *a = memory + (base - (uint32_t)__cvta_generic_to_shared(memory));
  unsigned char *b = a + kM * kRowBytes;
  for (int i = threadIdx.x; i < kM * 64; i += 128) put(a, i / 64, i % 64, a_of(i / 64, i % 64));
  for (int i = threadIdx.x; i < kN * 64; i += 128) put(b, i / 64, i % 64, b_of(i / 64, i % 64));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // for the matrix unit to see
  __syncthreads();

  const uint32_t a_tile = wgmma_descriptor_low(base, 0);
  const uint32_t b_tile = wgmma_descriptor_low(base + kM * kRowBytes, 0);
  float d[kN / 2];
  registers_touch(d);
  wgmma_fence();
  wgmma_shared<kN>(d, a_tile, b_tile, kHigh, false);
  wgmma_commit();
  wgmma_wait<0>();
  registers_touch(d);
  for (int i = 0; i < kN / 2; ++i) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    out[row * kN + column] = d[i];
    owner[row * kN + column] = threadIdx.x;
  }

  // The same again and again, 4 columns of 16 in turn, to see how long one takes.
  __syncthreads();
  const int64_t begin = clock64();
#pragma unroll 1
  for (int i = 0; i < kTimes; i += 4) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_shared<kN>(d, a_tile + 2 * j, b_tile + 2 * j, kHigh, true);
    wgmma_commit();
  }
  wgmma_wait<0>();
  registers_touch(d);
  if (threadIdx.x == 0) *clocks = (int)(clock64() - begin);
  for (int i = 0; i < kN / 2; ++i)
    if (d[i] == 12345.5f) out[0] = 0.0f;  // so that the compiler keeps the products
}

template <int kN>
static void run(void) {
  array<float> out = make_array<float>(kM * kN);
  array<int> owner = make_array<int>(kM * kN), clocks = make_array<int>(1);
  const int bytes = 1024 + (kM + kN) * kRowBytes;
  for (int i = 0; i < 2; ++i)
    multiply<kN><<<1, 128, bytes>>>(out.device, owner.device, clocks.device);
  to_host(out);
  to_host(owner);
  to_host(clocks);
  for (int row = 0; row < kM; ++row)
    for (int column = 0; column < kN; ++column) {
      float sum = 0.0f;
      for (int k = 0; k < kK; ++k) sum += a_of(row, k) * b_of(column, k);
      expect(out.host[row * kN + column] == sum, "a product");
    }
  if (kN == 128)
    for (int row : {0, 1, 7, 8, 16}) {
      printf("row %2d: columns 0 to 11 are in threads", row);
      for (int column = 0; column < 12; ++column) printf(" %d", owner.host[row * kN + column]);
      printf("\n");
    }
  const double each = (double)clocks.host[0] / kTimes;
  printf("64 x %3d x 16: right; %5.1f clocks each, %4.0f operations a clock\n", kN, each,
         2.0 * kM * kN * kK / each);
}

int main(void) {
  run<128>();
  run<64>();
  run<192>();
  return 0;
}
