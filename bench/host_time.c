/* How long calls keep the calling thread on a GPU, with everything loaded: both passes, one token
 * of each sequence with a cache in pages, and the append before it. The median over many calls of a
 * small problem, queued without waiting. Other work on the host only adds to it, so that of several
 * rounds the shortest is what the calls cost; the longest is printed beside it. */
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

/* A call of one of these. */
struct call {
  const char *name;
  const fa3_forward_args *forward;
  const fa3_backward_args *backward;
  const fa3_append_args *append;
};

static int run(const struct call *call) {
  fa3_status status = call->forward    ? fa3_forward(call->forward)
                      : call->backward ? fa3_backward(call->backward)
                                       : fa3_append(call->append);
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

/* Of the problem of both passes, which is small, but has more tiles than a GPU has multiprocessors;
 * and of the cache. */
enum { SEQLEN = 128, HEADS = 160, HEAD_DIM = 128 };
enum { BATCH = 4, HEADS_Q = 32, HEADS_K = 8, PAGE_SIZE = 64, PAGES = 16 };

/* Memory in slots that hold a tensor each; the workspace has what follows them. */
enum { SLOT_BYTES = 1 << 23, SLOTS = 9, WORKSPACE_BYTES = 1 << 27 };

static char *slot(char *memory, size_t number) {
  return memory + number * SLOT_BYTES;
}

static fa3_tensor tensor(char *memory, size_t number) {
  return fa3_dense(slot(memory, number), FA3_BFLOAT16, 1, SEQLEN, HEADS, HEAD_DIM);
}

static fa3_tensor tokens(char *memory, size_t number, int64_t heads) {
  return fa3_dense(slot(memory, number), FA3_BFLOAT16, BATCH, 1, heads, HEAD_DIM);
}

static fa3_tensor pages(char *memory, size_t number) {
  return fa3_dense(slot(memory, number), FA3_BFLOAT16, (int64_t)BATCH * PAGES, PAGE_SIZE, HEADS_K,
                   HEAD_DIM);
}

static fa3_tensor matrix(void *data, fa3_dtype dtype, int64_t rows, int64_t columns) {
  return (fa3_tensor){
      .data = data, .dtype = dtype, .rank = 2, .shape = {rows, columns}, .strides = {columns, 1}};
}

static int measure_passes(fa3_device device, void *stream, char *at, int (*synchronize)(void)) {
  fa3_forward_args forward = {.struct_size = sizeof forward,
                              .device = device,
                              .stream = stream,
                              .query = tensor(at, 0),
                              .key = tensor(at, 1),
                              .value = tensor(at, 2),
                              .output = tensor(at, 3),
                              .workspace = slot(at, SLOTS),
                              .workspace_size = WORKSPACE_BYTES};
  forward.lse = fa3_lse(slot(at, 4), 1, HEADS, SEQLEN);
  fa3_backward_args backward = {.struct_size = sizeof backward};
  if (fa3_backward_init(&forward, &backward)) return 1;
  forward.lse = (fa3_tensor){0};
  backward.grad_output = tensor(at, 5);
  backward.grad_query = tensor(at, 6);
  backward.grad_key = tensor(at, 7);
  backward.grad_value = tensor(at, 8);
  backward.workspace = forward.workspace;
  backward.workspace_size = forward.workspace_size;
  for (int causal = 0; causal < 2; causal++) {
    forward.flags = backward.flags = causal ? FA3_CAUSAL : 0;
    const struct call calls[] = {
        {.name = causal ? "forward, causal" : "forward, full", .forward = &forward},
        {.name = causal ? "backward, causal" : "backward, full", .backward = &backward}};
    for (int i = 0; i < 2; i++)
      if (measure(&calls[i], synchronize)) return 1;
  }
  return 0;
}

/* Memory is zeros: every page is the first one, and nothing is in the cache yet. */
static int measure_cache(fa3_device device, void *stream, char *at, int (*synchronize)(void)) {
  const fa3_tensor used = fa3_vector(slot(at, 5), FA3_INT32, BATCH);
  const fa3_tensor table = matrix(slot(at, 6), FA3_INT32, BATCH, PAGES);
  const fa3_forward_args forward = {.struct_size = sizeof forward,
                                    .device = device,
                                    .stream = stream,
                                    .query = tokens(at, 0, HEADS_Q),
                                    .key = pages(at, 1),
                                    .value = pages(at, 2),
                                    .output = tokens(at, 3, HEADS_Q),
                                    .seqused_k = used,
                                    .page_table = table,
                                    .workspace = slot(at, SLOTS),
                                    .workspace_size = WORKSPACE_BYTES};
  const fa3_append_args append = {
      .struct_size = sizeof append,
      .device = device,
      .stream = stream,
      .new_key = tokens(at, 4, HEADS_K),
      .new_value = tokens(at, 4, HEADS_K),
      .key = pages(at, 1),
      .value = pages(at, 2),
      .query = tokens(at, 0, HEADS_Q),
      .rotated_query = tokens(at, 7, HEADS_Q),
      .rotary_cos = matrix(slot(at, 8), FA3_BFLOAT16, 1024, HEAD_DIM / 2),
      .rotary_sin = matrix(slot(at, 8), FA3_BFLOAT16, 1024, HEAD_DIM / 2),
      .seqused_k = used,
      .page_table = table};
  const struct call calls[] = {{.name = "one token, a cache in pages", .forward = &forward},
                               {.name = "append", .append = &append}};
  return measure(&calls[0], synchronize) || measure(&calls[1], synchronize);
}

int main(void) {
  const fa3_device device = {FA3_CUDA, 0};
  if (fa3_prepare(device)) {
    printf("%s\n", fa3_last_error());
    return 1;
  }
  int (*retain)(void **, int), (*set_current)(void *), (*allocate)(uint64_t *, size_t),
      (*clear)(uint64_t, unsigned char, size_t), (*synchronize)(void), (*create)(void **, unsigned);
  *(void **)&retain = function("cuDevicePrimaryCtxRetain");
  *(void **)&set_current = function("cuCtxSetCurrent");
  *(void **)&allocate = function("cuMemAlloc_v2");
  *(void **)&clear = function("cuMemsetD8_v2");
  *(void **)&synchronize = function("cuCtxSynchronize");
  *(void **)&create = function("cuStreamCreate");
  const size_t bytes = (size_t)SLOTS * SLOT_BYTES + WORKSPACE_BYTES;
  void *context, *stream;
  uint64_t memory;
  if (retain(&context, 0) || set_current(context) || allocate(&memory, bytes) ||
      clear(memory, 0, bytes) || create(&stream, 1))
    return 1;
  char *at = (char *)memory;
  return measure_cache(device, stream, at, synchronize) ||
         measure_passes(device, stream, at, synchronize);
}
