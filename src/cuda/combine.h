/* Queues the kernel that makes one result of those of parts of the keys. */
#ifndef FA3_SRC_CUDA_COMBINE_H
#define FA3_SRC_CUDA_COMBINE_H

#include "cuda/context.h"
#include "cuda/plan.h"
#include "kernels/combine_params.h"

/* For a forward call whose rows have so many parts each, part after part in the workspace. */
fa3_combine_params make_combine_params(const struct problem *problem, const struct split_room *room,
                                       const char *workspace, int64_t splits);

/* In scope. */
fa3_status combine_splits(const struct cuda_scope *scope, const struct problem *problem,
                          const struct kernel *kernel, fa3_combine_params *params);

/* Of tiles whose keys are dealt out in so many shares. In scope. */
fa3_status combine_tiles(const struct cuda_scope *scope, const struct kernel *kernel, int shares,
                         fa3_combine_params *params);

#endif
