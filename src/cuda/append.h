/* Keys and values written into a cache, and partial results put together, on a GPU. */
#ifndef FA3_SRC_CUDA_APPEND_H
#define FA3_SRC_CUDA_APPEND_H

#include "cuda/context.h"
#include "cuda/plan.h"
#include "kernels/append_params.h"

fa3_status plan_append(const struct problem *problem, const struct cuda_facts *facts,
                       struct cuda_plan *plan);
fa3_append_params make_append_params(const struct problem *problem);
/* Whether all that is read, and what is written without codes, has 16 bits and lies in words. */
bool append_takes_words(const struct problem *problem);
fa3_status launch_append(const struct cuda_scope *scope, const struct problem *problem,
                         const struct cuda_plan *plan, char *workspace);

fa3_status plan_combine(const struct problem *problem, const struct cuda_facts *facts,
                        struct cuda_plan *plan);
fa3_status launch_combine(const struct cuda_scope *scope, const struct problem *problem,
                          const struct cuda_plan *plan, char *workspace);

#endif
