// Barriers and rings of buffers in shared memory.
//
// A ring is `kDepth` buffers of `kBytes` that one side fills and the other reads, in order and over
// and over. Both sides count their uses of it from 0; use n takes buffer n % kDepth:
//
//   who fills                            who reads
//   ring_wait_empty(r, n)                ring_wait_full(r, n)
//   barrier_expect(ring_full(r, n), b)   reads ring_tile(r, n)
//   copies b bytes to ring_tile(r, n)    ring_release(r, n)
#ifndef FA3_RING_CUH
#define FA3_RING_CUH

#include "mbarrier.cuh"

// A phase ends when the arrivals that barrier_init asked for are in, and the bytes that were
// expected. Phases are counted from 0.
struct barrier {
  uint32_t address;  // of eight bytes of shared memory
};

__device__ __forceinline__ void barrier_init(barrier b, int arrivals) {
  mbarrier_init(b.address, arrivals);
}

__device__ __forceinline__ void barrier_arrive(barrier b) {
  mbarrier_arrive(b.address);
}

// Once for the whole warp.
__device__ __forceinline__ void barrier_arrive_warp(barrier b) {
  mbarrier_arrive_warp(b.address);
}

// Arrives, and makes the phase wait for this many bytes more.
__device__ __forceinline__ void barrier_expect(barrier b, int bytes) {
  mbarrier_arrive_expect(b.address, bytes);
}

// Returns when this phase is over. Nobody may be two phases ahead of who waits.
__device__ __forceinline__ void barrier_wait(barrier b, uint32_t phase) {
  mbarrier_wait(b.address, phase & 1);
}

template <int kDepth, int kBytes>
struct ring {
  uint32_t data;        // the buffers
  barrier full, empty;  // of the first buffer; those of the others follow, eight bytes each
};

// Bytes of its barriers.
template <int kDepth>
constexpr int kRingBarrierBytes = 16 * kDepth;

template <int kDepth, int kBytes>
__host__ __device__ constexpr ring<kDepth, kBytes> make_ring(uint32_t data, uint32_t barriers) {
  return {data, {barriers}, {barriers + 8 * kDepth}};
}

// Of rings that lie side by side, data behind data and barriers behind barriers, the one `i` after
// r.
template <int kDepth, int kBytes>
__device__ __forceinline__ ring<kDepth, kBytes> ring_beside(const ring<kDepth, kBytes> &r, int i) {
  const uint32_t barriers = r.full.address + i * kRingBarrierBytes<kDepth>;
  return make_ring<kDepth, kBytes>(r.data + i * kDepth * kBytes, barriers);
}

// `fillers` and `readers`: how many arrivals fill a buffer, and empty it. For one thread.
template <int kDepth, int kBytes>
__device__ __forceinline__ void ring_init(const ring<kDepth, kBytes> &r, int fillers, int readers) {
  for (int i = 0; i < kDepth; ++i) {
    mbarrier_init(r.full.address + 8 * i, fillers);
    mbarrier_init(r.empty.address + 8 * i, readers);
  }
}

template <int kDepth, int kBytes>
__device__ __forceinline__ uint32_t ring_tile(const ring<kDepth, kBytes> &r, uint32_t use) {
  return r.data + use % kDepth * kBytes;
}

template <int kDepth, int kBytes>
__device__ __forceinline__ barrier ring_full(const ring<kDepth, kBytes> &r, uint32_t use) {
  return {r.full.address + 8 * (use % kDepth)};
}

template <int kDepth, int kBytes>
__device__ __forceinline__ barrier ring_empty(const ring<kDepth, kBytes> &r, uint32_t use) {
  return {r.empty.address + 8 * (use % kDepth)};
}

template <int kDepth, int kBytes>
__device__ __forceinline__ void ring_wait_full(const ring<kDepth, kBytes> &r, uint32_t use) {
  barrier_wait(ring_full(r, use), use / kDepth);
}

// The first round waits for nothing.
template <int kDepth, int kBytes>
__device__ __forceinline__ void ring_wait_empty(const ring<kDepth, kBytes> &r, uint32_t use) {
  barrier_wait(ring_empty(r, use), use / kDepth + 1);
}

// For the whole warp, of which one lane fills the buffer. That lane may not be a round ahead of one
// that has yet to look: its phase would be over, and the next one never come.
template <int kDepth, int kBytes>
__device__ __forceinline__ void ring_claim(const ring<kDepth, kBytes> &r, uint32_t use) {
  ring_wait_empty(r, use);
  __syncwarp();
}

// For the whole warp: it has read the buffer for the last time.
template <int kDepth, int kBytes>
__device__ __forceinline__ void ring_release(const ring<kDepth, kBytes> &r, uint32_t use) {
  barrier_arrive_warp(ring_empty(r, use));
}

#endif
