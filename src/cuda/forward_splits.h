/* How the keys of a forward call's tiles are shared out. */
#ifndef FA3_SRC_CUDA_FORWARD_SPLITS_H
#define FA3_SRC_CUDA_FORWARD_SPLITS_H

#include "cuda/plan.h"

/* Rows of partial results that the workspace has room for; 0: none, for keys are few, or never
 * shared out. */
int64_t forward_split_rows(const struct problem *problem, const struct cuda_facts *facts);

/* What a tile of so many warpgroups takes, by the time of one of all of them.
 * docs/notes/hopper-forward.md has the figures. */
double forward_tile_time(const struct kernel *kernel, int64_t warpgroups);

/* Warps that combine a row of so many parts. */
int forward_combine_warps(const struct problem *problem, int64_t splits);

/* Where tiles are few, shares of their keys for several blocks each, or of all keys, one for each
 * multiprocessor: so too where lengths of keys may be far apart. And tiles of as many rows as suit
 * that; `plan` has its tiles, which the query heads of a group may share. */
void plan_forward_splits(const struct problem *problem, const struct cuda_facts *facts,
                         bool may_share_tiles, struct forward_plan *plan);

#endif
