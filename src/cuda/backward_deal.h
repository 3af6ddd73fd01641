/* How the tiles of a backward call are dealt to the blocks of a grid. */
#ifndef FA3_SRC_CUDA_BACKWARD_DEAL_H
#define FA3_SRC_CUDA_BACKWARD_DEAL_H

#include "cuda/backward_plan.h"
#include "problem.h"

/* Sets parts, sections, sums and order of the plan's tiles, each of which one of `workers` blocks,
 * or pairs of blocks, takes at a time; and who stores dQ. */
void deal_tiles(const struct problem *problem, int64_t workers, struct backward_plan *plan);

#endif
