/* Tensors that a kernel can't take where they lie go through the workspace: strides that the copy
 * engine can't step, an unaligned start. */
#ifndef FA3_SRC_CUDA_STAGING_H
#define FA3_SRC_CUDA_STAGING_H

#include <stdbool.h>

#include "cuda/launch.h"
#include "problem.h"

/* A place in the workspace, if one is needed. */
struct reservation {
  bool used;
  size_t offset; /* where the workspace is aligned to 128 bytes */
};

/* Whether the copy engine can't take the tensor (of 16 bits) as it is. */
bool needs_staging(const struct operand *operand);

/* Room at the workspace's end, which moves. FA3_UNSUPPORTED for more than there can be. */
fa3_status reserve(size_t *workspace_size, struct reservation *reservation, const char *name,
                   int64_t batch, int64_t rows, int64_t row_bytes);

/* For a tensor of 16 bits, if it needs it. */
fa3_status reserve_if_needed(size_t *workspace_size, struct reservation *reservation,
                             const char *name, const struct operand *operand);

/* What the workspace's size becomes when it may start anywhere, and where it then starts. */
size_t with_alignment(size_t workspace_size);
char *align_workspace(void *workspace);

/* The view of an operand's copy in the workspace, which is contiguous; the operand itself if it
 * has none. */
struct operand staged_operand(const struct operand *operand, const struct reservation *staged,
                              char *workspace);

/* Queues the copy of an input of 16 bits to its place in the workspace; with `negate` of minus
 * the input. */
fa3_status stage_input(const struct cuda_scope *scope, const struct reservation *staged,
                       const struct operand *from, const struct operand *to, bool negate);

/* Queues the copy of an output from the workspace, only of the rows of a sequence. */
struct lengths {
  int64_t longest; /* of any one sequence */
  int64_t batch;
  const int32_t *cu_seqlens; /* may be null, as seqused */
  const int32_t *seqused;
};
fa3_status unstage_output(const struct cuda_scope *scope, const struct reservation *staged,
                          const struct operand *from, const struct operand *to,
                          const struct lengths *lengths);

/* Queues the conversion of a number per head to float32. */
fa3_status stage_head_values(const struct cuda_scope *scope, const struct reservation *staged,
                             const struct operand *from, float *to);

#endif
