/* What a call of the tile loops is given, beside the tensors' contents. */
#ifndef FA3_TESTS_KERNELS_CALL_SHAPE_H
#define FA3_TESTS_KERNELS_CALL_SHAPE_H

#include <stdint.h>

#include "rng.h"

struct call_shape {
  int64_t batch, seqlen_q, seqlen_k, heads_k, group, head_dim, value_head_dim;
  uint32_t flags;
  int64_t window_left, window_right;
  float softcap;
};

/* Lengths are around the edges of the tiles. */
struct call_shape random_call_shape(struct rng *rng);

/* What the loops are timed on: eight heads of 1024 rows. */
struct call_shape timed_call_shape(int64_t head_dim);

#endif
