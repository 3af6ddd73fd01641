// TMA: one thread asks for a box of a tensor. The tensor has 10 rows of 12 numbers, row r and
// column c hold 100 r + c; the box of 4 rows by 8 columns begins at row 7 and column 8, and so
// runs over two edges.
#include "mbarrier.cuh"
#include "tma.cuh"
#include "tools.cuh"

constexpr int kRows = 10, kColumns = 12, kBoxRows = 4, kBoxColumns = 8, kRow = 7, kColumn = 8;

static __global__ void copy_box(const __grid_constant__ CUtensorMap map, uint32_t *to) {
  __shared__ alignas(128) uint32_t box[kBoxRows * kBoxColumns];
  __shared__ uint64_t full;
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(&full);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, sizeof(box));
    tma_load_4d((uint32_t)__cvta_generic_to_shared(box), &map, barrier, kColumn, kRow, 0, 0);
  }
  __syncthreads();            // the barrier exists
  mbarrier_wait(barrier, 0);  // the box is here
  to[threadIdx.x] = box[threadIdx.x];
}

int main(void) {
  array<uint32_t> tensor = make_array<uint32_t>(kRows * kColumns);
  array<uint32_t> box = make_array<uint32_t>(kBoxRows * kBoxColumns);
  for (int i = 0; i < kRows * kColumns; ++i) tensor.host[i] = i / kColumns * 100 + i % kColumns;
  to_device(tensor);
  copy_box<<<1, kBoxRows * kBoxColumns>>>(map_of_rows(tensor.device, kRows, kColumns, kBoxRows,
                                                      kBoxColumns, CU_TENSOR_MAP_SWIZZLE_NONE),
                                          box.device);
  to_host(box);
  for (int i = 0; i < kBoxRows * kBoxColumns; ++i) {
    const int row = kRow + i / kBoxColumns, column = kColumn + i % kBoxColumns;
    const uint32_t there = row < kRows && column < kColumns ? row * 100 + column : 0;
    expect(box.host[i] == there, "the box");
    printf("%5u%s", box.host[i], i % kBoxColumns == kBoxColumns - 1 ? "\n" : "");
  }
  return 0;
}
