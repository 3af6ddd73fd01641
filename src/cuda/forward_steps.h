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

/* Whether find_tile_size is for this call: of few queries and keys, in 16 bits. */
bool counts_tile_size(const struct problem *problem, const struct kernel *kernel);

struct tile_size {
  int64_t warpgroups;
  double time; /* of the call */
};

/* The tile size that takes the least time, each tile counted by itself. */
struct tile_size find_tile_size(const struct problem *problem, const struct cuda_facts *facts,
                                const struct kernel *kernel, int64_t tile_heads);

/* Whether the kernel for tiles of two warpgroups is faster than the one for three, two of which
 * have queries: where one of its steps, of twice as many keys, sees all, or keys are many. */
bool small_tiles_pay(const struct problem *problem, const struct kernel *kernel);

/* Whether that is so, and rows fill two warpgroups. */
bool are_two(const struct problem *problem, const struct kernel *kernel, int64_t rows,
             int64_t longest);

/* Whether the query heads of a group are to share tiles: where queries are few, that fills tiles
 * better, and tiles see fewer keys that only some of their rows see. */
bool sharing_pays(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel);

/* What so many rounds of tiles take, given out longest first: where some tiles are left when all
 * multiprocessors have had as many, one has one more of those, or of longer ones. */
double time_of_rounds(double longest, double mean, double rounds);

#endif
