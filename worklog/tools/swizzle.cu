// Swizzle: where TMA puts the eight units of 16 bytes of each row of 128 bytes, and how long it
// takes to read a column of units, from eight rows, with and without.
#include "mbarrier.cuh"
#include "tma.cuh"
#include "tools.cuh"

constexpr int kRows = 8, kUnits = 8, kWords = 4, kTimes = 256, kThreads = 256;

// PTX ISA, "ld": a unit, 16 bytes of shared memory. Volatile, or the assembler would load it once.
static __device__ __forceinline__ uint32_t load_unit(uint32_t address) {
  uint32_t x, y, z, w;
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(address)
               : "memory");
  return x + y + z + w;
}

static __global__ void place_and_read(const __grid_constant__ CUtensorMap map, bool swizzled,
                                      uint32_t *place, uint32_t *sums, int *clocks) {
  __shared__ alignas(1024) uint32_t tile[kRows * kUnits * kWords];
  __shared__ uint64_t full;
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(&full);
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, sizeof(tile));
    tma_load_4d(base, &map, barrier, 0, 0, 0, 0);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < kRows * kUnits; i += kThreads) place[i] = tile[i * kWords];

  // A warp reads units 0 to 3 of all rows: eight threads at a time read the same unit.
  const int lane = threadIdx.x % 32, row = lane % 8, unit = swizzled ? lane / 8 ^ row : lane / 8;
  const uint32_t address = base + row * 128 + unit * 16;
  uint32_t sum = 0;
  __syncthreads();
  const int64_t begin = clock64();
#pragma unroll 8
  for (int i = 0; i < kTimes; ++i) sum += load_unit(address);
  asm volatile("" ::"r"(sum) : "memory");  // the sum is there before the clock is read
  __syncthreads();
  if (threadIdx.x == 0) *clocks = (int)(clock64() - begin);
  if (threadIdx.x < 32) sums[threadIdx.x] = sum;
}

int main(void) {
  array<uint32_t> tensor = make_array<uint32_t>(kRows * kUnits * kWords);
  array<uint32_t> place = make_array<uint32_t>(kRows * kUnits), sums = make_array<uint32_t>(32);
  array<int> clocks = make_array<int>(1);
  for (int i = 0; i < kRows * kUnits * kWords; ++i) tensor.host[i] = i / kWords % kUnits;
  to_device(tensor);
  for (int swizzled = 0; swizzled < 2; ++swizzled) {
    const CUtensorMap map =
        map_of_rows(tensor.device, kRows, kUnits * kWords, kRows, kUnits * kWords,
                    swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE);
    for (int i = 0; i < 2; ++i)  // the second time is the one that counts
      place_and_read<<<1, kThreads>>>(map, swizzled, place.device, sums.device, clocks.device);
    to_host(place);
    to_host(sums);
    to_host(clocks);
    printf("%s: the units of each row, in the order of their places\n",
           swizzled ? "\nswizzled" : "as they come");
    for (int i = 0; i < kRows * kUnits; ++i) {
      const int row = i / kUnits, at = i % kUnits;
      expect((int)place.host[i] == (swizzled ? at ^ row : at), "the place of a unit");
      if (at == 0) printf("  row %d: ", row);
      printf("%2u%s", place.host[i], at == kUnits - 1 ? "\n" : "");
    }
    for (int lane = 0; lane < 32; ++lane)
      expect(sums.host[lane] == (uint32_t)(kTimes * kWords * (lane / 8)), "what was read");
    printf("  a warp reads a unit of all rows in %.1f clocks\n",
           (double)clocks.host[0] / kTimes / (kThreads / 32) / 4);
  }
  return 0;
}
