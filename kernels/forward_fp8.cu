// The forward pass on Hopper from E4M3 codes: O = softmax(scale Q K^T) V, where a row of Q, K or V
// is codes times a scale.
//
// The structure is forward.cu's, which see first. What is different:
//   - V is transposed on the way in (forward_fp8_transpose.cuh; of head dim 256
//     forward_fp8_transpose_chunks.cuh), as FP8 products take operands that run along K only. Of
//     head dim 256 values that are used often are transposed before, by a kernel of their own
//     (transpose_values.cu).
//   - P are codes too, of 2^7 (or 2^5) times the probability: the greatest is exact, and what is
//     2^-13 (or 2^-11) of it is still a normal number.
//   - The matrix unit's sums keep about 13 bits. So every kPeriod tiles O joins float32 sums, which
//     a thread keeps for itself in memory.
//   - There is room for a third consumer at head dims up to 128.
//
// Keys and values may lie in pages (FA3_PAGES).
//
// The consumers have one of two loops: forward_fp8_heads.cuh where keys and values have no scale of
// fewer rows than a sequence's, forward_fp8_turns.cuh for any scales.
#include "forward_fp8_load.cuh"
#if !FA3_TRANSPOSED && FA3_HEAD_DIM > 128
#include "forward_fp8_transpose_chunks.cuh"
#elif !FA3_TRANSPOSED
#include "forward_fp8_transpose.cuh"
#endif
#if FA3_HEAD_SCALES
#include "forward_fp8_heads.cuh"
#else
#include "forward_fp8_turns.cuh"
#endif

constexpr int kSchedulingWarp = 1;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    forward_fp8(const __grid_constant__ fa3_forward_fp8_params params) {
  // Opaque, so that the compiler keeps it in a register instead of finding out
  // again and again.
  uint32_t base;
  asm volatile("mov.b32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(shared)));
  const layout m = lay_out(base);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    tma_prefetch_map(&params.forward.query);
    tma_prefetch_map(&params.forward.key);
    tma_prefetch_map(&params.forward.value);
    if (params.output != FA3_OUTPUT_FP32) tma_prefetch_map(&params.forward.output);
    init_barriers(params, m);
  }
  if (warp == 0) clear_spare_queries<kCodeChunks, kCodes>(params.forward, m);
  // The scheduling warp finds the number of its first tile while barriers are made.
  const auto begin = [=] {
    if (warp == kSchedulingWarp) {
      named_barrier_sync(kBarrierSchedule, 64);
    } else {
      if (warp == 0) named_barrier_arrive(kBarrierSchedule, 64);
      named_barrier_sync(kBarrierBegin, kThreads - 32);
    }
    // And never tells the next to begin early: it may use the same counter of tiles. The kernel
    // that transposes values lets this one begin when all before has ended: only the warp that
    // loads V^T waits for it.
    if (!kTransposed) wait_for_prior_grids();
  };
  if (warp != kSchedulingWarp) begin();

  if (warp < 4) {
    registers_give_back<kProducerRegisters>();
    if (warp == 0)
      load(params, m);
    else if (warp == kSchedulingWarp)
      schedule(params.forward, m, begin,
               [&](uint32_t tile, bool last) { add_work_scales(params, m, tile, last); });
#if !FA3_TRANSPOSED
    else
      transpose_values(m, warp - 2);
#endif
  } else {
    registers_take<kConsumerRegisters>();
    attend(params, m, warp / 4 - 1);
  }
}
