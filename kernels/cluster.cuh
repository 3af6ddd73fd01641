// Two blocks that run together and reach into each other's shared memory (PTX ISA,
// "Cluster of Cooperative Thread Arrays"). An address of the block's own shared
// memory, mapped, is the same place in another block of the cluster.
#ifndef FA3_CLUSTER_CUH
#define FA3_CLUSTER_CUH

#include <stdint.h>

// PTX ISA, "%cluster_ctarank".
__device__ __forceinline__ uint32_t cluster_rank(void) {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA, "%cluster_nctaid": 1 where the launch has no clusters.
__device__ __forceinline__ uint32_t cluster_size(void) {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}

// PTX ISA, "barrier.cluster": all threads of the cluster.
__device__ __forceinline__ void cluster_sync(void) {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// PTX ISA, "barrier.cluster" in two halves, without an order of memory: after a fence of the
// barriers that a block has set up, it tells the others that they are there.
__device__ __forceinline__ void cluster_announce(void) {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait_announced(void) {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// PTX ISA, "mapa".
__device__ __forceinline__ uint32_t cluster_map(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// PTX ISA, "ld" of a mapped address.
__device__ __forceinline__ uint32_t cluster_load_word(uint32_t mapped) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(mapped) : "memory");
  return x;
}

__device__ __forceinline__ double cluster_load_double(uint32_t mapped) {
  double x;
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(x) : "r"(mapped) : "memory");
  return x;
}

// PTX ISA, "mbarrier.arrive" on a mapped address. It orders nothing that other blocks write or
// read by ordinary instructions (a wider scope would cost a fence of the whole device): it may
// overtake this thread's own loads. Who gives memory away by it waits for what was read there.
__device__ __forceinline__ void cluster_arrive(uint32_t mapped_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}

// PTX ISA, "st.async": four bytes, which a barrier beside them counts.
__device__ __forceinline__ void cluster_store(uint32_t mapped, int value, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(mapped),
      "r"(value), "r"(mapped_barrier)
      : "memory");
}

// The same, 16 bytes, and 8.
__device__ __forceinline__ void cluster_store(uint32_t mapped, float4 x, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(mapped),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mapped_barrier)
      : "memory");
}

__device__ __forceinline__ void cluster_store(uint32_t mapped, float2 x, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          mapped),
      "f"(x.x), "f"(x.y), "r"(mapped_barrier)
      : "memory");
}

// PTX ISA, "cp.async.bulk", from the block's own shared memory to a mapped address.
__device__ __forceinline__ void cluster_copy(uint32_t mapped, uint32_t from, uint32_t bytes,
                                             uint32_t mapped_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(mapped),
      "r"(from), "r"(bytes), "r"(mapped_barrier)
      : "memory");
}

// PTX ISA, "cp.async.bulk.tensor" with .multicast: the tile lands in both blocks, at
// the same place, and is reported to the barrier at the same place.
__device__ __forceinline__ void tma_load_both_4d(uint32_t to, const void *map, uint32_t barrier,
                                                 int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"((uint16_t)3)
      : "memory");
}

#endif
