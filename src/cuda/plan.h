/* How a call runs on a Hopper GPU, decided from the problem alone: no GPU is touched. */
#ifndef FA3_SRC_CUDA_PLAN_H
#define FA3_SRC_CUDA_PLAN_H

#include <stdbool.h>

#include "kernels/forward_params.h"
#include "problem.h"

/* A tensor that the kernel can't take where it lies goes through the workspace. */
struct staged {
  bool used;
  size_t offset; /* in the workspace, which is aligned to 128 bytes there */
};

struct cuda_plan {
  int32_t kernel; /* row of forward_kernels */
  int32_t packed; /* query heads of one key head that share a tile */
  fa3_tile_space tiles;
  bool negate; /* a negative scale: minus query, and the scale's size */
  struct staged query;
  struct staged key;
  struct staged value;
  struct staged output;
  struct staged lse;
  struct staged sink;
  struct staged next_tile; /* the counter that tiles are taken from */
  size_t workspace_size;
};

/* FA3_UNSUPPORTED or FA3_INVALID_LENGTHS, with the reason, for what no kernel can do. */
fa3_status cuda_plan_forward(const struct problem *problem, struct cuda_plan *plan);

/* The view of an operand's copy in the workspace: contiguous (batch, rows, heads, dim). */
struct operand staged_operand(const struct operand *operand, const struct staged *staged,
                              char *workspace, int64_t rows, int64_t heads, int64_t dim);

#endif
