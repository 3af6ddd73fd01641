/* Room in the workspace. Tensors that a kernel can't take where they lie go through it: the kernel
 * works on a problem in which they are their copies. */
#ifndef FA3_SRC_CUDA_STAGING_H
#define FA3_SRC_CUDA_STAGING_H

#include <stdbool.h>

#include "cuda/context.h"
#include "problem.h"

/* A place in the workspace, if one is needed. */
struct reservation {
  bool used;
  size_t offset; /* where the workspace is aligned */
};

/* Makes the workspace larger, by whole blocks, and keeps where the new room is. FA3_UNSUPPORTED for
 * more than there can be. */
fa3_status reserve(size_t *workspace_size, struct reservation *reservation, const char *name,
                   int64_t batch, int64_t rows, int64_t row_bytes);

/* What the workspace's size becomes when it may start anywhere, and where it then starts. */
size_t with_alignment(size_t workspace_size);
char *align_workspace(void *workspace);

/* How a kernel takes a tensor. */
enum form {
  FORM_TMA,   /* 16 bits; a start and strides that the copy engine can step from and by */
  FORM_MINUS, /* likewise, of minus the tensor: always a copy */
  FORM_FLOATS /* a vector of float32 */
};

/* Whether it has the start and strides of FORM_TMA. */
bool fits_copy_engine(const struct operand *operand);

struct demand {
  enum tensor tensor;
  enum form form;
};

enum { MOST_STAGED = 6 };
struct staging {
  int count;
  struct staged {
    struct demand demand;
    size_t offset;
  } tensors[MOST_STAGED];
};

/* Reserves room for copies of the tensors that are not as they are demanded; those that were not
 * given are passed over. */
fa3_status plan_staging(const struct problem *problem, const struct demand *demands, int count,
                        struct staging *staging, size_t *workspace_size);

/* In scope: queues the copies of inputs; `staged` becomes the problem that the kernels work on. */
fa3_status stage(const struct cuda_scope *scope, const struct problem *problem,
                 const struct staging *staging, char *workspace, struct problem *staged);

/* In scope: queues the copies of outputs, of the rows of sequences alone. */
fa3_status unstage(const struct cuda_scope *scope, const struct problem *problem,
                   const struct staging *staging, const struct problem *staged);

#endif
