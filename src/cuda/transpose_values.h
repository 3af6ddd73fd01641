/* V^T of FP8 values ahead of the forward kernel (kernels/transpose_values.cu). */
#ifndef FA3_SRC_CUDA_TRANSPOSE_VALUES_H
#define FA3_SRC_CUDA_TRANSPOSE_VALUES_H

#include "cuda/context.h"
#include "cuda/staging.h"
#include "kernels/transpose_values_params.h"
#include "problem.h"

struct kernel;
extern const struct kernel_kind transpose_values_kind;

struct transpose_plan {
  const struct kernel *kernel; /* null: nothing is transposed ahead */
  int32_t tiles;               /* of each head: of a sequence or, where they are packed, of all */
  struct reservation room;
};

/* Takes `kernel`, unless the problem is larger than its grid. */
void take_transpose(const struct problem *problem, const struct kernel *kernel,
                    struct transpose_plan *plan);

/* Room for what `kernel` writes, whether it is taken or not: the workspace's size is not to fall
 * where a larger problem does not take it. FA3_UNSUPPORTED if it would be too large. */
fa3_status reserve_transposed(const struct problem *problem, const struct kernel *kernel,
                              struct transpose_plan *plan, size_t *workspace_size);

/* For the forward kernel. */
fa3_transposed_values transposed_values(const struct problem *problem,
                                        const struct transpose_plan *plan, char *workspace);

/* `value` is the forward kernel's map. */
fa3_status launch_transpose(const struct cuda_scope *scope, const struct problem *problem,
                            const struct transpose_plan *plan, const fa3_tensor_map *value,
                            char *workspace);

#endif
