/* How long fa3_forward and fa3_backward keep the calling thread on a GPU, with everything loaded:
 * the median over many calls of a small problem, queued without waiting. Other work on the host
 * only adds to it, so that of several rounds the shortest is what the calls cost; the longest is
 * printed beside it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fa3.h"

enum { ROUNDS = 7, CALLS = 1000, IN_FLIGHT = 50 };

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

/* One call of either pass. */
struct call {
  const char *name;
  fa3_forward_args forward;
  fa3_backward_args backward;
  int is_backward;
};

static int run(const struct call *call) {
  fa3_status status =
      call->is_backward ? fa3_backward(&call->backward) : fa3_forward(&call->forward);
  if (status) printf("%s: %s\n", call->name, fa3_last_error());
  return status;
}

static int measure_round(const struct call *call, int (*synchronize)(void), double *median) {
  static double times[CALLS];
  for (int i = 0; i < CALLS; i++) {
    if (i % IN_FLIGHT == 0) synchronize();
    double start = seconds();
    if (run(call)) return 1;
    times[i] = seconds() - start;
  }
  synchronize();
  qsort(times, CALLS, sizeof *times, compare);
  *median = times[CALLS / 2];
  return 0;
}

static int measure(const struct call *call, int (*synchronize)(void)) {
  double medians[ROUNDS];
  for (int i = 0; i < ROUNDS; i++)
    if (measure_round(call, synchronize, &medians[i])) return 1;
  qsort(medians, ROUNDS, sizeof *medians, compare);
  printf("%s: %.2f us of host time a call (the slowest of %d rounds: %.2f us)\n", call->name,
         1e6 * medians[0], ROUNDS, 1e6 * medians[ROUNDS - 1]);
  return 0;
}

/* Of the problem, which is small, but has more tiles than a GPU has multiprocessors. */
enum { SEQLEN = 128, HEADS = 160, HEAD_DIM = 128 };

/* Memory in places that hold a tensor each; the workspace has what follows them. */
enum { PLACE_BYTES = 1 << 23, PLACES = 9, WORKSPACE_BYTES = 1 << 25 };

static char *place(char *memory, size_t number) {
  return memory + number * PLACE_BYTES;
}

static fa3_tensor tensor(char *memory, size_t number) {
  return fa3_dense(place(memory, number), FA3_BFLOAT16, 1, SEQLEN, HEADS, HEAD_DIM);
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
  if (retain(&context, 0) || set_current(context) ||
      allocate(&memory, (size_t)PLACES * PLACE_BYTES + WORKSPACE_BYTES) || create(&stream, 1))
    return 1;
  char *at = (char *)memory;
  struct call call = {.forward = {.struct_size = sizeof call.forward,
                                  .device = device,
                                  .stream = stream,
                                  .query = tensor(at, 0),
                                  .key = tensor(at, 1),
                                  .value = tensor(at, 2),
                                  .output = tensor(at, 3),
                                  .workspace = place(at, PLACES),
                                  .workspace_size = WORKSPACE_BYTES},
                      .backward = {.struct_size = sizeof call.backward,
                                   .device = device,
                                   .stream = stream,
                                   .query = tensor(at, 0),
                                   .key = tensor(at, 1),
                                   .value = tensor(at, 2),
                                   .output = tensor(at, 3),
                                   .lse = fa3_lse(place(at, 4), 1, HEADS, SEQLEN),
                                   .grad_output = tensor(at, 5),
                                   .grad_query = tensor(at, 6),
                                   .grad_key = tensor(at, 7),
                                   .grad_value = tensor(at, 8),
                                   .workspace = place(at, PLACES),
                                   .workspace_size = WORKSPACE_BYTES}};
  static const char *const names[] = {"forward, full", "forward, causal", "backward, full",
                                      "backward, causal"};
  for (int kind = 0; kind < 4; kind++) {
    call.name = names[kind];
    call.is_backward = kind / 2;
    call.forward.flags = call.backward.flags = kind % 2 ? FA3_CAUSAL : 0;
    if (measure(&call, synchronize)) return 1;
  }
  return 0;
}
