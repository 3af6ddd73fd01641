/* How a backward call runs on a Hopper GPU. */
#ifndef FA3_SRC_CUDA_BACKWARD_PLAN_H
#define FA3_SRC_CUDA_BACKWARD_PLAN_H

#include "cuda/staging.h"
#include "kernels/backward_params.h"

/* The functions of kernels/backward.cu and backward_wide.cu. */
enum { BACKWARD_MAIN, BACKWARD_FINISH, BACKWARD_FINISH_NARROW };

/* The functions of kernels/backward_prepare.cu. */
enum { BACKWARD_PREPARE, BACKWARD_PREPARE_LONG, BACKWARD_SUM, BACKWARD_SINK };

struct cuda_facts;
struct cuda_plan;

struct backward_plan {
  const struct kernel *kernel;
  const struct kernel *prepare; /* for what comes before and after */
  int32_t cluster;              /* blocks that share a tile */
  fa3_key_tiles tiles;
  int32_t workers;     /* blocks of the grid */
  bool finished_later; /* dQ is stored by a kernel of its own, not by the last tile of a head */
  int32_t most_sums;   /* of a block of dQ, that there is room for */
  int32_t blocks_q;
  int32_t slots;
  int32_t key_slots;     /* of a head of keys */
  int32_t arrival_words; /* 0 where no parts are added up within the kernel */
  int64_t part_bytes;    /* room for what parts leave each other */
  bool summed_later;     /* parts of dK and dV are added up by a kernel of its own */
  /* The kernels' own arrays, see kernels/backward_params.h. */
  struct reservation counters;
  struct reservation rows;
  struct reservation partial;
  struct reservation parts;
  struct reservation arrivals;
  struct reservation sinks;
  struct reservation next_tile;
};

/* FA3_UNSUPPORTED if there is none for tiles of keys that meet `queries` queries of a head.
 * `small_steps`: the kernel that has softcaps. */
fa3_status find_backward_kernel(const char *architecture, fa3_dtype dtype, int64_t head_dim,
                                int64_t value_head_dim, bool small_steps, int64_t queries,
                                const struct kernel **kernel);

fa3_status supports_backward(const fa3_capability *capability);

/* FA3_UNSUPPORTED or FA3_INVALID_LENGTHS, with the reason, for what no kernel can do. */
fa3_status plan_backward(const struct problem *problem, const struct cuda_facts *facts,
                         struct cuda_plan *plan);

#endif
