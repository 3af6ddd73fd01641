/* How a forward call runs on a Hopper GPU. */
#ifndef FA3_SRC_CUDA_FORWARD_PLAN_H
#define FA3_SRC_CUDA_FORWARD_PLAN_H

#include "cuda/decode_plan.h"
#include "cuda/staging.h"
#include "cuda/transpose_values.h"
#include "kernels/forward_fp8_params.h"

struct cuda_facts;
struct cuda_plan;

struct forward_plan {
  const struct kernel *kernel;
  int32_t tile_heads;   /* query heads of one key head that share a tile */
  int32_t tile_queries; /* of each of these heads */
  int32_t box; /* of a cache in pages: rows that the copy engine takes at a time; 0: none */
  fa3_tile_space tiles;
  int32_t splits;               /* blocks that share the keys of a tile; 1: none */
  int32_t shares;               /* that all tiles' keys are dealt out in; 0: they are not */
  int32_t team;                 /* tiles whose shares are side by side */
  const struct kernel *combine; /* for what they leave, if they do */
  struct split_room room;
  int32_t workers;              /* blocks of the grid */
  struct reservation next_tile; /* for a counter that tiles are taken from */
  bool counted;                 /* blocks take them from a counter */
  struct transpose_plan transpose;
  struct reservation sums;   /* of the FP8 kernel, where shared memory has no room for them */
  struct unpack_plan unpack; /* of a cache of codes; without a kernel: none */
  struct decode_plan few; /* of sequences with few queries beside others; without a kernel: none */
};

/* FA3_UNSUPPORTED if there is none. `head_scales`: codes of keys and values have no scale of fewer
 * rows than a sequence's. */
fa3_status find_forward_kernel(const char *architecture, fa3_dtype dtype, int64_t head_dim,
                               int64_t value_head_dim, fa3_features features, bool head_scales,
                               const struct kernel **kernel);

fa3_status supports_forward(const fa3_capability *capability);

/* Key or value in pages, for threads that copy. FA3_UNSUPPORTED where 32 bits don't count the
 * steps. */
fa3_status make_paged_tensor(const struct operand *operand, const char *name,
                             fa3_paged_tensor *tensor);

/* Tiles of unequal length go to whoever is free: room for a counter of them, if there are such. */
fa3_status reserve_counter(const struct problem *problem, struct reservation *counter,
                           size_t *workspace_size);

/* FA3_UNSUPPORTED or FA3_INVALID_LENGTHS, with the reason, for what no kernel can do. */
fa3_status plan_forward(const struct problem *problem, const struct cuda_facts *facts,
                        struct cuda_plan *plan);

#endif
