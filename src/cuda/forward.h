/* Queues a planned forward call on its stream. */
#ifndef FA3_SRC_CUDA_FORWARD_H
#define FA3_SRC_CUDA_FORWARD_H

#include "cuda/context.h"
#include "cuda/forward_plan.h"

/* In scope. `workspace` holds plan->workspace_size bytes, of any alignment. */
fa3_status launch_forward(const struct cuda_device *device, const struct cuda_scope *scope,
                          const struct problem *problem, const struct forward_plan *plan,
                          void *workspace);

#endif
