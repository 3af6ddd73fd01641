// mbarrier: a ring of two buffers between a warp that loads and a warp that computes. Each notes
// the clock at which something happens. To use a tile takes 3000 clocks here.
#include "mbarrier.cuh"
#include "tma.cuh"
#include "tools.cuh"

constexpr int kTiles = 6, kStages = 2, kRows = 64, kColumns = 32, kUse = 3000;
constexpr int kTileWords = kRows * kColumns;

struct times {
  int64_t asked, arrived, released;
};

static __global__ void ring(const __grid_constant__ CUtensorMap map, times *t, uint32_t *sums) {
  __shared__ alignas(128) uint32_t buffer[kStages][kTileWords];
  __shared__ uint64_t full[kStages], empty[kStages];
  const uint32_t full_at = (uint32_t)__cvta_generic_to_shared(full);
  const uint32_t empty_at = (uint32_t)__cvta_generic_to_shared(empty);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full_at + 8 * i, 1);   // one arrival: the thread that asks
      mbarrier_init(empty_at + 8 * i, 1);  // one arrival: the warp that has read
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x == 0) {  // the producer
    for (int i = 0; i < kTiles; ++i) {
      const int stage = i % kStages, parity = i / kStages % 2;
      mbarrier_wait(empty_at + 8 * stage, parity ^ 1);  // at once in the first round
      t[i].asked = clock64();
      mbarrier_arrive_expect(full_at + 8 * stage, sizeof(buffer[0]));
      tma_load_4d((uint32_t)__cvta_generic_to_shared(buffer[stage]), &map, full_at + 8 * stage, 0,
                  i * kRows, 0, 0);
    }
  } else if (threadIdx.x >= 32) {  // the consumer: a warp
    const int lane = threadIdx.x - 32;
    for (int i = 0; i < kTiles; ++i) {
      const int stage = i % kStages, parity = i / kStages % 2;
      mbarrier_wait(full_at + 8 * stage, parity);
      const int64_t arrived = clock64();
      uint32_t sum = 0;
      for (int j = lane; j < kTileWords; j += 32) sum += buffer[stage][j];
      atomicAdd(&sums[i], sum);
      while (clock64() - arrived < kUse) {
      }
      __syncwarp();
      if (lane == 0) {
        t[i].arrived = arrived;
        t[i].released = clock64();
        mbarrier_arrive(empty_at + 8 * stage);
      }
    }
  }
}

int main(void) {
  array<uint32_t> tensor = make_array<uint32_t>(kTiles * kTileWords);
  array<uint32_t> sums = make_array<uint32_t>(kTiles);
  array<times> t = make_array<times>(kTiles);
  for (int i = 0; i < kTiles * kTileWords; ++i) tensor.host[i] = i / kTileWords + 1;
  to_device(tensor);
  const CUtensorMap map = map_of_rows(tensor.device, kTiles * kRows, kColumns, kRows, kColumns,
                                      CU_TENSOR_MAP_SWIZZLE_NONE);
  for (int i = 0; i < 2; ++i) {  // the second time, code and tensor are in the caches
    to_device(sums);             // zeros
    ring<<<1, 64>>>(map, t.device, sums.device);
  }
  to_host(sums);
  to_host(t);
  const int64_t begin = t.host[0].asked;
  printf("clocks     asked for  found full  released\n");
  for (int i = 0; i < kTiles; ++i) {
    expect(sums.host[i] == (uint32_t)((i + 1) * kTileWords), "the sum of a tile");
    const times &one = t.host[i];
    printf("tile %d %12lld %11lld %9lld\n", i, (long long)(one.asked - begin),
           (long long)(one.arrived - begin), (long long)(one.released - begin));
  }
  return 0;
}
