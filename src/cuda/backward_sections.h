/* How many heads of keys a backward call has in flight together. */
#ifndef FA3_SRC_CUDA_BACKWARD_SECTIONS_H
#define FA3_SRC_CUDA_BACKWARD_SECTIONS_H

#include "cuda/backward_tiles.h"

/* How many chains are in flight together: heads of keys, times their parts. Without a mask few
 * enough that their queries and dQ, which every tile of keys reads and adds to, stay in the L2
 * cache: the tiles of a head run at any distance from each other, so all of it is in use at a time.
 * Under a causal mask they all begin at the same block and follow each other closely; there it
 * takes so many heads that a tile does not wait for the one before, fewer where a block of queries
 * is a step for each head of a group; and fewer where heads are long, for on a long way tiles drift
 * apart, and what one of them reads is no longer in the L2 cache when the others come. Under a
 * window tiles hardly wait; there as many heads as have their windows in the L2 cache. Sections are
 * equal, or the last one would have too few. */
int64_t find_section(const struct problem *problem, const struct visits *visits,
                     const struct backward_plan *plan, int64_t workers);

#endif
