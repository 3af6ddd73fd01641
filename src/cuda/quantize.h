/* Rows that become E4M3 codes and scales, on a GPU. */
#ifndef FA3_SRC_CUDA_QUANTIZE_H
#define FA3_SRC_CUDA_QUANTIZE_H

#include "cuda/context.h"
#include "cuda/plan.h"

extern const struct kernel_kind quantize_rotated_kind;

fa3_status plan_quantize(const struct problem *problem, const struct cuda_facts *facts,
                         struct cuda_plan *plan);
fa3_status launch_quantize(const struct cuda_scope *scope, const struct problem *problem,
                           const struct cuda_plan *plan, char *workspace);

#endif
