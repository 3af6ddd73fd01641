/* In how many sums, and in which order, tiles of keys add up dQ, and who stores it. */
#ifndef FA3_SRC_CUDA_BACKWARD_SUMS_H
#define FA3_SRC_CUDA_BACKWARD_SUMS_H

#include "cuda/backward_tiles.h"

/* How many sums a block of dQ may have, if one of all blocks has so many bytes: two, or more. */
int64_t most_sums(int64_t least_bytes);

/* Counters for all sums of so many blocks of so many bytes: never fewer for more blocks. */
int64_t most_counters(int64_t blocks, int64_t block_bytes);

/* Room for the sums of dQ beyond the first. */
int64_t bytes_of_more_sums(int64_t sum_bytes);

/* In how many sums each block of dQ is collected, and which tiles go upwards. Tiles of a head that
 * run side by side add to a block one after the other, so each begins when the one before it is a
 * step or two ahead; where tiles are few, that shows.
 *
 * Where all tiles begin at the same block, neighbours add to different sums, and a kernel of its
 * own adds these up. Under a causal mask with 128 queries a step they do so, too, and the last tile
 * of a block takes its sums. With fewer, if all tiles are two or three to a multiprocessor, most of
 * the first round begin at the diagonal, each at a block of its own, and go upwards. They keep
 * their distance from the start. The others, which are shorter, follow as they come, and add to
 * another sum. Pairs of blocks cannot go upwards, and lose by two sums what their tiles wait less.
 */
void deal_sums(const struct problem *problem, const struct visits *visits,
               struct backward_plan *plan);

/* Of a head's tiles, under a causal mask with two sums: those that go upwards, where so many run
 * side by side. 0: none. */
int64_t count_upward(int64_t tiles, int64_t beside, double bytes_of_sum);

/* Under a causal mask all tiles of the first heads may go upwards, taken in reverse: each begins at
 * a block of its own, a step behind the tile before it, and workers come free one after the other.
 * So none waits, however few heads are in flight together; they are so few that their queries and
 * dQ stay in the L2 cache. The longest tiles come last. So the other heads, whose tiles are two for
 * each worker, go downwards: their short tiles fill the gaps. Heads of a group, which take a block
 * in turn, lose by it. */
void deal_rising(const struct problem *problem, const struct visits *visits,
                 struct backward_plan *plan);

/* Where chains are few, a round of tiles goes upwards, of half of the chains at most, or fewer
 * where there are not two rounds of all. The shortest of these are done first, and the longest
 * tiles of the other chains follow, each some steps behind the one before it: none waits, and one
 * sum takes the place of those dealt. A block's last tile is the first one of a chain that rises,
 * the longest, and slow; where all would wait for it, dQ is finished later. Then up to two heads of
 * a group may take a block in turn, for two rounds. */
void deal_half_rising(const struct problem *problem, const struct visits *visits,
                      struct backward_plan *plan);

/* The last tile of a head is slow: in each step it reads what others have summed, and stores dQ.
 * Under a causal mask each tile is the last of a few blocks; without one the last tile is that of
 * all, and the others wait for it where tiles are few or long. Then a kernel of its own stores dQ,
 * on multiprocessors that have no tile left. But not where a head has one tile, which finds no sum
 * and is not waited for, unless half of the multiprocessors have nothing to do; nor two, if tiles
 * are many: all of dQ is then much beside what they read. The tiles of the wide kernel, whose
 * warpgroup for dQ is the last of a chain, always gain by that. */
bool finish_later(const struct problem *problem, const struct backward_plan *plan);

/* Whether slices of dQ are narrow where it is finished later: with many sums a block reads long,
 * and with few blocks most multiprocessors have none. Measured:
 * docs/notes/hopper-backward-tiles.md. */
bool takes_narrow_slices(const struct problem *problem, const struct backward_plan *plan);

#endif
