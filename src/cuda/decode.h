/* Queues a planned forward call of few queries, or on a cache, on its stream. */
#ifndef FA3_SRC_CUDA_DECODE_H
#define FA3_SRC_CUDA_DECODE_H

#include "cuda/context.h"
#include "cuda/plan.h"

/* In scope; the workspace is aligned. */
fa3_status launch_decode(const struct cuda_scope *scope, const struct problem *problem,
                         const struct decode_plan *plan, char *workspace);

#endif
