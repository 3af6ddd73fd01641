/* How the tiles of a backward call are dealt to the blocks of a grid. */
#ifndef FA3_SRC_CUDA_BACKWARD_DEAL_H
#define FA3_SRC_CUDA_BACKWARD_DEAL_H

#include "cuda/backward_plan.h"
#include "problem.h"

/* Numbers that the tiles of a head of keys may have, of all sequences: as blocks of queries. */
int64_t count_key_slots(const struct problem *problem);

/* Room for what parts of tiles leave each other, and words in which they tell that they have: never
 * less where a dimension grows. `sum_bytes`: of dQ, in float32. */
int64_t bytes_of_parts(const struct problem *problem, const struct backward_plan *plan,
                       int64_t sum_bytes);
int64_t count_arrivals(const struct problem *problem);

/* Room for the sums of dQ beyond the first. */
int64_t bytes_of_more_sums(int64_t sum_bytes);

/* Sets parts, sections, sums and order of the plan's tiles, each of which one of `workers` blocks,
 * or pairs of blocks, takes at a time; and who stores dQ. */
void deal_tiles(const struct problem *problem, int64_t workers, struct backward_plan *plan);

#endif
