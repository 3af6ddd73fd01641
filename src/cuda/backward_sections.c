#include "cuda/backward_sections.h"

#include <math.h>

#include "cuda/backward_parts.h"
#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "integer.h"

/* Heads that a section without a mask has whatever their size. */
enum { LEAST_HEADS = 4 };

/* A head is short where its tiles share so many times what one has of its own, at most. */
enum { MOST_SHARED = 3 };

/* What a section has at most under a causal mask, and of large groups or packed lengths. Measured:
 * docs/notes/hopper-backward-tiles.md. */
enum { TOGETHER_BYTES = 512 << 20, GROUPS_BYTES = 128 << 20 };

/* Tiles of a window are at blocks of their own, all of it, and come back to a block when they are
 * done: what a section's windows have is to stay in the L2 cache, if all of them don't. A
 * section has a least number of windows, whatever their size, and groups of more heads than these
 * have no such bound. Measured: likewise. */
enum {
  WINDOWS_BYTES = 18 << 20,
  ALL_WINDOWS_BYTES = 36 << 20,
  LEAST_WINDOWS = 4,
  MOST_IN_WINDOWS = 2
};

/* Steps between short tiles of a head, over the workers that take turns at them; and in steps, the
 * beginning and the end of such a tile, of kernels with 128 queries a step and of others. Measured:
 * likewise. */
static const double short_tiles_apart = 1.9;
static const double ends_of_128 = 0.6, ends_of_fewer = 2;

/* Less than a round of tiles, of a section of large groups. */
static const double least_part_of_round = 0.67;

static bool has_window(const struct problem *problem) {
  return problem->window_left < FA3_NO_LIMIT;
}

/* Under a causal mask: chains in flight together that are enough for a tile not to wait for the one
 * before it; fewer where a block of queries is a step for each of the heads that take it in turn.
 */
static int64_t enough_chains(const struct backward_plan *plan, int64_t in_turn, int64_t workers) {
  const struct kernel *kernel = plan->kernel;
  const int64_t tiles_in_chain = plan->cluster > 1 ? 12 : 8;
  return (int64_t)(3.0 * (double)(workers * kernel->tile_q) /
                   ((double)(tiles_in_chain * kernel->tile_k) * sqrt((double)in_turn)));
}

/* In how many sections: of `size` heads each or, if that makes them equal, of up to a third more or
 * fewer, as far as they fit. */
static int64_t count_sections(int64_t heads, int64_t size, int64_t fitting) {
  const int64_t wanted = divide_up(heads, size);
  if (heads % wanted == 0) return wanted;
  for (int64_t n = divide_up(heads, smaller(4 * size / 3, fitting)); 3 * n <= 4 * wanted; n++)
    if (heads % n == 0) return n;
  return wanted;
}

/* Of large groups: as many heads of keys as are enough, but no more than fit, in equal sections.
 * These are not to be nearly a round of tiles: after such a section the longest tiles of the next
 * one begin one by one, as its shortest ones end, and are at all blocks at a time. Where lengths
 * are packed, sections are of whole sequences, or each sequence has its own: few of the heads of a
 * long one in a section of short ones would wait for each other. */
static int64_t find_section_of_groups(const struct problem *problem, const struct visits *visits,
                                      const struct backward_plan *plan, int64_t workers) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const int64_t all = (int64_t)tiles->heads * tiles->batches;
  const int64_t in_turn = divide_up(query_heads_of_key_head(problem), tiles->head_parts);
  const double share = find_typical_share(problem, tiles);
  const double longest = (double)larger(longest_query(problem), 1);
  const double seen = fmin(visits->most * plan->kernel->tile_q / longest, 1);
  const int64_t bytes_per_head = bytes_of_head(problem, plan->kernel);
  const int64_t fitting =
      larger((int64_t)(GROUPS_BYTES / (share * seen * (double)bytes_per_head)), 1);
  const int64_t enough = larger(enough_chains(plan, in_turn, workers) / tiles->head_parts, 1);
  const int64_t size = smaller(larger(CACHE_BYTES / bytes_per_head, enough), fitting);
  if (is_packed(problem)) {
    const int64_t heads = tiles->heads;
    return size >= heads ? smaller(size / heads * heads, all)
                         : divide_up(heads, count_sections(heads, size, fitting));
  }
  int64_t sections = count_sections(all, size, fitting);
  for (; sections < all; sections++) {
    const int64_t of_section = divide_up(all, sections) * tiles->tiles * tiles->head_parts;
    const double rounds = (double)of_section / (double)workers;
    if (rounds <= least_part_of_round || rounds > 1) break;
  }
  return divide_up(all, sections);
}

/* Of packed lengths, no more than `most` heads: whole sequences, or equal parts of the heads of
 * each, since the last tiles of a long sequence would be alone with their few heads. A sequence may
 * have a third more. */
static int64_t find_packed_section(int64_t most, int64_t heads) {
  if (most >= heads) return most / heads * heads;
  return 4 * most >= 3 * heads ? heads : divide_up(heads, divide_up(heads, most));
}

/* Heads of a section, without a mask, where they are short: what a tile reads and writes of its
 * own, K, V, dK and dV, is then as much as what it shares, and has to pass through the L2 cache
 * beside it before the next tile of the head comes. 0: as many as fit, if heads are longer, or if
 * with fewer tiles between two of a head these would wait. The order of sums may depend on it. */
static int64_t find_short_section(const struct problem *problem, const struct visits *visits,
                                  const struct backward_plan *plan) {
  const int64_t all = (int64_t)plan->tiles.heads * plan->tiles.batches;
  const int64_t shared = bytes_of_head(problem, plan->kernel);
  const int64_t own = (int64_t)4 * TILE_K * (problem->head_dim + problem->value_head_dim);
  if (shared > MOST_SHARED * own || all < 1) return 0;
  const int64_t size = divide_up(all, divide_up(all, larger(CACHE_BYTES / (shared + own), 1)));
  const double steps = visits->mean * (double)query_heads_of_key_head(problem) +
                       (plan->kernel->tile_q == 128 ? ends_of_128 : ends_of_fewer);
  const double workers = (double)MULTIPROCESSORS / plan->cluster;
  return (double)size * steps >= short_tiles_apart * workers ? size : 0;
}

/* Heads of a section under a mask: as many as are enough, no more than fit. */
static int64_t find_masked_section(const struct problem *problem, const struct backward_plan *plan,
                                   int64_t workers) {
  const struct kernel *kernel = plan->kernel;
  const int64_t all = (int64_t)plan->tiles.heads * plan->tiles.batches;
  const int64_t queries = larger(longest_query(problem), 1);
  const int64_t bytes_per_head = bytes_of_head(problem, kernel);
  /* Some kernels are done with a query head before they take the next. */
  const bool by_head = plan->cluster > 1 || kernel->by_head;
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t in_turn = by_head ? 1 : divide_up(group, plan->tiles.head_parts);
  const int64_t enough = enough_chains(plan, in_turn, workers);
  const int64_t size =
      larger(CACHE_BYTES / bytes_per_head, enough / fa3_key_tile_parts(&plan->tiles));
  /* More keys are more rounds of tiles; a window's tiles have a short way. */
  const int64_t keys = smaller(problem->max_seqlen_k, problem->rows_k);
  const int64_t length = larger(queries, smaller(keys, 4 * queries));
  int64_t way = length;
  if (has_window(problem))
    way = smaller(length, problem->window_left + problem->window_right + kernel->tile_k);
  const int64_t bytes_of_way = way * (bytes_per_head / queries);
  const int64_t most = smaller(size, larger(TOGETHER_BYTES / bytes_of_way, 1));
  if (has_window(problem) && group <= MOST_IN_WINDOWS &&
      (double)all * (double)bytes_of_way > ALL_WINDOWS_BYTES)
    return smaller(most, larger(WINDOWS_BYTES / bytes_of_way, LEAST_WINDOWS));
  return most;
}

int64_t find_section(const struct problem *problem, const struct visits *visits,
                     const struct backward_plan *plan, int64_t workers) {
  const int64_t all = (int64_t)plan->tiles.heads * plan->tiles.batches;
  const int64_t bytes_per_head = bytes_of_head(problem, plan->kernel);
  const bool whole_sequences = is_packed(problem) && plan->cluster == 1;
  int64_t most;
  if (has_large_groups(problem, visits, plan))
    return find_section_of_groups(problem, visits, plan, workers);
  if (problem->window_right < FA3_NO_LIMIT) {
    most = find_masked_section(problem, plan, workers);
    const int64_t fitting = larger(GROUPS_BYTES / bytes_per_head, 1);
    if (whole_sequences && !has_window(problem) && most > fitting && 3 * all > 4 * fitting)
      return smaller(find_packed_section(fitting, larger(plan->tiles.heads, 1)), larger(all, 1));
  } else {
    most = larger(CACHE_BYTES / bytes_per_head, LEAST_HEADS);
    const int64_t fewer = find_short_section(problem, visits, plan);
    if (fewer > 0) most = smaller(most, fewer);
    /* Where lengths are packed, most are shorter than the longest. */
    if (whole_sequences && 2 * most >= plan->tiles.heads)
      return smaller(round_up(most, plan->tiles.heads), larger(all, 1));
  }
  return larger(divide_up(all, larger(divide_up(all, larger(most, 1)), 1)), 1);
}
