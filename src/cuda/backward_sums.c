#include "cuda/backward_sums.h"

#include <math.h>

#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "integer.h"

/* Where dQ is stored by a kernel of its own: at least so many steps of a tile, and more where tiles
 * are more than these, in all their parts; fewer of 128 queries. With 80 queries it gains with any
 * number of tiles. Of pairs of blocks, where a head has two tiles. */
enum { LONG_TILE = 5, LONGER_TILE = 16, LONGER_TILE_OF_128 = 12, LONG_TILE_OF_PAIRS = 8 };
enum { FEW_TILES = 6 * MULTIPROCESSORS };

/* The least share of a packed batch's rows (filled_share) for that kernel where tiles are many: it
 * has blocks for all of the rest too. */
static const double least_filled = 0.25;

/* Sums of a block of dQ, at least, for narrow slices. */
enum { NARROW_SUMS = 8 };

/* Bytes of all sums of dQ that stay in the L2 cache. */
enum { CACHED_SUMS_BYTES = 34 << 20 };

/* Tiles are staggered where at least so many of a head run side by side, or these are all; and they
 * begin at most 2^this blocks apart. */
enum { LEAST_STAGGERED = 4, FEW_STAGGERED = 3, MOST_STAGGER_LOG2 = 3 };

/* Tiles of a head side by side that have four sums which the last tile takes, at least, and not
 * two; and where tiles are in parts by rows. Measured: docs/notes/hopper-backward-tiles.md. */
enum { MANY_BESIDE = 32, MANY_BESIDE_IN_ROWS = 10 };

/* Where half of the heads rise: rounds of tiles, at least, or up to which more is gained; and steps
 * of a tile, at most, if dQ is finished later. Measured: docs/notes/hopper-backward-tiles.md. */
static const double least_rounds = 1.4, least_rounds_of_long_steps = 1.6, two_rounds = 2.05;
enum { FARTHEST_RISE = 72 };

/* Heads of a packed batch rise only if its rows would fill so many of the longest sequence. The
 * longest tiles of heads that rise come last, and with few heads they end late. */
static const int64_t least_packed_heads = 24;

/* What the longest of packed sequences has of all rows, for its heads to rise as if it were alone.
 */
static const double least_of_long = 0.85;

/* What the half of all heads that rises keeps in the L2 cache; and all heads, where groups of no
 * more tiles than these are in parts, and in more than two rounds of tiles. */
enum { RISING_BYTES = 44 << 20, RISING_PARTS_BYTES = 56 << 20, SHORT_CHAIN = 32 };

/* Rounds of tiles that wait for each other under a mask, at most, if a tile has so many steps: such
 * tiles begin at different times after that. */
static const double waiting_rounds = 2;
enum { STEPS_APART = 4 };

/* In steps. Measured: likewise. */
static const double finish_steps = 1.5; /* the kernel that stores dQ, beside its bytes */
static const double wait_steps = 1.2;   /* that tiles begin after each other, without a mask */
static const double packed_waits = 2;   /* so many times, where lengths are packed */
static const double sum_passes = 3;     /* that a sum beyond the first is written or read */
/* Where all tiles run side by side (find_sums_of_round_log2). */
static const double round_finish = 1.2; /* for finish_steps */
static const double round_wait = 0.75;  /* for each tile that a sum has before this one */
static const double round_passes = 0.8, round_passes_of_pairs = 2.5; /* for sum_passes */
static const double last_steps = 0.3;   /* of each step that stores dQ, without that kernel */
static const double last_share = 1.4;   /* of a step that takes the sum and stores dQ */
static const double finish_waits = 3.0; /* that such steps may cost before dQ is finished later */

/* Whether each packed sequence has as many queries as keys, as far as the plan knows. */
static bool is_packed_self(const struct problem *problem) {
  return problem->cu_seqlens_q && problem->cu_seqlens_k &&
         problem->max_seqlen_q == problem->max_seqlen_k && problem->rows_q == problem->rows_k;
}

bool finish_later(const struct problem *problem, const struct backward_plan *plan) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t steps = plan->blocks_q * group / fa3_key_tile_parts(tiles);
  if (is_masked(problem)) return false;
  if (plan->cluster > 1)
    return tiles->tiles > 2 ? plan->blocks_q > 0 : tiles->tiles == 2 && steps >= LONG_TILE_OF_PAIRS;
  const int tile_q = plan->kernel->tile_q;
  const int64_t count = fa3_key_tile_count(tiles);
  const bool many = count > FEW_TILES && tile_q != 80;
  if (tiles->tiles == 1 && 2 * count > MULTIPROCESSORS) return false;
  if (tiles->tiles == 2 && many) return false;
  if (many && filled_share(problem) < least_filled) return false;
  if (!many) return steps >= LONG_TILE;
  return steps >= (tile_q == 128 ? LONGER_TILE_OF_128 : LONGER_TILE);
}

bool takes_narrow_slices(const struct problem *problem, const struct backward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  const int64_t slices = FA3_BACKWARD_FINISH_SLICES(kernel->head_dim, kernel->tile_q, false);
  const int64_t blocks = plan->blocks_q * problem->heads_q * problem->batch;
  return fa3_sum_count(&plan->tiles) >= NARROW_SUMS && blocks * slices <= MULTIPROCESSORS;
}

int64_t most_sums(int64_t least_bytes) {
  return smaller(FA3_MOST_SUMS, larger(1 + MORE_SUMS_BYTES / larger(least_bytes, 1), 2));
}

int64_t most_counters(int64_t blocks, int64_t block_bytes) {
  const int64_t some = blocks + MORE_SUMS_BYTES / larger(block_bytes, 1);
  return smaller(multiply(FA3_MOST_SUMS, blocks), larger(multiply(2, blocks), some));
}

int64_t bytes_of_more_sums(int64_t sum_bytes) {
  return smaller(multiply(FA3_MOST_SUMS - 1, sum_bytes), MORE_SUMS_BYTES);
}

/* Whether tiles that go upwards, all of a head, would begin at blocks of their own: under a causal
 * mask. Pairs of blocks cannot go upwards. */
static bool may_rise(const struct problem *problem, const struct visits *visits,
                     const struct backward_plan *plan) {
  return plan->cluster == 1 && !has_window(problem) && visits->mean <= 0.6 * visits->most;
}

/* Heads as long as the longest sequence's that there are rows for, where longest come first. */
static int64_t count_long_heads(const struct problem *problem, const fa3_key_tiles *tiles) {
  const int64_t longest = larger(longest_query(problem), 1);
  if (!tiles->longest_first) return (int64_t)tiles->heads * tiles->batches;
  return tiles->heads * problem->rows_q / longest;
}

/* Whether others are so short beside the first of packed sequences that its heads rise as if it
 * were alone. With 128 queries a step that is slower. */
static bool is_one_long(const struct problem *problem, const struct backward_plan *plan) {
  return plan->tiles.longest_first && plan->kernel->tile_q < 128 &&
         (double)longest_query(problem) >= least_of_long * (double)problem->rows_q;
}

/* Lets all of so many heads rise, but for the last ones. */
static bool let_rise(const struct problem *problem, int64_t heads, struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  const int64_t section = CACHE_BYTES / bytes_of_head(problem, plan->kernel);
  const int64_t downward = larger(divide_up((int64_t)2 * MULTIPROCESSORS, tiles->tiles), section);
  if (section < 1 || heads < section + downward) return false;
  tiles->rising_section = (int32_t)section;
  tiles->rising = (int32_t)(heads - downward);
  tiles->section = (int32_t)downward;
  return true;
}

void deal_rising(const struct problem *problem, const struct visits *visits,
                 struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (!may_rise(problem, visits, plan) || problem->heads_q > problem->heads_k ||
      fa3_key_tile_parts(tiles) > 1 || fa3_sum_count(tiles) > 1)
    return;
  const bool many =
      !is_packed(problem) || tiles->heads * count_sequences(problem) >= least_packed_heads;
  if (!many && !is_one_long(problem, plan)) return;
  if (let_rise(problem, count_long_heads(problem, tiles), plan) || !tiles->longest_first || !many)
    return;
  /* Too few are long: rather those of any sequences, as they come. */
  tiles->longest_first = !let_rise(problem, (int64_t)tiles->heads * tiles->batches, plan);
}

void deal_half_rising(const struct problem *problem, const struct visits *visits,
                      struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  const bool alone = !is_packed(problem) || is_one_long(problem, plan);
  if (!may_rise(problem, visits, plan) || !alone || tiles->rising > 0 || tiles->row_parts > 1)
    return;
  const int64_t all = count_long_heads(problem, tiles) * tiles->head_parts;
  const double rounds = (double)(all * tiles->tiles) / MULTIPROCESSORS;
  const bool even_rounds = rounds >= least_rounds_of_long_steps && rounds <= two_rounds;
  const int64_t rising =
      smaller(MULTIPROCESSORS / tiles->tiles, even_rounds ? all / 2 : 3 * all / 8);
  const int64_t bytes_per_chain = bytes_of_head(problem, plan->kernel) / tiles->head_parts;
  if (rising < 1 || rising * bytes_per_chain > RISING_BYTES) return;
  if (tiles->head_parts > 1 && tiles->tiles <= SHORT_CHAIN && rounds > two_rounds &&
      all * bytes_per_chain > RISING_PARTS_BYTES)
    return;
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t in_turn = divide_up(group, tiles->head_parts);
  const double longest = visits->most * (double)in_turn;
  const double even = rounds * (visits->mean * (double)in_turn + boundary_steps);
  const bool later = last_share * longest + boundary_steps > even + finish_waits;
  const bool short_steps = plan->kernel->tile_q < 128;
  const double least = later && short_steps ? least_rounds : least_rounds_of_long_steps;
  if (rounds < least || in_turn > 2 || (later && longest > FARTHEST_RISE)) return;
  if (rounds > two_rounds && (in_turn > 1 || (later && !short_steps))) return;
  tiles->rising = tiles->rising_section = (int32_t)rising;
  tiles->section = (int32_t)(fa3_chain_count(tiles) - rising);
  tiles->sums_log2 = tiles->upward = 0;
  plan->finished_later = later;
}

/* Of a head, in the mean. */
static double tiles_side_by_side(const struct problem *problem, const struct backward_plan *plan) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const double workers = (double)MULTIPROCESSORS / plan->cluster;
  const double in_flight = (double)larger((int64_t)tiles->section * tiles->row_parts, 1);
  /* Most packed sequences have fewer tiles than the longest. */
  const double all = (double)tiles->tiles * tiles->heads * tiles->batches;
  return fmin(tiles->tiles, workers / in_flight * all / (double)count_tiles(problem, tiles));
}

/* Whether two sums of each block stay in the L2 cache. Those of the heads in flight are enough,
 * where adding up all takes less than tiles would wait for each other. */
static bool has_two_sums(const struct problem *problem, const struct backward_plan *plan,
                         double beside) {
  const double bytes = bytes_of_sum(problem, plan);
  const double chains = MULTIPROCESSORS / beside; /* in flight */
  const double share = fmin(1, chains / fa3_chain_count(&plan->tiles));
  if (2 * bytes <= CACHED_SUMS_BYTES) return true;
  /* Tiles of packed lengths, which end at different times, wait more than once. */
  const double waits = wait_steps * beside * (is_packed(problem) ? packed_waits : 1);
  return 2 * share * bytes <= CACHED_SUMS_BYTES && bytes <= MORE_SUMS_BYTES &&
         waits > sum_passes * bytes / bytes_of_step + finish_steps;
}

/* Without a mask, tiles of a head that run side by side may each begin at a block of their own
 * (backward_order.h); the more blocks are between two of them the better. There are to be places
 * for all tiles of the head, since one that begins where another did waits until those between them
 * have gone by. Or, where that takes no more rounds, no more places than run side by side: those of
 * a round then end before the next one begins. */
static void stagger_tiles(const struct problem *problem, struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (plan->cluster > 1 || (is_packed(problem) && !is_packed_self(problem)) || is_masked(problem) ||
      tiles->row_parts > 1)
    return;
  const double beside = tiles_side_by_side(problem, plan);
  const int least = tiles->tiles == FEW_STAGGERED ? FEW_STAGGERED : LEAST_STAGGERED;
  if (beside < least || !has_two_sums(problem, plan, beside)) return;
  const int64_t rounds = (int64_t)ceil(tiles->tiles / beside);
  const bool together = tiles->section >= fa3_chain_count(tiles); /* or there are no rounds */
  int best = -1;
  /* Short sequences have few places. */
  for (int log2 = 0; log2 <= (is_packed(problem) ? 0 : MOST_STAGGER_LOG2); log2++) {
    const int64_t places = divide_up(plan->blocks_q, 1 << log2);
    const bool for_all = places >= tiles->tiles;
    const bool for_a_round =
        together && (double)places <= beside && divide_up(tiles->tiles, places) <= rounds;
    /* Neighbours a block apart wait for each other now and then: rather places for a round. */
    if (for_all || (for_a_round && best < 1)) best = log2;
  }
  tiles->staggered = best >= 0;
  tiles->stagger_log2 = best > 0 ? best : 0;
}

/* Whether tiles, but for the first ones, see all queries, and so begin at the same block. */
static bool is_wide_window(const struct problem *problem) {
  return problem->window_left + problem->window_right >= longest_query(problem);
}

/* Whether a block may have 2^log2 sums: more than tiles that add at a time are of no use. */
static bool may_have_sums(const struct backward_plan *plan, int log2, double tiles, double bytes) {
  const double sums = 1 << log2;
  return sums <= plan->most_sums && sums < 2 * tiles && sums * bytes <= CACHED_SUMS_BYTES;
}

/* How many sums a block of dQ has, as a power of 2, where so many tiles begin at the same block
 * side by side, `rounds` times. */
static int find_sums_log2(const struct backward_plan *plan, double beside, double rounds,
                          double bytes) {
  double best = 0;
  int found = 0;
  for (int log2 = 1; may_have_sums(plan, log2, beside, bytes); log2++) {
    const double sums = 1 << log2;
    const double gain = wait_steps * beside * (1 - 1 / sums) * rounds;
    const double cost = sum_passes * (sums - 1) * bytes / bytes_of_step + finish_steps;
    if (gain <= cost || (log2 > 1 && 0.6 * gain - cost <= best)) continue;
    best = 0.6 * gain - cost;
    found = log2;
  }
  return found;
}

/* The same where all tiles of the call run side by side, which have so many steps. Memory is idle
 * then, so further sums cost little. In rounds this formula takes too many without a mask
 * (docs/notes/hopper-backward-tiles.md). Under a mask it serves there too, with no steps: the last
 * tile stores dQ for nothing, as nobody waits for it. */
static int find_sums_of_round_log2(const struct backward_plan *plan, double tiles, double steps,
                                   double bytes) {
  const double passes = plan->cluster > 1 ? round_passes_of_pairs : round_passes;
  double best = round_wait * (tiles - 1) + fmin(round_finish, last_steps * steps);
  int found = 0;
  for (int log2 = 1; may_have_sums(plan, log2, tiles, bytes); log2++) {
    const double sums = 1 << log2;
    const double time = round_wait * (ceil(tiles / sums) - 1) + round_finish +
                        passes * (sums - 1) * bytes / bytes_of_step;
    if (time >= best) continue;
    best = time;
    found = log2;
  }
  return found;
}

int64_t count_upward(int64_t tiles, int64_t beside, double bytes) {
  const double gain = 0.95 * (double)beside;
  if (3 * beside < tiles || beside >= tiles ||
      gain < 1.1 * (finish_steps + 2.5 * bytes / bytes_of_step))
    return 0;
  /* Of three rounds the last tiles upwards, which are the longest, would end last. */
  return (int64_t)(2 * beside < tiles ? 0.8 * (double)beside : (double)beside);
}

void deal_sums(const struct problem *problem, const struct visits *visits,
               struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  const int parts = fa3_key_tile_parts(tiles);
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t all = larger(tiles->heads * count_sequences(problem), 1) * parts;
  const double bytes = bytes_of_sum(problem, plan);
  const int64_t workers = MULTIPROCESSORS / plan->cluster;
  stagger_tiles(problem, plan);
  if (tiles->staggered) return;
  if (has_window(problem) ? is_wide_window(problem) : alike(visits)) {
    const double beside = floor(tiles_side_by_side(problem, plan));
    const double steps = visits->most * (double)group / parts;
    double rounds = steps < 1.75 * beside ? (double)divide_up(all * tiles->tiles, workers) : 1;
    if (is_causal(problem) && (steps >= STEPS_APART || plan->cluster > 1))
      rounds = fmin(rounds, waiting_rounds);
    tiles->sums_log2 = all * tiles->tiles <= workers
                           ? find_sums_of_round_log2(plan, (double)tiles->tiles, steps, bytes)
                           : find_sums_log2(plan, beside, rounds, bytes);
  } else if (!has_window(problem) &&
             (plan->cluster > 1 || (tiles->row_parts > 1 && plan->kernel->tile_q < 128))) {
    tiles->sums_log2 = find_sums_of_round_log2(
        plan, ceil(fmin(tiles->tiles, (double)workers / (double)all)), 0, bytes);
  } else if (!has_window(problem) && bytes <= MORE_SUMS_BYTES) {
    const int64_t beside = workers / all;
    if (plan->kernel->tile_q == 128) { /* the last tile takes them all */
      if (beside <= 1 || group > tiles->head_parts || all * tiles->tiles > FEW_ROUNDS * workers)
        return;
      /* Only the last tile reads them, so they may be more than stays in the L2 cache. */
      const bool more = beside >= (tiles->row_parts > 1 ? MANY_BESIDE_IN_ROWS : MANY_BESIDE);
      tiles->sums_log2 = more && plan->most_sums >= 4 && 4 * bytes <= MORE_SUMS_BYTES ? 2 : 1;
    } else {
      if (is_packed(problem)) return;
      tiles->upward = (int32_t)count_upward(tiles->tiles, beside, bytes);
      if (tiles->upward == 0) return;
    }
    tiles->section = fa3_chain_count(tiles);
  }
}
