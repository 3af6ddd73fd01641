/* Queues a planned forward call on its stream. */
#ifndef FA3_SRC_CUDA_FORWARD_H
#define FA3_SRC_CUDA_FORWARD_H

#include "cuda/context.h"
#include "cuda/plan.h"

/* In scope; the workspace is aligned. */
fa3_status launch_forward(const struct cuda_scope *scope, const struct problem *problem,
                          const struct cuda_plan *plan, char *workspace);

#endif
