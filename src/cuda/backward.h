/* Queues a planned backward call on its stream. */
#ifndef FA3_SRC_CUDA_BACKWARD_H
#define FA3_SRC_CUDA_BACKWARD_H

#include "cuda/backward_plan.h"
#include "cuda/context.h"

/* In scope. `workspace` holds plan->workspace_size bytes, of any alignment. */
fa3_status launch_backward(const struct cuda_device *device, const struct cuda_scope *scope,
                           const struct problem *problem, const struct backward_plan *plan,
                           void *workspace);

#endif
