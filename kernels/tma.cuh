// The bulk tensor copy engine (PTX ISA, "Data Movement and Conversion
// Instructions: Tensor copy"). Loads report their bytes to an mbarrier; stores
// are gathered in groups that the issuing thread can wait for.
#ifndef FA3_TMA_CUH
#define FA3_TMA_CUH

#include <stdint.h>

// PTX ISA, "prefetch{.tensormap}".
__device__ __forceinline__ void tma_prefetch_map(const void *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA, "cp.async.bulk.tensor", global to shared, five dimensions.
__device__ __forceinline__ void tma_load_5d(uint32_t to, const void *map, uint32_t barrier, int c0,
                                            int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same, four dimensions.
__device__ __forceinline__ void tma_load_4d(uint32_t to, const void *map, uint32_t barrier, int c0,
                                            int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// PTX ISA, "cp.async.bulk.prefetch.tensor", to the L2 cache.
__device__ __forceinline__ void tma_prefetch_4d(const void *map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// PTX ISA, "cp.async.bulk", global to shared: a plain run of bytes, a multiple of 16, as are both
// addresses.
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same, shared to global.
__device__ __forceinline__ void bulk_store(void *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// PTX ISA, "cp.async.bulk.tensor", shared to global, five dimensions. What lies
// outside the tensor is not written.
__device__ __forceinline__ void tma_store_5d(const void *map, uint32_t from, int c0, int c1, int c2,
                                             int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// PTX ISA, "cp.async.bulk.commit_group".
__device__ __forceinline__ void tma_store_commit(void) {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// PTX ISA, "cp.async.bulk.wait_group" with .read: this thread's stores, but for
// the latest `kPending` groups, no longer read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read(void) {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// PTX ISA, "fence.proxy.async": ordinary writes to shared memory before it are
// seen by the copy engine and by wgmma after it.
__device__ __forceinline__ void fence_proxy_async(void) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Where the swizzle puts a row's 16 bytes number 0; number u lies at that address ^ 16 u.
template <int kBytes>
__device__ __forceinline__ uint32_t swizzled_row(int row) {
  return row * kBytes + ((kBytes == 128  ? row & 7
                          : kBytes == 64 ? row >> 1 & 3
                                         : row >> 2 & 1)
                         << 4);
}

// Zeros in a tile from row `first` on, where the copy engine has left rows behind the sequence's
// end, or none: what they are multiplied by is 0, but 0 * NaN would be NaN. For one warp.
template <int kChunks, int kRows, int kRowBytes>
__device__ __forceinline__ void clear_rows(uint32_t tile, int first) {
  constexpr int kUnits = kRowBytes / 16;
  for (int c = 0; c < kChunks; ++c)
    for (int i = first * kUnits + (threadIdx.x & 31); i < kRows * kUnits; i += 32)
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + c * kRows * kRowBytes + i * 16),
          "r"(0)
          : "memory");
  fence_proxy_async();
  __syncwarp();
}

#endif
