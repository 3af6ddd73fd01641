/* Queues a planned call on its stream. */
#ifndef FA3_SRC_CUDA_LAUNCH_H
#define FA3_SRC_CUDA_LAUNCH_H

#include "cuda/context.h"
#include "cuda/plan.h"

/* In scope. `workspace` holds plan->workspace_size bytes, of any alignment. */
fa3_status cuda_launch_forward(const struct cuda_device *device, const struct cuda_scope *scope,
                               const struct problem *problem, const struct cuda_plan *plan,
                               void *workspace);

#endif
