#include "cuda/forward_splits.h"

#include <math.h>

#include "cuda/forward_steps.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/sequences.h"
#include "integer.h"
#include "kernels/combine_params.h"
#include "mask.h"

enum { ROWS = 64 /* of a warpgroup */ };

static const int64_t most_split_rows = 32768; /* partial results of a call */
static const int64_t least_keys = 512;
static const int64_t most_splits = 64;
static const int64_t few_rows = 512; /* for which combine has a block each */

/* What a call takes, in steps: a tile of keys for all warpgroups of a block.
 * docs/notes/hopper-forward.md has the measurements behind these. */
static const double step_seconds = 1.45e-6;
static const double tile_steps = 1.4;        /* of each tile beside its keys, */
static const double store_steps = 0.7;       /* of a part of 128 rows and columns beside that, */
static const double combine_steps = 2.5;     /* of combine, */
static const double partial_steps = 1.25e-4; /* and of each of its rows' parts, of 128 columns */
static const double least_gain = 0.97;

/* Keys dealt out (kernels/forward_deal.cuh): keys of the longest sequence at least; most sequences,
 * and blocks of rows of each; the part of the multiprocessors that teams have to fill; and steps in
 * which a block finds its share. */
static const int64_t most_tile_rows = 192; /* of any variant */
static const int64_t least_dealt_keys = 1024, most_dealt_sequences = 256, most_dealt_blocks = 32;
static const double least_filled = 0.96;
static const double deal_steps = 1;
/* Where one long sequence may be waited for: tiles for each multiprocessor, and steps of the call
 * otherwise.
 */
static const double least_waiting_tiles = 0.15, most_waiting_tiles = 3;
static const double least_waiting_steps = 8;

/* Whether a call with so many keys may have them dealt out, with few enough queries. Packed keys
 * are prompts' own. */
static bool may_deal(const struct problem *problem) {
  return !problem->cu_seqlens_k && (!problem->cu_seqlens_q || problem->seqused_k) &&
         !problem->num_splits && problem->max_seqlen_k >= least_dealt_keys;
}

/* Rows of all parts: two tiles for each multiprocessor. Of the largest ones whatever the head dim,
 * or a call with more columns might take less room. */
static int64_t dealt_rows(const struct cuda_facts *facts) {
  return 2 * (int64_t)facts->most_multiprocessors * most_tile_rows;
}

static double count_rows(const struct problem *problem) {
  return (double)longest_query(problem) * (double)problem->batch * (double)problem->heads_q;
}

int64_t forward_split_rows(const struct problem *problem, const struct cuda_facts *facts) {
  if (problem->max_seqlen_k < least_keys || problem->num_splits == 1 || problem->cu_seqlens_q)
    return may_deal(problem) ? dealt_rows(facts) : 0;
  /* No more than a call can have: a share has at least 64 keys. */
  const double rows = count_rows(problem);
  const double parts = (double)smaller(problem->max_seqlen_k / 64, most_splits);
  /* A call that may have its keys dealt out may be split instead. */
  const int64_t most =
      may_deal(problem) ? larger(dealt_rows(facts), most_split_rows) : most_split_rows;
  return rows * parts < (double)most ? (int64_t)(rows * parts) : most;
}

int forward_combine_warps(const struct problem *problem, int64_t splits) {
  return count_rows(problem) <= (double)few_rows ? FA3_COMBINE_WARPS_OF(splits) : 1;
}

/* A way to share the work out. */
struct sharing {
  int64_t tile_heads; /* of a tile */
  int64_t warpgroups;
  int64_t splits; /* of its keys */
};

/* Tiles of keys that a tile sees. */
struct sight {
  double longest, mean;
};

static struct sight count_keys(const struct problem *problem, const struct kernel *kernel) {
  const int64_t keys = problem->max_seqlen_k;
  const bool right = problem->window_right < MASK_UNBOUNDED;
  const bool left = problem->window_left < MASK_UNBOUNDED;
  const double all = (double)divide_up(keys, kernel->tile_k);
  struct sight seen = {all, all};
  if (left) {
    const int64_t behind = right ? 0 : keys;
    const int64_t width = smaller(problem->window_left, keys) + behind + kernel->tile_q;
    seen.longest = seen.mean = fmin(all, 1 + (double)width / (double)kernel->tile_k);
  } else if (right) {
    seen.mean *= 1 - fmin((double)problem->max_seqlen_q / (double)larger(keys, 1), 1) / 2;
  }
  return seen;
}

static int64_t blocks_of(const struct problem *problem, struct sharing sharing) {
  return divide_up(longest_query(problem), sharing.warpgroups * (ROWS / sharing.tile_heads));
}

double forward_tile_time(const struct kernel *kernel, int64_t warpgroups) {
  static const double of_three[] = {0.60, 0.80, 1}, of_two[] = {0.77, 1}, of_two_wide[] = {0.85, 1};
  static const double of_three_fp8[] = {0.60, 0.73, 1};
  const double *time = kernel->dtype == FA3_FLOAT8_E4M3 ? of_three_fp8
                       : kernel->tile_q / ROWS == 3     ? of_three
                       : kernel->head_dim > 128         ? of_two_wide
                                                        : of_two;
  return time[warpgroups - 1];
}

/* About what a call takes. */
static double time_of(const struct problem *problem, const struct cuda_facts *facts,
                      const struct kernel *kernel, struct sight seen, struct sharing sharing) {
  const double step = forward_tile_time(kernel, sharing.warpgroups);
  const int64_t heads = problem->heads_q / sharing.tile_heads * problem->batch;
  const double splits = (double)sharing.splits;
  const double tiles = (double)blocks_of(problem, sharing) * (double)heads;
  const double rounds = tiles * splits / (double)facts->most_multiprocessors;
  const double columns = (double)problem->value_head_dim / 128;
  const double part = splits > 1 ? store_steps * columns * (double)sharing.warpgroups / 2 : 0;
  const double longest = step * ceil(seen.longest / splits) + tile_steps + part;
  const double mean = step * seen.mean / splits + tile_steps + part;
  double time;
  if (problem->window_right < MASK_UNBOUNDED)
    time = fmax(fmax(longest, rounds * mean + (rounds > 1 ? mean / 3 : 0)),
                time_of_rounds(longest, mean, rounds));
  else
    time = ceil(rounds) * longest;
  if (sharing.splits == 1) return time;
  const double rows = count_rows(problem);
  return (time + combine_steps + rows * partial_steps * splits * columns) / least_gain;
}

/* Shares that teams of so many tiles have. */
static int64_t shares_of(int64_t most, int64_t team) {
  return most / team * team;
}

/* Tiles whose shares are side by side: as many heads as leave few multiprocessors without one. */
static int64_t choose_team(int64_t most, int64_t heads) {
  for (int64_t team = smaller(heads, most); team > 1; team--) {
    const int64_t shares = shares_of(most, team);
    if (heads % team == 0 && (double)shares >= least_filled * (double)most) return team;
  }
  return 1;
}

/* All rows of a block of them at once, or keys would be read again. */
static struct sharing dealt_tiles(const struct problem *problem, const struct kernel *kernel,
                                  int64_t tile_heads) {
  struct sharing one = {.tile_heads = tile_heads, .warpgroups = kernel->tile_q / ROWS, .splits = 1};
  const int64_t blocks = larger(blocks_of(problem, one), 1), rows = ROWS / tile_heads;
  const int64_t longest = longest_query(problem);
  one.warpgroups = larger(divide_up(divide_up(longest, blocks), rows), 1);
  return one;
}

/* How often the keys of a head are read by so many tiles that lie one behind the other, each as
 * long as 1, and are cut into shares of `share`, which begin at once: key x (0 to 1) of tile n is
 * read at time (n + x) % share. So a tile reads from the L2 cache what another one has read not
 * long before: within `kept`, if all keys are read once while the shares last; within half of it,
 * if they are read twice. More than 64 tiles are taken to read them anew each. */
static int64_t count_readings(int64_t tiles, double share, double kept) {
  enum { MOST_TILES = 64 };
  double times[MOST_TILES], gaps[MOST_TILES]; /* sorted: the greatest gap is the first */
  if (tiles > MOST_TILES) return tiles;
  for (int64_t t = 0; t < tiles; t++) {
    const double time = fmod((double)t, share);
    int64_t n = t;
    for (; n > 0 && times[n - 1] > time; n--) times[n] = times[n - 1];
    times[n] = time;
  }
  for (int64_t t = 0; t < tiles; t++) {
    const double gap = t + 1 < tiles ? times[t + 1] - times[t] : times[0] + share - times[t];
    int64_t n = t;
    for (; n > 0 && gaps[n - 1] < gap; n--) gaps[n] = gaps[n - 1];
    gaps[n] = gap;
  }
  /* The more is read, the less long it is kept. */
  int64_t readings = 1;
  while (readings < tiles && gaps[readings] * (double)readings > kept) readings++;
  return readings;
}

/* What it takes to read the keys and values that are seen, in steps; 0: no more than `work`. Tiles
 * of a team that share a key head read its keys once; those that follow in the same shares may read
 * them again. */
static double reading_time(const struct problem *problem, const struct cuda_facts *facts,
                           double keys, double tiles, int64_t team, double shares,
                           struct sharing one, double work) {
  const double row = (double)fa3_dtype_size(problem->key.dtype) *
                     (double)(problem->head_dim + problem->value_head_dim);
  const double bytes = row * fmin(keys, (double)problem->max_seqlen_k) * (double)problem->heads_k *
                       (double)problem->batch;
  const int64_t readers = problem->heads_q / problem->heads_k / one.tile_heads;
  const int64_t in_turn = divide_up(blocks_of(problem, one) * readers, team);
  const double once = reading_seconds(facts, bytes) / step_seconds;
  if (bytes <= KEPT_BYTES || in_turn == 1 || (double)in_turn * once <= work) return 0;
  const double share = tiles / shares;
  return once * (double)count_readings(in_turn, share, KEPT_BYTES / bytes * share);
}

/* About what a call takes whose keys are dealt out, all sequences being as long as they may be;
 * infinite where they can't be, or where multiprocessors are to be left free: each has a share. */
static double dealt_time(const struct problem *problem, const struct cuda_facts *facts,
                         const struct forward_plan *plan, struct sight seen, struct sharing one) {
  const int64_t most = facts->most_multiprocessors, blocks = blocks_of(problem, one);
  const int64_t heads = problem->heads_q / one.tile_heads;
  const int64_t longest = longest_query(problem);
  const int64_t tile_rows = one.warpgroups * (ROWS / one.tile_heads) * one.tile_heads;
  const double tiles = (double)blocks * (double)heads * (double)problem->batch;
  const double units = ceil((double)problem->max_seqlen_k / (double)plan->kernel->tile_k) + 1;
  if (!may_deal(problem) || facts->multiprocessors < most ||
      problem->batch > most_dealt_sequences || tiles < 1 || blocks > most_dealt_blocks ||
      4 * longest > problem->max_seqlen_k ||
      2 * most * tile_rows > forward_split_rows(problem, facts) ||
      tiles * (units + FA3_FORWARD_TILE_UNITS) > INT32_MAX / 2)
    return INFINITY;
  const int64_t team = choose_team(most, heads);
  const double shares = (double)shares_of(most, team);
  const double columns = (double)problem->value_head_dim / 128;
  const double part = store_steps * columns * (double)one.warpgroups / 2;
  const double of_tile = forward_tile_time(plan->kernel, one.warpgroups) * seen.mean + tile_steps;
  const double keys = seen.longest * (double)plan->kernel->tile_k;
  const double work = tiles * of_tile / shares;
  const double steps =
      fmax(work, reading_time(problem, facts, keys, tiles, team, shares, one, work));
  return steps + 2 * part + deal_steps + combine_steps +
         shares * (double)tile_rows * 2 * partial_steps * columns;
}

/* As many splits as there may be. */
static int64_t count_most_splits(const struct problem *problem, const struct forward_plan *plan) {
  const double rows = count_rows(problem);
  int64_t most = smaller(most_splits, problem->max_seqlen_k / plan->kernel->tile_k);
  if (problem->max_seqlen_k < least_keys || rows < 1 || 2 * rows > (double)most_split_rows ||
      problem->batch > MAX_GRID || problem->cu_seqlens_q || plan->few.kernel)
    return 1;
  if (problem->num_splits) most = smaller(most, problem->num_splits);
  return smaller(most, most_split_rows / (int64_t)rows);
}

/* Whether one long sequence may be waited for: how long each is the device alone knows, and tiles
 * are so few that not every multiprocessor has many. The device cuts no tile where that saves
 * nothing. */
static bool may_wait_for_one(const struct problem *problem, const struct cuda_facts *facts,
                             struct sharing dealt) {
  if (problem->batch < 2 || !problem->seqused_k) return false;
  const int64_t of_sequence = blocks_of(problem, dealt) * (problem->heads_q / dealt.tile_heads);
  const double tiles =
      (double)of_sequence * (double)problem->batch / (double)facts->most_multiprocessors;
  return tiles > least_waiting_tiles && tiles <= most_waiting_tiles;
}

static void share_out(const struct problem *problem, const struct cuda_facts *facts,
                      struct sharing sharing, bool deal, struct forward_plan *plan) {
  plan->splits = (int32_t)sharing.splits;
  plan->tile_heads = (int32_t)sharing.tile_heads;
  plan->tile_queries = (int32_t)(sharing.warpgroups * (ROWS / sharing.tile_heads));
  plan->tiles.blocks = (int32_t)blocks_of(problem, sharing);
  plan->tiles.heads = (int32_t)(problem->heads_q / sharing.tile_heads);
  /* All heads together, longest tiles first. */
  plan->tiles.grouped = plan->tiles.cut = 0;
  plan->tiles.group = plan->tiles.heads * plan->tiles.batches;
  if (!deal) return;
  const int64_t most = facts->most_multiprocessors;
  plan->team = (int32_t)choose_team(most, plan->tiles.heads);
  plan->shares = (int32_t)shares_of(most, plan->team);
}

/* The time of the best number of splits, and how the work is shared out then. */
static double find_splits(const struct problem *problem, const struct cuda_facts *facts,
                          bool may_share_tiles, const struct forward_plan *plan,
                          struct sharing *best) {
  const int64_t most = count_most_splits(problem, plan);
  const struct sight seen = count_keys(problem, plan->kernel);
  double least = INFINITY;
  for (struct sharing one = {.splits = 1}; one.splits <= most; one.splits++)
    for (one.warpgroups = plan->kernel->tile_q / ROWS; one.warpgroups > 0; one.warpgroups--)
      for (int shared = 0; shared < 2; shared++) {
        /* Parts leave row by row in any case, so that heads of a group may well share tiles. */
        one.tile_heads = shared ? problem->heads_q / problem->heads_k : plan->tile_heads;
        if (shared && (!may_share_tiles || one.splits == 1)) continue;
        const double time = time_of(problem, facts, plan->kernel, seen, one);
        if (time >= least) continue;
        *best = one;
        least = time;
      }
  return least;
}

/* The same where keys are dealt out. */
static double find_deal(const struct problem *problem, const struct cuda_facts *facts,
                        bool may_share_tiles, const struct forward_plan *plan,
                        struct sharing *best) {
  const struct sight seen = count_keys(problem, plan->kernel);
  double least = INFINITY;
  for (int shared = 0; shared <= may_share_tiles; shared++) {
    const int64_t tile_heads = shared ? problem->heads_q / problem->heads_k : plan->tile_heads;
    const struct sharing one = dealt_tiles(problem, plan->kernel, tile_heads);
    const double time = dealt_time(problem, facts, plan, seen, one);
    if (time >= least) continue;
    *best = one;
    least = time;
  }
  return least;
}

void plan_forward_splits(const struct problem *problem, const struct cuda_facts *facts,
                         bool may_share_tiles, struct forward_plan *plan) {
  struct sharing splits = {.tile_heads = 1, .warpgroups = 1, .splits = 1}, deal = splits;
  const double split_time = find_splits(problem, facts, may_share_tiles, plan, &splits);
  const double deal_time = find_deal(problem, facts, may_share_tiles, plan, &deal);
  const bool deals = split_time >= least_waiting_steps && may_wait_for_one(problem, facts, deal)
                         ? deal_time < INFINITY
                         : deal_time < split_time * least_gain;
  plan->splits = 1;
  if (deals)
    share_out(problem, facts, deal, true, plan);
  else if (splits.splits > 1)
    share_out(problem, facts, splits, false, plan);
}
