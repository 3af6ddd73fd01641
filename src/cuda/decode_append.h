/* Attention of few queries that appends to the cache first, in one kernel. */
#ifndef FA3_SRC_CUDA_DECODE_APPEND_H
#define FA3_SRC_CUDA_DECODE_APPEND_H

#include "cuda/plan.h"

/* Whether the kernel of that plan may do what the append does: no other block than a cluster's
 * reads what it writes. */
bool decode_takes_append(const struct problem *forward, const struct cuda_plan *plan,
                         const struct problem *append);

#endif
