/* The processor's matrix rate: the multiply-adds that registers alone can feed, on all threads.
 * Prints one line for each level that this processor has: its name and GFLOP/s. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cpu/level.h"
#include "cpu/processors.h"
#include "cpu/threads.h"

#ifdef FA3_X86
#include <immintrin.h>

/* Enough independent sums to hide the latency of one. */
enum { SUMS = 12, ROUNDS = 1 << 20, REPEATS = 10 };

/* The compiler has to compute it. */
#define KEEP(sum) __asm__ volatile("" ::"v"(sum))

__attribute__((target("avx2,fma"))) static void avx2(void) {
  __m256 sums[SUMS], one = _mm256_set1_ps(1);
  for (int i = 0; i < SUMS; i++) sums[i] = _mm256_setzero_ps();
  for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) sums[i] = _mm256_fmadd_ps(one, one, sums[i]);
  }
#pragma GCC unroll 12
  for (int i = 0; i < SUMS; i++) KEEP(sums[i]);
}

__attribute__((target("avx512f"))) static void avx512(void) {
  __m512 sums[SUMS], one = _mm512_set1_ps(1);
  for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_ps();
  for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_fmadd_ps(one, one, sums[i]);
  }
#pragma GCC unroll 12
  for (int i = 0; i < SUMS; i++) KEEP(sums[i]);
}

__attribute__((target("avx512f,avx512bf16"))) static void avx512bf16(void) {
  __m512 sums[SUMS];
  __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_ps();
  for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], one, one);
  }
#pragma GCC unroll 12
  for (int i = 0; i < SUMS; i++) KEEP(sums[i]);
}

/* Four sums hide TDPBF16PS's latency as in src/cpu/amx.c. */
__attribute__((target("amx-tile,amx-bf16"))) static void amx(void) {
  /* Palette 1, 64 bytes a row, 16 rows; constant for the reason given in src/cpu/amx.c. */
  static const unsigned char config[64] = {
      1,         [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64,
      [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16,
  };
  _tile_loadconfig(config);
  _tile_zero(4);
  _tile_zero(5);
  for (int round = 0; round < ROUNDS; round++) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}

static const struct {
  const char *level;
  void (*loop)(void);
  double flops; /* of one round */
} loops[] = {
    {"avx2", avx2, SUMS * 8.0 * 2},
    {"avx512", avx512, SUMS * 16.0 * 2},
    {"avx512bf16", avx512bf16, SUMS * 32.0 * 2},
    {"amx", amx, 4 * 16.0 * 16 * 32 * 2},
};

static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

struct loop {
  void (*run)(void);
};

static void run_loop(void *loop, int64_t task, int32_t seat) {
  (void)task;
  (void)seat;
  ((const struct loop *)loop)->run();
}

/* The best of several: what the processor can do when nothing disturbs it. */
static double rate(void (*loop)(void), double flops) {
  const int32_t threads = default_threads();
  double best = 0;
  for (int repeat = 0; repeat < REPEATS; repeat++) {
    double start = now();
    threads_for(threads, threads, run_loop, &(struct loop){loop});
    double reached = flops * ROUNDS * threads / (now() - start);
    if (reached > best) best = reached;
  }
  return best;
}

int main(void) {
  for (size_t i = 0; i < sizeof loops / sizeof *loops; i++)
    for (int32_t l = 0; l < cpu_level_count; l++)
      if (strcmp(cpu_levels[l].name, loops[i].level) == 0 && cpu_levels[l].usable())
        printf("%s %.1f\n", loops[i].level, rate(loops[i].loop, loops[i].flops) * 1e-9);
  return 0;
}

#else
int main(void) {
  return 0;
}
#endif
