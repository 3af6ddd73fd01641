/* Queues a planned forward call of few queries, or on a cache, on its stream. */
#ifndef FA3_SRC_CUDA_DECODE_H
#define FA3_SRC_CUDA_DECODE_H

#include "cuda/context.h"
#include "cuda/plan.h"
#include "kernels/decode_params.h"

/* What the kernels for caches, and unpack.cu, take that does not depend on the plan. `heads_k`: as
 * many as blocks count. */
fa3_decode_fp8_params make_cache_params(const struct problem *problem, int64_t heads_k);

/* In scope; the workspace is aligned. */
fa3_status launch_decode(const struct cuda_scope *scope, const struct problem *problem,
                         const struct decode_plan *plan, char *workspace);

#endif
