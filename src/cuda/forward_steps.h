/* What a forward call takes, in steps: a tile of keys for all of a tile's warpgroups. */
#ifndef FA3_SRC_CUDA_FORWARD_STEPS_H
#define FA3_SRC_CUDA_FORWARD_STEPS_H

#include "cuda/plan.h"

/* The keys that a query sees, in the mean. */
double keys_seen(const struct problem *problem, double queries, double keys);

/* About what a call takes with tiles of so many warpgroups, by the time of one of all: of a tile,
 * or under a causal mask, where they are given out longest first, of a tile of keys. */
double grid_time(const struct problem *problem, const struct cuda_facts *facts,
                 const struct kernel *kernel, int64_t warpgroups, int64_t tile_queries,
                 int64_t tiles);

/* Whether grid_steps is for this kernel: codes with scales of heads, at head dims up to 128. */
bool has_grid_steps(const struct kernel *kernel);

/* Whether tiles are looked at one by one, each with its own keys and warpgroups: of so few queries
 * and keys that makes a difference, and it takes little time. */
bool counts_tiles(const struct problem *problem);

/* As grid_time, for scales of heads, of three warpgroups or fewer. What a tile costs beside its
 * keys counts for several steps. */
double grid_steps(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel, int64_t warpgroups, int64_t tile_heads);

/* Whether rows fill two warpgroups of a head dim whose small tiles are another kernel's (see
 * take_small_tiles). */
bool are_two(const struct kernel *kernel, int64_t rows, int64_t longest);

/* Whether the query heads of a group are to share tiles: where queries are few, that fills tiles
 * better, and tiles see fewer keys that only some of their rows see. */
bool sharing_pays(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel);

#endif
