#include "bench_read.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "progress.h"

/* What threads take at a time, as they take tasks of a call. */
enum { CHUNK = 256 << 10 };

struct reading {
  struct memory memory[2];
  int64_t chunks[2]; /* of each */
  int64_t all;       /* of all passes */
  atomic_llong next;
  atomic_bool begun;
  atomic_ullong sum; /* so that the compiler has to read */
};

/* Several sums, which need not wait for each other. */
static uint64_t sum_of(const char *data, size_t size) {
  enum { SUMS = 16 };
  const uint64_t *words = (const uint64_t *)(const void *)data;
  const size_t count = size / sizeof *words;
  uint64_t sums[SUMS] = {0};
  for (size_t i = 0; i + SUMS <= count; i += SUMS)
    for (size_t s = 0; s < SUMS; s++) sums[s] += words[i + s];
  uint64_t sum = 0;
  for (size_t s = 0; s < SUMS; s++) sum += sums[s];
  return sum;
}

static void take_chunks(struct reading *reading) {
  uint64_t sum = 0;
  const int64_t of_pass = reading->chunks[0] + reading->chunks[1];
  for (int64_t taken; (taken = atomic_fetch_add(&reading->next, 1)) < reading->all;) {
    const int64_t chunk = taken % of_pass;
    const bool second = chunk >= reading->chunks[0];
    const struct memory *memory = &reading->memory[second];
    const size_t begin = (size_t)(chunk - (second ? reading->chunks[0] : 0)) * CHUNK;
    const size_t left = memory->size - begin;
    sum += sum_of((const char *)memory->data + begin, left < CHUNK ? left : CHUNK);
  }
  atomic_fetch_add(&reading->sum, sum);
}

static void *help(void *argument) {
  struct reading *reading = argument;
  while (!atomic_load(&reading->begun)) sched_yield();
  take_chunks(reading);
  return NULL;
}

double bench_read(const struct memory memory[2], int64_t passes, int32_t threads) {
  struct reading reading = {.memory = {memory[0], memory[1]}};
  pthread_t *helpers = malloc((size_t)threads * sizeof *helpers);
  if (!helpers) return -1;
  for (int i = 0; i < 2; i++) reading.chunks[i] = (int64_t)((memory[i].size + CHUNK - 1) / CHUNK);
  reading.all = passes * (reading.chunks[0] + reading.chunks[1]);
  int32_t started = 0;
  while (started < threads - 1 && pthread_create(&helpers[started], NULL, help, &reading) == 0)
    started++;
  const double start = seconds_now();
  atomic_store(&reading.begun, true);
  take_chunks(&reading);
  for (int32_t t = 0; t < started; t++) (void)pthread_join(helpers[t], NULL);
  const double seconds = seconds_now() - start;
  free(helpers);
  return started < threads - 1 ? -1 : seconds / (double)passes;
}
