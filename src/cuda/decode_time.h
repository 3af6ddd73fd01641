/* How long a call of few queries would take, by how its keys are split. */
#ifndef FA3_SRC_CUDA_DECODE_TIME_H
#define FA3_SRC_CUDA_DECODE_TIME_H

#include "cuda/decode_plan.h"

struct decode_way {
  int64_t splits; /* of each sequence, in one cluster */
  bool alone;     /* each block has a multiprocessor, and all its warps, to itself */
};

/* Whether so many row tiles are short work, of which the fastest way is known. */
bool decode_is_short(const struct problem *problem, int64_t tiles);

/* The fastest one. `lone`: the kernel for blocks that are alone, or null if there is none. */
struct decode_way decode_fastest_way(const struct problem *problem, const struct cuda_facts *facts,
                                     const struct kernel *kernel, const struct kernel *lone,
                                     int64_t tiles);

#endif
