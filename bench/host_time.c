/* How long fa3_forward keeps the calling thread on a GPU, with everything loaded: the median over
 * many calls of a small problem, queued without waiting. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fa3.h"

enum { CALLS = 2000, IN_FLIGHT = 50 };

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void *function(const char *name) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
  return library ? dlsym(library, name) : NULL;
}

int main(void) {
  const fa3_device device = {FA3_CUDA, 0};
  if (fa3_prepare(device)) {
    printf("%s\n", fa3_last_error());
    return 1;
  }
  int (*retain)(void **, int), (*set_current)(void *), (*allocate)(uint64_t *, size_t),
      (*synchronize)(void), (*create)(void **, unsigned);
  *(void **)&retain = function("cuDevicePrimaryCtxRetain");
  *(void **)&set_current = function("cuCtxSetCurrent");
  *(void **)&allocate = function("cuMemAlloc_v2");
  *(void **)&synchronize = function("cuCtxSynchronize");
  *(void **)&create = function("cuStreamCreate");
  void *context, *stream;
  uint64_t memory;
  if (retain(&context, 0) || set_current(context) || allocate(&memory, 1 << 24) ||
      create(&stream, 1))
    return 1;
  for (int causal = 0; causal < 2; causal++) {
    char *at = (char *)memory;
    fa3_forward_args args = {.struct_size = sizeof args, .device = device, .stream = stream};
    args.query = fa3_dense(at, FA3_BFLOAT16, 1, 128, 16, 128);
    args.key = fa3_dense(at + (1 << 20), FA3_BFLOAT16, 1, 128, 16, 128);
    args.value = fa3_dense(at + (2 << 20), FA3_BFLOAT16, 1, 128, 16, 128);
    args.output = fa3_dense(at + (3 << 20), FA3_BFLOAT16, 1, 128, 16, 128);
    args.flags = causal ? FA3_CAUSAL : 0;
    args.workspace = at + (4 << 20);
    args.workspace_size = 1 << 20;
    static double times[CALLS];
    for (int i = 0; i < CALLS; i++) {
      if (i % IN_FLIGHT == 0) synchronize();
      double start = seconds();
      if (fa3_forward(&args)) {
        printf("%s\n", fa3_last_error());
        return 1;
      }
      times[i] = seconds() - start;
    }
    synchronize();
    qsort(times, CALLS, sizeof *times, compare);
    printf("%s: median %.2f us, 90%% below %.2f us of host time a call\n",
           causal ? "causal" : "full", 1e6 * times[CALLS / 2], 1e6 * times[CALLS * 9 / 10]);
  }
  return 0;
}
