/* Where a call runs: the context of its stream, current for as long as the call takes. */
#ifndef FA3_SRC_CUDA_CONTEXT_H
#define FA3_SRC_CUDA_CONTEXT_H

#include <stdbool.h>

#include "cuda/device.h"
#include "problem.h"

struct cuda_scope {
  const struct cuda_device *device;
  CUstream stream;
  CUcontext context;
  bool current;        /* the context is the thread's as it is */
  bool primary;        /* the context is the device's primary one */
  int multiprocessors; /* that the call may use; fewer in a green context */
  int capture_mode;    /* the thread's own, to be put back */
};

/* FA3_INVALID_STREAM if the stream is another device's. */
fa3_status cuda_scope_find(const struct cuda_device *device, void *stream,
                           struct cuda_scope *scope);

/* Makes the context current, and lets what the driver still loads for it load beside a capture. */
fa3_status cuda_scope_enter(struct cuda_scope *scope);
void cuda_scope_leave(struct cuda_scope *scope);

/* Every tensor is in memory that the driver knows, the GPU's own or pinned: a kernel that reads
 * anything else breaks the caller's context for good. In scope. */
fa3_status cuda_check_memory(const struct cuda_scope *scope, const struct problem *problem,
                             const void *workspace);

#endif
