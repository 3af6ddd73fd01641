#include "cuda/backward_parts.h"

#include <math.h>

#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/sequences.h"
#include "integer.h"

/* The most tiles in all their parts, for each worker and in all; and twice as many where they are
 * nearly alike. */
enum { MOST_PER_WORKER = 5, MOST_TILE_PARTS = 660 };

/* And with those that turn out to be beyond a packed sequence's end. */
enum { MOST_TAKEN = 4096 };

/* Of large groups: queries of a step for each head that takes a block in turn, at most, and steps
 * of a part in the mean, at least; under a window queries of all its heads, at least. Measured:
 * docs/notes/hopper-backward-tiles.md. */
enum { QUERIES_PER_HEAD = 32, LEAST_STEPS = 32, LEAST_QUERIES_IN_WINDOW = 2600 };

/* In steps. Measured: likewise. */
static const double chain_steps = 0.3; /* that tiles of a head begin after each other */

/* What parts cost beside their work, in steps, and by their bytes. Under a causal mask tiles end at
 * different times, and others read and write meanwhile. */
struct part_cost {
  double sum;   /* adding up, */
  double share; /* its share of the time that writing and reading once takes, */
  double rows;  /* times the rest, for parts by rows differ */
};

static const struct part_cost usual_cost = {2, 0.8, 1.08}, causal_cost = {1, 2.4, 1.1},
                              wide_causal_cost = {1, 2.4, 1.27};

/* dK and dV of a tile, in float32. */
static int64_t bytes_of_part(const struct kernel *kernel) {
  return (int64_t)sizeof(float) * TILE_K * (kernel->head_dim + kernel->value_head_dim);
}

int64_t least_in_turn(const struct kernel *kernel) {
  return kernel->tile_q / QUERIES_PER_HEAD;
}

int64_t count_arrivals(const struct problem *problem) {
  return multiply(count_key_tiles(problem), FA3_BACKWARD_PART_WARPS);
}

int64_t bytes_of_parts(const struct problem *problem, const struct backward_plan *plan,
                       int64_t sum_bytes) {
  const int64_t tiles = count_key_tiles(problem), bytes = bytes_of_part(plan->kernel);
  const int64_t few = bytes * smaller(multiply(FA3_MOST_PARTS, tiles), MOST_TILE_PARTS);
  /* What was asked for: a window that is dropped now may not be in a longer call. */
  const fa3_features masks = FA3_FEATURE_CAUSAL | FA3_FEATURE_WINDOW;
  if (!(problem->features & masks) || plan->cluster > 1 || is_small_step(problem)) return few;
  const int64_t places = query_heads_of_key_head(problem) / (2 * least_in_turn(plan->kernel));
  /* Half as much as a sum of dQ needs, at most. */
  return larger(few, smaller(multiply(multiply(tiles, places), bytes), sum_bytes / 2));
}

/* What is dealt out. */
struct deal {
  const struct visits *visits;
  int64_t tiles;   /* of keys, in all */
  int64_t heads;   /* of keys, of all sequences */
  int64_t group;   /* query heads that share keys */
  int64_t blocks;  /* of queries */
  int64_t workers; /* that take a tile at a time */
  int64_t bytes;   /* of dK and dV of a tile in float32 */
  const struct part_cost *cost;
  bool chained; /* tiles of a part begin at the same block, under a causal mask, */
  bool sums;    /* but there is room for two sums of dQ, */
  bool taken;   /* which the last tile takes */
};

/* At least, where tiles are dealt out by heads and long ones are taken first: when a worker takes
 * its tile of round number n, there have been enough that one has n tiles, each no shorter than
 * that. */
static double longest_rounds(const struct deal *deal, int64_t parts, double heads) {
  const int64_t tiles = deal->tiles * parts;
  double steps =
      deal->visits->most * heads + boundary_steps; /* the longest need not be the first */
  for (int64_t round = 0; round * deal->workers < tiles; round++) {
    const int64_t sample = round * deal->workers * deal->visits->samples / tiles;
    const double all = (double)(round + 1) * (deal->visits->of[sample] * heads + boundary_steps);
    if (all > steps) steps = all;
  }
  return steps;
}

/* How long it takes, in steps, where each tile's work is dealt out so. */
static double estimate(const struct deal *deal, int64_t head_parts, int64_t row_parts) {
  const int64_t parts = head_parts * row_parts, tiles = deal->tiles * parts;
  const double blocks = (double)divide_up(deal->blocks, row_parts);
  const double rows = deal->visits->most < blocks ? deal->visits->most : blocks;
  const double heads = (double)divide_up(deal->group, head_parts);
  const double longest = rows * heads + boundary_steps;
  const double mean = deal->visits->mean * (double)deal->group / (double)parts + boundary_steps;
  const double even = (double)tiles * mean / (double)deal->workers;
  double steps = row_parts == 1 ? longest_rounds(deal, parts, heads) : 0;
  if (alike(deal->visits)) { /* nearly alike: rounds */
    if (row_parts > 1) steps = (double)divide_up(tiles, deal->workers) * longest;
    if (even > steps) steps = even;
  } else { /* the long ones first, and the short ones fill the gaps */
    const double filled = (even > longest ? even : longest) + 0.35 * mean;
    if (filled > steps) steps = filled;
    if (row_parts > 1) steps *= deal->cost->rows;
    const bool sums =
        deal->sums &&
        (!deal->taken || (deal->group == head_parts && tiles <= FEW_ROUNDS * deal->workers));
    if (deal->chained && (row_parts > 1 || !sums))
      steps += chain_steps * (sums && deal->taken ? 0.8 : 1) *
               fmin((double)deal->workers / (double)(deal->heads * parts),
                    (double)deal->tiles / (double)deal->heads);
  }
  if (deal->group % head_parts) steps *= 1.03; /* so do these */
  const double bytes = (double)(tiles * deal->bytes);
  return parts > 1 ? steps + deal->cost->sum + deal->cost->share * bytes / bytes_of_step : steps;
}

/* The wide kernel's are whole tensors. */
static int64_t bytes_of_all_parts(const struct problem *problem, const struct backward_plan *plan,
                                  int64_t parts) {
  if (plan->cluster == 1)
    return fa3_part_places((int)parts) * problem->heads_k * plan->key_slots *
           bytes_of_part(plan->kernel);
  const int64_t rows = problem->batch_k * problem->rows_k * problem->heads_k;
  return (int64_t)sizeof(float) * parts * rows * (problem->head_dim + problem->value_head_dim);
}

void deal_parts(const struct problem *problem, const struct visits *visits, int64_t workers,
                struct backward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  fa3_key_tiles *tiles = &plan->tiles;
  const struct deal deal = {.visits = visits,
                            .tiles = count_tiles(problem, tiles),
                            .heads = tiles->heads * count_sequences(problem),
                            .group = query_heads_of_key_head(problem),
                            .blocks = divide_up(longest_query(problem), kernel->tile_q),
                            .workers = workers,
                            .bytes = bytes_of_part(kernel),
                            .cost = !is_causal(problem) || alike(visits) ? &usual_cost
                                    : plan->cluster == 1                 ? &causal_cost
                                                                         : &wide_causal_cost,
                            .chained = !has_window(problem),
                            .sums = !has_window(problem) && plan->cluster == 1 &&
                                    bytes_of_sum(problem, plan) <= MORE_SUMS_BYTES,
                            .taken = kernel->tile_q == 128};
  int64_t most = smaller(MOST_PER_WORKER * workers, MOST_TILE_PARTS);
  if (plan->cluster == 1 && alike(deal.visits)) most *= 2;
  if (2 * deal.tiles > most) return;
  const int64_t taken = fa3_key_tile_count(tiles);
  double best = estimate(&deal, 1, 1);
  /* What a tile sees through a window lies in few of the parts by rows; parts by heads do as well
   * there. */
  const bool narrow =
      deal.visits->most < 0.75 * (double)deal.blocks || (has_window(problem) && deal.group > 1);
  for (int64_t parts = 2; parts <= FA3_MOST_PARTS; parts++) {
    const int64_t most_row_parts = narrow ? 1 : smaller(parts, deal.blocks);
    if (parts * taken > MOST_TAKEN || parts * deal.tiles > most ||
        bytes_of_all_parts(problem, plan, parts) > plan->part_bytes)
      break;
    for (int64_t rows = 1; rows <= most_row_parts; rows++) {
      if (parts % rows || parts / rows > deal.group) continue;
      const double steps = estimate(&deal, parts / rows, rows);
      if (steps > 0.97 * best) continue;
      best = steps;
      tiles->head_parts = (int32_t)(parts / rows);
      tiles->row_parts = (int32_t)rows;
    }
  }
}

bool has_large_groups(const struct problem *problem, const struct visits *visits,
                      const struct backward_plan *plan) {
  return is_causal(problem) && visits->most > 0 && !alike(visits) && plan->cluster == 1 &&
         plan->tiles.row_parts == 1 && fa3_key_tile_count(&plan->tiles) > 0 &&
         query_heads_of_key_head(problem) >= 2 * least_in_turn(plan->kernel);
}

/* Likewise under a window, where fewer heads are enough: tiles hardly wait for each other. */
static bool has_groups_under_window(const struct problem *problem,
                                    const struct backward_plan *plan) {
  return has_window(problem) && plan->cluster == 1 && plan->tiles.row_parts == 1 &&
         query_heads_of_key_head(problem) > least_in_turn(plan->kernel);
}

void deal_groups(const struct problem *problem, const struct visits *visits,
                 struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (!has_large_groups(problem, visits, plan) && !has_groups_under_window(problem, plan)) return;
  if (multiply(fa3_key_tile_count(tiles), FA3_MOST_PARTS) > MAX_TILES ||
      count_arrivals(problem) > MAX_TILES)
    return;
  const int64_t group = query_heads_of_key_head(problem);
  const double steps = visits->mean * find_typical_share(problem, tiles) * (double)group;
  const double long_parts = has_window(problem)
                                ? steps * plan->kernel->tile_q / LEAST_QUERIES_IN_WINDOW
                                : steps / LEAST_STEPS;
  int64_t parts = smaller(divide_up(group, least_in_turn(plan->kernel)), (int64_t)long_parts);
  parts = smaller(parts, FA3_MOST_PARTS);
  /* Few chains, all in flight together, are better than short ones by turns. */
  const int64_t heads = tiles->heads * count_sequences(problem);
  if (has_window(problem) && heads <= FEW_WINDOWS && heads > 0 &&
      2 * (problem->window_left + problem->window_right) <= longest_query(problem))
    parts = smaller(parts, FEW_WINDOWS / heads);
  while (parts > tiles->head_parts && bytes_of_all_parts(problem, plan, parts) > plan->part_bytes)
    parts--;
  if (parts > tiles->head_parts) tiles->head_parts = (int32_t)parts;
}
