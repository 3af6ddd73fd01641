#include "cuda/backward_sections.h"

#include <math.h>

#include "cuda/backward_parts.h"
#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "integer.h"

/* Heads that a section without a mask has whatever their size; of few tiles so many parts of heads.
 */
enum { LEAST_HEADS = 4, FEW_KEY_TILES = 8 };

/* A head is short where its tiles share so many times what one has of its own, at most. */
enum { MOST_SHARED = 3 };

/* What a section has at most under a causal mask, and of large groups or packed lengths. Measured:
 * docs/notes/hopper-backward-tiles.md. */
enum { TOGETHER_BYTES = 512 << 20, GROUPS_BYTES = 128 << 20, MOST_OF_GROUP_BYTES = 200 << 20 };

/* What the windows of a section have: more where tiles stay in step. A section has a least number
 * of windows, whatever their size; and all of them, if they have no more than ALL_WINDOWS_BYTES, or
 * are few (FEW_WINDOWS), and have no more than these times rounds of tiles. Measured: likewise. */
enum {
  WINDOWS_BYTES = 18 << 20,
  WINDOWS_IN_STEP_BYTES = 36 << 20,
  ALL_WINDOWS_BYTES = 34 << 20,
  ROUNDS_OF_WINDOWS_BYTES = 550 << 20,
  LEAST_WINDOWS = 4
};

/* Steps between short tiles of a head, over the workers that take turns at them; and in steps, the
 * beginning and the end of such a tile, of kernels with 128 queries a step and of others. Measured:
 * likewise. */
static const double short_tiles_apart = 1.9;
static const double ends_of_128 = 0.6, ends_of_fewer = 2;

/* Less than a round of tiles, of a section of large groups. */
static const double least_part_of_round = 0.67;

/* Rounds of tiles of groups that are one section under a causal mask, of blocks and of pairs of
 * them, and bytes at most. Measured: likewise. */
static const double rounds_together = 2.05, rounds_of_pairs_together = 3.2;
enum { ROUNDS_TOGETHER_BYTES = 160 << 20 };

/* The same of heads with few tiles, in groups of so many query heads, or of pairs of blocks in any:
 * tiles of a head, and rounds, at most. */
enum { MOST_TILES_TOGETHER = 8, LEAST_GROUP_TOGETHER = 8, MOST_TILES_OF_PAIRS_TOGETHER = 10 };
static const double more_rounds_together = 3.05, more_rounds_of_pairs_together = 8;

/* Tiles, in all their parts, up to which packed sequences have sections of their own. Measured:
 * likewise. */
enum { FEW_SORTED = 6 * MULTIPROCESSORS };

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

/* Chains of large groups: of as many heads of keys as are enough, but no more than fit, in equal
 * sections; of a part of one head where there was no room for more parts of it.
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
  const int64_t parts = tiles->head_parts;
  if (is_packed(problem)) {
    const int64_t heads = tiles->heads;
    return parts * (size >= heads ? smaller(size / heads * heads, all)
                                  : divide_up(heads, count_sections(heads, size, fitting)));
  }
  if (in_turn > least_in_turn(plan->kernel) && bytes_per_head > MOST_OF_GROUP_BYTES)
    return larger(parts * GROUPS_BYTES / bytes_per_head, 1);
  int64_t sections = count_sections(all, size, fitting);
  for (; sections < all; sections++) {
    const int64_t of_section = divide_up(all, sections) * tiles->tiles * parts;
    const double rounds = (double)of_section / (double)workers;
    if (rounds <= least_part_of_round || rounds > 1) break;
  }
  return divide_up(all, sections) * parts;
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

/* Heads of keys whose chains keep tiles from waiting for each other, or as many as the L2 cache
 * holds. */
static int64_t enough_heads(const struct problem *problem, const struct backward_plan *plan,
                            int64_t in_turn, int64_t workers) {
  return larger(CACHE_BYTES / bytes_of_head(problem, plan->kernel),
                enough_chains(plan, in_turn, workers) / fa3_key_tile_parts(&plan->tiles));
}

/* Heads of a section under a window. Tiles begin at blocks of their own, so hardly any waits: but
 * they are anywhere in the window, and come back to a block when they are done. So what a section's
 * windows have is to stay in the L2 cache, or enough tiles of a head have to run side by side, and
 * in step. These begin together, and are in step, if they are equally long; not where the first
 * ones see few queries, since keys are more than queries. They stay so on a short way, and where
 * the heads of a group take each block in turn. */
static int64_t find_section_of_windows(const struct problem *problem,
                                       const struct backward_plan *plan, int64_t workers) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const int64_t all = tiles->heads * count_sequences(problem);
  const int64_t parts = tiles->head_parts, group = query_heads_of_key_head(problem);
  const int64_t queries = larger(longest_query(problem), 1);
  const int64_t keys = longest_key(problem);
  const int64_t window = smaller(problem->window_left + problem->window_right, queries);
  const bool equally_long = 2 * (keys - queries) <= window;
  const bool by_head = (plan->cluster > 1 || plan->kernel->by_head) && equally_long;
  const int64_t in_turn = by_head ? 1 : divide_up(group, parts);
  const int64_t way = smaller(queries, window + TILE_K);
  const int64_t bytes = way * in_turn * (bytes_of_head(problem, plan->kernel) / (queries * group));
  const double all_bytes = (double)(all * parts) * (double)bytes;
  const double rounds = (double)(count_tiles(problem, tiles) * parts) / (double)workers;
  const bool few = equally_long && all * parts <= FEW_WINDOWS;
  int64_t size = enough_heads(problem, plan, in_turn, workers);
  if (equally_long) size = smaller(size, larger(FEW_WINDOWS / parts, 1));
  if (all_bytes <= ALL_WINDOWS_BYTES || (few && all_bytes * rounds <= ROUNDS_OF_WINDOWS_BYTES))
    return size;
  const bool in_step = equally_long && (in_turn > 1 || 5 * window >= 2 * queries);
  const int64_t most = (in_step ? WINDOWS_IN_STEP_BYTES : WINDOWS_BYTES) / bytes;
  return smaller(size, larger(most, LEAST_WINDOWS) / parts);
}

/* Heads of a section under a causal mask: as many as are enough, no more than fit. */
static int64_t find_causal_section(const struct problem *problem, const struct backward_plan *plan,
                                   int64_t workers) {
  const int64_t queries = larger(longest_query(problem), 1);
  const int64_t bytes_per_head = bytes_of_head(problem, plan->kernel);
  const int64_t group = query_heads_of_key_head(problem);
  /* The wide kernel is done with a query head before it takes the next. */
  const int64_t in_turn = plan->cluster > 1 ? 1 : divide_up(group, plan->tiles.head_parts);
  const int64_t size = enough_heads(problem, plan, in_turn, workers);
  /* More keys are more rounds of tiles. */
  const int64_t keys = longest_key(problem);
  const int64_t way = larger(queries, smaller(keys, 4 * queries));
  const int64_t bytes_of_way = way * (bytes_per_head / queries);
  return smaller(size, larger(TOGETHER_BYTES / bytes_of_way, 1));
}

/* In heads of keys. */
static int64_t find_section_of_heads(const struct problem *problem, const struct visits *visits,
                                     const struct backward_plan *plan, int64_t workers) {
  const int64_t all = (int64_t)plan->tiles.heads * plan->tiles.batches;
  const int64_t bytes_per_head = bytes_of_head(problem, plan->kernel);
  const bool whole_sequences = is_packed(problem) && plan->cluster == 1;
  int64_t most;
  if (has_window(problem)) {
    most = find_section_of_windows(problem, plan, workers);
  } else if (problem->window_right < FA3_NO_LIMIT) {
    most = find_causal_section(problem, plan, workers);
    const int64_t fitting = larger(GROUPS_BYTES / bytes_per_head, 1);
    if (whole_sequences && most > fitting && 3 * all > 4 * fitting)
      return smaller(find_packed_section(fitting, larger(plan->tiles.heads, 1)), larger(all, 1));
  } else {
    const int64_t parts = plan->tiles.tiles <= FEW_KEY_TILES ? fa3_key_tile_parts(&plan->tiles) : 1;
    const int64_t least = divide_up(LEAST_HEADS, parts);
    most = larger(CACHE_BYTES / bytes_per_head, least);
    const int64_t fewer = find_short_section(problem, visits, plan);
    if (fewer > 0) most = smaller(most, fewer);
    /* Where lengths are packed, most are shorter than the longest. */
    if (whole_sequences && 2 * most >= plan->tiles.heads)
      return smaller(round_up(most, plan->tiles.heads), larger(all, 1));
  }
  return larger(divide_up(all, larger(divide_up(all, larger(most, 1)), 1)), 1);
}

/* Whether the heads of groups have so few tiles that several rounds may be one section: a head's
 * last tiles end soon after its first ones, so few heads are in use at a time. */
static bool have_few_tiles(const struct problem *problem, const struct backward_plan *plan) {
  const int64_t queries = longest_query(problem), tiles = plan->tiles.tiles;
  const int64_t keys = longest_key(problem);
  if (2 * keys > 3 * queries || 2 * queries > 3 * keys) return false;
  if (plan->cluster > 1) return tiles <= MOST_TILES_OF_PAIRS_TOGETHER;
  return tiles <= MOST_TILES_TOGETHER && query_heads_of_key_head(problem) >= LEAST_GROUP_TOGETHER;
}

/* Whether all tiles of groups are one section, the longest first: they are few, or those of a head
 * are. Of several sections the long tiles of the last would begin when others end. */
static bool are_together(const struct problem *problem, const struct backward_plan *plan,
                         int64_t workers) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const double parts = fa3_key_tile_parts(tiles), heads = (double)tiles->heads * tiles->batches;
  const double rounds = heads * tiles->tiles * parts / (double)workers;
  const double bytes = heads * (double)bytes_of_head(problem, plan->kernel);
  const bool pairs = plan->cluster > 1;
  if (!is_causal(problem) || is_packed(problem) || query_heads_of_key_head(problem) == 1)
    return false;
  if (rounds <= (pairs ? rounds_of_pairs_together : rounds_together) &&
      bytes <= ROUNDS_TOGETHER_BYTES)
    return true;
  return have_few_tiles(problem, plan) && bytes <= TOGETHER_BYTES &&
         rounds <= (pairs ? more_rounds_of_pairs_together : more_rounds_together);
}

/* Whether sequences that are taken longest first have a section each, since tiles are few and all
 * of a sequence alike. Numbers beyond the end of short ones then come last, too. */
static bool are_apart(const struct problem *problem, const fa3_key_tiles *tiles) {
  return tiles->longest_first && !is_masked(problem) &&
         count_tiles(problem, tiles) * fa3_key_tile_parts(tiles) <= FEW_SORTED;
}

int64_t find_section(const struct problem *problem, const struct visits *visits,
                     const struct backward_plan *plan, int64_t workers) {
  if (are_together(problem, plan, workers)) return larger(fa3_chain_count(&plan->tiles), 1);
  if (are_apart(problem, &plan->tiles)) return (int64_t)plan->tiles.heads * plan->tiles.head_parts;
  if (has_large_groups(problem, visits, plan))
    return find_section_of_groups(problem, visits, plan, workers);
  return plan->tiles.head_parts * find_section_of_heads(problem, visits, plan, workers);
}
