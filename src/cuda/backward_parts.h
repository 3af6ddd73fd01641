/* Tiles of keys in parts: by query heads of a group, or by ranges of blocks of queries. */
#ifndef FA3_SRC_CUDA_BACKWARD_PARTS_H
#define FA3_SRC_CUDA_BACKWARD_PARTS_H

#include "cuda/backward_tiles.h"

/* Room for what parts of tiles leave each other, and words in which they tell that they have: never
 * less where a dimension grows. `sum_bytes`: of dQ, in float32. */
int64_t bytes_of_parts(const struct problem *problem, const struct backward_plan *plan,
                       int64_t sum_bytes);
int64_t count_arrivals(const struct problem *problem);

/* How many heads of a group take a block in turn at least, where it is dealt out to fit the L2
 * cache: a tile follows the one before it by a step or two, and that is not to be much of what the
 * heads take for 128 queries. */
int64_t least_in_turn(const struct kernel *kernel);

/* Few tiles, so that all of `workers` have a part. */
void deal_parts(const struct problem *problem, const struct visits *visits, int64_t workers,
                struct backward_plan *plan);

/* Whether the tiles of a head, which see from all queries down to few, have so many query heads
 * that these are dealt out to fit the L2 cache. */
bool has_large_groups(const struct problem *problem, const struct visits *visits,
                      const struct backward_plan *plan);

/* All heads of a group take a block in turn, and of a large group, what its tiles have in flight,
 * beside those of other heads of keys, is beyond the L2 cache. So few heads do, each such part of a
 * group by itself. Not too few, or tiles wait for each other; and a part is to be long enough that
 * it does not matter where it begins and ends. */
void deal_groups(const struct problem *problem, const struct visits *visits,
                 struct backward_plan *plan);

#endif
