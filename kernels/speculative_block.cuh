// What a block of speculative_fp8.cu has in shared memory, and its threads in registers.
#ifndef FA3_SPECULATIVE_BLOCK_CUH
#define FA3_SPECULATIVE_BLOCK_CUH

#include "chunk_block.cuh"
#include "decode_deal.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

constexpr int kGroups = FA3_SPECULATIVE_FP8_GROUPS;
constexpr int kThreads = 128 * kGroups;
constexpr int kGroupWarps = 4;
constexpr int kBlocks = kHeadDim / 64;  // of columns of V: rows of a product
static_assert(kUnitKeys == kGroupWarps * kLoadKeys && kRows == FA3_SPECULATIVE_FP8_ROWS, "a tile");

constexpr uint32_t kDescriptorHigh = wgmma_descriptor_high<kBlockBytes>();
constexpr int kQBytes = kRows * kHeadDim * 2;
constexpr int kPBytes = kRows * kBlockBytes;

constexpr int kPitch = kHeadDim + 4;  // of the output, in floats

// Named barriers, of each warpgroup; 0 is __syncthreads.
enum { kBarrierGroup = 1 };

struct layout {
  uint32_t q;
  uint32_t p;       // kPBytes for each warpgroup
  uint32_t codes;   // kRingBytes for each warp
  uint32_t maxima;  // of each warp, a float for each row
  // A float for each row each: the factor that makes logits of products, but for scales of keys;
  // the same with the one scale of all keys, where they are alike; room_of_products of that one.
  uint32_t factors, whole_factors, rooms;
  uint32_t results;  // of each warp, the top and sum of each row
  uint32_t scales;   // where those of keys are, and of values
  uint32_t work;
  uint32_t deal;  // what is left to do, where keys are dealt out
  barrier met;    // by all threads, an even number of times for each tile of rows
  uint32_t end;
};

__host__ __device__ constexpr layout lay_out(uint32_t base) {
  layout m = {};
  m.q = base;
  m.p = m.q + kQBytes;
  m.codes = m.p + kGroups * kPBytes;
  m.maxima = m.codes + kGroups * kGroupWarps * kRingBytes;
  m.factors = m.maxima + kGroups * kGroupWarps * kRows * 4;
  m.whole_factors = m.factors + kRows * 4;
  m.rooms = m.whole_factors + kRows * 4;
  m.results = m.rooms + kRows * 4;
  m.scales = m.results + kGroups * kGroupWarps * kRows * 8;
  m.work = m.scales + 2 * sizeof(lane_scales);
  m.deal = (m.work + (uint32_t)sizeof(block_work) + 15) / 16 * 16;
  m.met = {m.deal + deal_bytes(kThreads / 32)};
  m.end = m.met.address + 8;
  return m;
}

constexpr int kSharedBytes = lay_out(0).end;
constexpr int kSharedBytesByHost = FA3_SPECULATIVE_FP8_SHARED_BYTES(kRows, kHeadDim, kStages);
static_assert(kSharedBytes <= kSharedBytesByHost &&
                  (kSharedBytesByHost + 1024) * FA3_SPECULATIVE_FP8_BLOCKS <= 233472,
              "shared memory");
static_assert(kGroups * kRows * kPitch * 4 <= (int)lay_out(0).maxima, "room for the output");

// All threads of the block meet: time number 0, 1, ... for a tile of rows. Not by __syncthreads:
// racecheck loses count of that barrier where warpgroups have passed different numbers of named
// barriers. The two that attend has are left, since the kernel would spill with mbarriers there.
__device__ __forceinline__ void meet(const layout &m, uint32_t time) {
  barrier_arrive(m.met);
  barrier_wait(m.met, time % 2);
}

// What lies there in shared memory, by an address that is found anew each time, and takes no
// registers meanwhile. PTX ISA, "cvta".
template <class type>
__device__ __forceinline__ type &at_shared(uint32_t address) {
  uint64_t generic;
  asm volatile("cvta.shared.u64 %0, %1;" : "=l"(generic) : "l"((uint64_t)address));
  return *(type *)generic;
}

// What the block does, of which nothing is kept in registers; with kDealt nor is where that is.
template <bool kDealt>
__device__ __forceinline__ const block_work &work_again(const block_work &w, const layout &m) {
  if constexpr (kDealt) return at_shared<block_work>(m.work);
  return again(w);
}

__device__ __forceinline__ uint32_t ring_of_warp(const layout &m) {
  return m.codes + thread_again() / 32 * kRingBytes;
}

// What a warpgroup's thread has in hand. It has rows 8j + 2 (lane % 4) + e, number 2j + e of its
// own: all of them columns of products.
constexpr int kOwnRows = kRows / 4;
struct consumer {
  float s[kRows / 2];  // S^T, then P^T: [4j + 2r + e] is of key lane / 4 + 8r of the warp's
  // O^T: of the warp's 16 columns of 64, number 2 (lane / 4) + r
  float o[kBlocks][kRows / 2];
  // As in chunk_fp8.cu. The sum is of this thread's keys.
  float top[kOwnRows], sum[kOwnRows], unit[kOwnRows];
};

__device__ __forceinline__ int row_of_score(int i) {
  return i / 4 * 2 + i % 2;
}

__device__ __forceinline__ int own_row(int n) {
  return n / 2 * 8 + 2 * (thread_again() & 3) + n % 2;
}

#endif
