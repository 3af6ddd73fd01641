/* Queues a kernel. */
#ifndef FA3_SRC_CUDA_LAUNCH_H
#define FA3_SRC_CUDA_LAUNCH_H

#include <stdbool.h>

#include "cuda/context.h"

struct grid {
  unsigned x;
  unsigned y;
  unsigned z;
  unsigned threads;
  unsigned shared_bytes; /* of a block, dynamic; 0: as the kernel says */
  unsigned cluster;      /* blocks of a cluster; 0: the kernel says */
  bool alone;            /* a multiprocessor has one block: of a kernel that may be so */
  bool dependent; /* may begin before the kernel ahead of it ends, and waits for it by itself */
};

/* In scope. The function kind->entries[entry] of a kernel; `params` is its one parameter. */
fa3_status launch_kernel(const struct cuda_scope *scope, const struct kernel *kernel, int entry,
                         const struct grid *grid, void *params);

#endif
