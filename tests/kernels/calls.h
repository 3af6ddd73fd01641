/* Calls of the tile loops on random tensors in guarded memory: backward calls, whose first tensors
 * are a forward call's. */
#ifndef FA3_TESTS_KERNELS_CALLS_H
#define FA3_TESTS_KERNELS_CALLS_H

#include "cpu/plan.h"
#include "kernels.h"
#include "problem.h"

struct call {
  fa3_backward_args args;
  struct problem problem;
  struct cpu_plan plan;
  void *workspace;
};

/* Lengths are around the edges of the tiles. */
struct call random_call(struct run *run);
void call_free(struct call *call);

size_t tensor_bytes(const fa3_tensor *tensor);

/* Whether tensors and workspace alone were written to; if not, says so. */
bool call_intact(const struct run *run, const struct call *call);

/* A workspace of that size instead of the last. */
void call_make_workspace(struct call *call);

/* The forward pass: what it needs, and the pass itself. */
void prepare_forward(const struct run *run, struct call *call, int32_t threads);
void run_forward(const struct run *run, void *call);

/* Times a pass over eight heads of 1024 rows at head dims 64 and 128, of so many operations for a
 * pair of rows and an element of the head dim. */
void time_call(struct run *run,
               void (*prepare)(const struct run *run, struct call *call, int32_t threads),
               void (*pass)(const struct run *run, void *call), double operations);

#endif
