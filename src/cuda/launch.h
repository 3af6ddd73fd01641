/* Queues kernels for one call. */
#ifndef FA3_SRC_CUDA_LAUNCH_H
#define FA3_SRC_CUDA_LAUNCH_H

#include <stdbool.h>

#include "cuda/context.h"

struct launch {
  const struct cuda_device *device;
  const struct cuda_scope *scope;
};

struct grid {
  unsigned x;
  unsigned y;
  unsigned z;
  unsigned threads;
  unsigned shared_bytes;
  bool dependent; /* may begin before the kernel ahead of it ends, and waits for it by itself */
};

/* `params` is the kernel's one parameter. */
fa3_status launch_kernel(const struct launch *launch, CUkernel kernel, const struct grid *grid,
                         void *params);

#endif
