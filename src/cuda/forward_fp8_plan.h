/* What is planned of the forward kernel for E4M3 codes alone (kernels/forward_fp8.cu). */
#ifndef FA3_SRC_CUDA_FORWARD_FP8_PLAN_H
#define FA3_SRC_CUDA_FORWARD_FP8_PLAN_H

#include "cuda/plan.h"
#include "problem.h"

extern const struct kernel_kind forward_fp8_kind;

/* Whether keys and values have no scale of fewer rows than a sequence's. */
bool scales_of_heads(const struct problem *problem);

/* Takes the kernel whose values are transposed ahead, if there is one and it is faster. */
void take_transposed(const struct problem *problem, const struct cuda_facts *facts,
                     struct forward_plan *plan);

/* Takes the kernel that sees all keys of a sequence in one step, if there is one and they would be
 * more of another's. At head dim 128 it has two warpgroups: under a mask several rounds of tiles of
 * three are faster. */
void take_one_step(const struct problem *problem, const struct cuda_facts *facts,
                   struct forward_plan *plan);

/* Few queries beside others, and the workspace. FA3_UNSUPPORTED for operands that the kernel does
 * not take. `largest` has the largest tiles: calls with fewer queries, which take others, need no
 * more room, nor do those that the kernels for caches take. */
fa3_status plan_codes(const struct problem *problem, const struct cuda_facts *facts,
                      const struct kernel *largest, struct cuda_plan *plan);

/* Gives the call to the kernels for caches, if they take it and are faster. */
void take_kernels_for_caches(const struct problem *problem, const struct cuda_facts *facts,
                             struct cuda_plan *plan);

#endif
