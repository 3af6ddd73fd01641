#include "cuda/backward_deal.h"

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
enum { TILE_K = 128 }; /* of all kernels */

/* Parts are made for an H100 or H200 that the call has to itself, wherever it runs: what is summed
 * in which order must not depend on how many multiprocessors are free. */
enum { MULTIPROCESSORS = 132 };

/* Where dQ is stored by a kernel of its own: at least so many steps of a tile, and more where tiles
 * are more than these, in all their parts; fewer of 128 queries. With 80 queries it gains with any
 * number of tiles. */
enum { LONG_TILE = 8, LONGER_TILE = 16, LONG_TILE_OF_128 = 5, LONGER_TILE_OF_128 = 12 };
enum { FEW_TILES = 6 * MULTIPROCESSORS };

/* The least share of a packed batch's rows, of what its longest sequence would make, for that
 * kernel where tiles are many: it has blocks for all of the rest too. */
static const double least_filled = 0.25;

/* Tiles that are looked at, to know what all do. */
enum { SAMPLES = 64 };

/* What a section of heads keeps in the L2 cache, or the half of all heads that rises; and heads
 * that a section without a mask has whatever their size. */
enum { CACHE_BYTES = 24 << 20, RISING_BYTES = 44 << 20, LEAST_HEADS = 4 };

/* A head is short where its tiles share so many times what one has of its own, at most. */
enum { MOST_SHARED = 3 };

/* Between two tiles of a window that come to the same block of queries. */
enum { BETWEEN_BYTES = 30 << 20 };

/* What a section has at most under a causal mask, and of large groups. Measured:
 * docs/notes/hopper-backward-tiles.md. */
enum { TOGETHER_BYTES = 512 << 20, GROUPS_BYTES = 128 << 20 };

/* Of large groups: queries of a step for each head that takes a block in turn, at most, and steps
 * of a part in the mean, at least. Measured: likewise. */
enum { QUERIES_PER_HEAD = 32, LEAST_STEPS = 32 };

/* Sums of a block of dQ; bytes of all sums that stay in the L2 cache, and of those beyond the first
 * in the workspace. */
enum { CACHED_SUMS_BYTES = 34 << 20, MORE_SUMS_BYTES = 40 << 20 };

/* Tiles are staggered where at least so many of a head run side by side; and they begin at most
 * 2^this blocks apart. */
enum { LEAST_STAGGERED = 4, MOST_STAGGER_LOG2 = 3 };

/* Tiles in all, for each worker, up to which two sums pay under a causal mask. */
enum { FEW_ROUNDS = 3 };

/* Where half of the heads rise: rounds of tiles, at least, or up to which more is gained; and steps
 * of a tile, at most, if dQ is finished later. Measured: docs/notes/hopper-backward-tiles.md. */
static const double least_rounds = 1.4, least_rounds_of_long_steps = 1.6, two_rounds = 2.05;
enum { FARTHEST_RISE = 72 };

/* Steps between short tiles of a head, over the workers that take turns at them. Measured:
 * likewise. */
static const double short_tiles_apart = 1.9;

/* Less than a round of tiles, of a section of large groups. */
static const double least_part_of_round = 0.67;

/* In steps. Measured: docs/notes/hopper-backward-tiles.md. */
static const double BYTES_OF_STEP = 8.3e6; /* that a kernel reads or writes in the time of one */
static const double finish_steps = 1.5;    /* the kernel that stores dQ, beside its bytes */
static const double boundary_steps = 2.5;  /* where a tile begins and ends */
static const double sum_steps = 2.0;       /* the kernel that sums over parts, */
static const double chain_steps = 1.3;     /* that tiles of a head begin after each other, */
static const double wait_steps = 1.2;      /* and without a mask */
static const double part_share = 0.8;      /* and its share for each tile in each part */
static const double last_share = 1.4;      /* of a step that takes the sum and stores dQ */
static const double finish_waits = 3.0; /* that such steps may cost before dQ is finished later */

static int64_t multiply(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX / 1024 : product;
}

/* dK and dV of a tile, in float32. */
static int64_t bytes_of_part(const struct kernel *kernel) {
  return (int64_t)sizeof(float) * TILE_K * (kernel->head_dim + kernel->value_head_dim);
}

int64_t count_key_slots(const struct problem *problem) {
  return FA3_BACKWARD_SLOTS(
      problem->cu_seqlens_k, problem->batch,
      problem->cu_seqlens_k ? problem->rows_k : smaller(problem->max_seqlen_k, problem->rows_k),
      TILE_K);
}

static int64_t count_key_tiles(const struct problem *problem) {
  return multiply(count_key_slots(problem), problem->heads_k);
}

static int64_t query_heads_of_key_head(const struct problem *problem) {
  return problem->heads_q / larger(problem->heads_k, 1);
}

static bool is_causal(const struct problem *problem) {
  return problem->window_left >= FA3_NO_LIMIT && problem->window_right < FA3_NO_LIMIT;
}

/* How many heads of a group take a block in turn at least, where it is dealt out to fit the L2
 * cache: a tile follows the one before it by a step or two, and that is not to be much of what the
 * heads take for 128 queries. */
static int64_t least_in_turn(const struct kernel *kernel) {
  return kernel->tile_q / QUERIES_PER_HEAD;
}

int64_t count_arrivals(const struct problem *problem) {
  return multiply(count_key_tiles(problem), FA3_BACKWARD_PART_WARPS);
}

int64_t bytes_of_parts(const struct problem *problem, const struct backward_plan *plan,
                       int64_t sum_bytes) {
  const int64_t tiles = count_key_tiles(problem), bytes = bytes_of_part(plan->kernel);
  const int64_t few = bytes * smaller(multiply(FA3_MOST_PARTS, tiles), MOST_TILE_PARTS);
  if (!is_causal(problem) || plan->cluster > 1) return few;
  const int64_t places = query_heads_of_key_head(problem) / (2 * least_in_turn(plan->kernel));
  /* Half as much as a sum of dQ needs, at most. */
  return larger(few, smaller(multiply(multiply(tiles, places), bytes), sum_bytes / 2));
}

/* Blocks of queries that a tile visits for a query head: in the mean, at most, and of some tiles,
 * in order. */
struct visits {
  double mean;
  double most;
  double of[SAMPLES];
  int samples;
};

static struct visits count_visits(const struct problem *problem, const struct kernel *kernel,
                                  int tiles) {
  const int queries = (int)longest_query(problem);
  const int keys = (int)smaller(problem->max_seqlen_k, problem->rows_k);
  const fa3_mask mask =
      fa3_make_mask(queries, keys, keys - queries, problem->window_left, problem->window_right);
  const int samples = tiles < SAMPLES ? tiles : SAMPLES;
  struct visits visits = {.samples = samples};
  for (int i = 0; i < samples; i++) {
    const int first = (int)((int64_t)i * tiles / samples) * kernel->tile_k;
    const fa3_range seen = fa3_seeing_tiles(&mask, first, first + kernel->tile_k, kernel->tile_q);
    const double blocks = seen.end > seen.begin ? seen.end - seen.begin : 0;
    visits.of[i] = blocks;
    visits.mean += blocks / samples;
    if (blocks > visits.most) visits.most = blocks;
  }
  return visits;
}

/* What is dealt out. */
struct deal {
  struct visits visits;
  int64_t tiles;   /* of keys, in all */
  int64_t heads;   /* of keys, of all sequences */
  int64_t group;   /* query heads that share keys */
  int64_t blocks;  /* of queries */
  int64_t workers; /* that take a tile at a time */
  int64_t bytes;   /* of dK and dV of a tile in float32 */
  bool chained;    /* tiles of a part begin at the same block, under a causal mask, */
  bool sums;       /* but there is room for two sums of dQ, */
  bool taken;      /* which the last tile takes */
};

/* At least, where tiles are dealt out by heads and long ones are taken first: when a worker takes
 * its tile of round number n, there have been enough that one has n tiles, each no shorter than
 * that. */
static double longest_rounds(const struct deal *deal, int64_t parts, double heads) {
  const int64_t tiles = deal->tiles * parts;
  double steps = 0;
  for (int64_t round = 0; round * deal->workers < tiles; round++) {
    const int64_t sample = round * deal->workers * deal->visits.samples / tiles;
    const double all = (double)(round + 1) * (deal->visits.of[sample] * heads + boundary_steps);
    if (all > steps) steps = all;
  }
  return steps;
}

/* How long it takes, in steps, where each tile's work is dealt out so. */
static double estimate(const struct deal *deal, int64_t head_parts, int64_t row_parts) {
  const int64_t parts = head_parts * row_parts, tiles = deal->tiles * parts;
  const double blocks = (double)divide_up(deal->blocks, row_parts);
  const double rows = deal->visits.most < blocks ? deal->visits.most : blocks;
  const double heads = (double)divide_up(deal->group, head_parts);
  const double longest = rows * heads + boundary_steps;
  const double mean = deal->visits.mean * (double)deal->group / (double)parts + boundary_steps;
  const double even = (double)tiles * mean / (double)deal->workers;
  double steps = row_parts == 1 ? longest_rounds(deal, parts, heads) : 0;
  if (deal->visits.mean > 0.75 * deal->visits.most) { /* nearly alike: rounds */
    if (row_parts > 1) steps = (double)divide_up(tiles, deal->workers) * longest;
    if (even > steps) steps = even;
  } else { /* the long ones first, and the short ones fill the gaps */
    const double filled = (even > longest ? even : longest) + 0.2 * mean;
    if (filled > steps) steps = filled;
    if (row_parts > 1) steps *= 1.08; /* the parts differ too */
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
  return parts > 1 ? steps + sum_steps + part_share * bytes / BYTES_OF_STEP : steps;
}

static bool is_packed(const struct problem *problem) {
  return problem->cu_seqlens_q || problem->cu_seqlens_k;
}

/* Whether each packed sequence has as many queries as keys, as far as the plan knows. */
static bool is_packed_self(const struct problem *problem) {
  return problem->cu_seqlens_q && problem->cu_seqlens_k &&
         problem->max_seqlen_q == problem->max_seqlen_k && problem->rows_q == problem->rows_k;
}

/* Sequences as long as the longest that there are rows for, where lengths are packed. */
static int64_t count_sequences(const struct problem *problem) {
  const int64_t longest = smaller(problem->max_seqlen_k, problem->rows_k);
  if (!problem->cu_seqlens_k || longest < 1) return problem->batch;
  return smaller(larger((problem->rows_k + longest / 2) / longest, 1), problem->batch);
}

/* Tiles with keys: of packed sequences, no more than there can be in so many rows. */
static int64_t count_tiles(const struct problem *problem, const fa3_key_tiles *tiles) {
  int64_t of_head = (int64_t)tiles->tiles * tiles->batches;
  if (problem->cu_seqlens_k) of_head = smaller(of_head, problem->rows_k / TILE_K + tiles->batches);
  return of_head * tiles->heads;
}

/* Of a sum of dQ. */
static double bytes_of_sum(const struct problem *problem, const struct backward_plan *plan) {
  return (double)sizeof(float) * (double)problem->heads_q * plan->slots * plan->kernel->tile_q *
         plan->kernel->head_dim;
}

static bool takes_more_sums(const struct problem *problem) {
  return problem->window_left >= FA3_NO_LIMIT;
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

static void deal_parts(const struct problem *problem, int64_t workers, struct backward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  fa3_key_tiles *tiles = &plan->tiles;
  const struct deal deal = {.visits = count_visits(problem, kernel, tiles->tiles),
                            .tiles = count_tiles(problem, tiles),
                            .heads = tiles->heads * count_sequences(problem),
                            .group = query_heads_of_key_head(problem),
                            .blocks = divide_up(longest_query(problem), kernel->tile_q),
                            .workers = workers,
                            .bytes = bytes_of_part(kernel),
                            .chained = problem->window_left >= FA3_NO_LIMIT,
                            .sums = takes_more_sums(problem) && plan->cluster == 1 &&
                                    bytes_of_sum(problem, plan) <= MORE_SUMS_BYTES,
                            .taken = kernel->tile_q == 128};
  int64_t most = smaller(MOST_PER_WORKER * workers, MOST_TILE_PARTS);
  if (plan->cluster == 1 && deal.visits.mean > 0.75 * deal.visits.most) most *= 2;
  if (2 * deal.tiles > most) return;
  const int64_t taken = fa3_key_tile_count(tiles);
  double best = estimate(&deal, 1, 1);
  /* What a tile sees through a window lies in few of the parts by rows. */
  const bool narrow = deal.visits.most < 0.75 * (double)deal.blocks;
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

/* Whether the tiles of a head, which see from all queries down to few, have so many query heads
 * that these are dealt out to fit the L2 cache. */
static bool has_large_groups(const struct problem *problem, const struct visits *visits,
                             const struct backward_plan *plan) {
  return is_causal(problem) && visits->most > 0 && visits->mean <= 0.75 * visits->most &&
         plan->cluster == 1 && plan->tiles.row_parts == 1 && fa3_key_tile_count(&plan->tiles) > 0 &&
         query_heads_of_key_head(problem) >= 2 * least_in_turn(plan->kernel);
}

/* What most tiles have of the longest sequence's length. Of packed lengths only their mean is
 * known, and most tiles are those of longer ones. */
static double find_typical_share(const struct problem *problem, const fa3_key_tiles *tiles) {
  const double all = (double)tiles->tiles * tiles->heads * tiles->batches;
  return fmin(1, 2 * (double)count_tiles(problem, tiles) / all);
}

/* All heads of a group take a block in turn, and of a large group, what its tiles have in flight,
 * beside those of other heads of keys, is beyond the L2 cache. So few heads do, each such part of a
 * group by itself. Not too few, or tiles wait for each other; and a part is to be long enough that
 * it does not matter where it begins and ends. */
static void deal_groups(const struct problem *problem, const struct visits *visits,
                        struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (!has_large_groups(problem, visits, plan)) return;
  if (multiply(fa3_key_tile_count(tiles), FA3_MOST_PARTS) > MAX_TILES ||
      count_arrivals(problem) > MAX_TILES)
    return;
  const int64_t group = query_heads_of_key_head(problem);
  const double steps = visits->mean * find_typical_share(problem, tiles) * (double)group;
  int64_t parts =
      smaller(divide_up(group, least_in_turn(plan->kernel)), (int64_t)(steps / LEAST_STEPS));
  parts = smaller(parts, FA3_MOST_PARTS);
  while (parts > tiles->head_parts && bytes_of_all_parts(problem, plan, parts) > plan->part_bytes)
    parts--;
  if (parts > tiles->head_parts) tiles->head_parts = (int32_t)parts;
}

/* Whether a tile of keys should be done with a query head before it takes the next. Under a window
 * a tile begins at a block of its own, and comes to those of the tile before it so many blocks
 * later, times the heads of the group that take a block in turn. What all multiprocessors read and
 * add to in between, Q, dO and dQ, is to stay in the L2 cache. At the end of a sequence tiles begin
 * at the same block, and by head would wait for each other at each: so the window is to be short.
 */
static bool goes_by_head(const struct problem *problem, const fa3_key_tiles *tiles) {
  const int64_t longest = longest_query(problem);
  const double heads = (double)problem->heads_q / (double)larger(problem->heads_k, 1);
  const double between = heads / tiles->head_parts * MULTIPROCESSORS * TILE_K;
  const double all = (double)(problem->query.batch * problem->rows_q * problem->heads_q);
  const double bytes_of_row = (double)(6 * problem->head_dim + 2 * problem->value_head_dim);
  return heads > 1 && problem->window_left + problem->window_right <= longest / 2 &&
         fmin(between, all) * bytes_of_row > BETWEEN_BYTES;
}

/* The kernel that does so, or the same if there is none of its size. */
static const struct kernel *find_by_head(const struct kernel *kernel, bool softcap) {
  const struct kernel_need need = {.kind = kernel->kind,
                                   .architecture = kernel->architecture,
                                   .dtype = (fa3_dtype)kernel->dtype,
                                   .head_dim = kernel->head_dim,
                                   .value_head_dim = kernel->value_head_dim,
                                   .softcap = softcap,
                                   .by_head = true,
                                   .queries = kernel->least_queries};
  const struct kernel *other = find_kernel(&need);
  return other && other->head_dim == kernel->head_dim && other->tile_q == kernel->tile_q ? other
                                                                                         : kernel;
}

/* Q, dO and dQ of a head of keys, which each of its tiles reads and adds to. */
static int64_t bytes_of_head(const struct problem *problem, const struct kernel *kernel) {
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t queries = larger(longest_query(problem), 1);
  return queries * group *
         (2 * (problem->head_dim + problem->value_head_dim) + 4 * (int64_t)kernel->head_dim);
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
  /* The beginning and the end of a tile take the time of some steps. */
  const double steps = visits->mean * (double)query_heads_of_key_head(problem) +
                       (plan->kernel->tile_q == 128 ? 0.6 : 2);
  const double workers = (double)MULTIPROCESSORS / plan->cluster;
  return (double)size * steps >= short_tiles_apart * workers ? size : 0;
}

/* How many heads of keys are in flight together. Without a mask few enough that their queries and
 * dQ, which every tile of keys reads and adds to, stay in the L2 cache: the tiles of a head run at
 * any distance from each other, so all of it is in use at a time. Under a causal mask they all
 * begin at the same block and follow each other closely; there it takes so many heads that a tile
 * does not wait for the one before, fewer where a block of queries is a step for each head of a
 * group; and fewer where heads are long, for on a long way tiles drift apart, and what one of them
 * reads is no longer in the L2 cache when the others come. Sections are equal, or the last one
 * would have too few. */
static int64_t find_section(const struct problem *problem, const struct visits *visits,
                            const struct backward_plan *plan, int64_t workers) {
  const struct kernel *kernel = plan->kernel;
  const int64_t all = (int64_t)plan->tiles.heads * plan->tiles.batches;
  const int64_t queries = larger(longest_query(problem), 1);
  const int64_t bytes_per_head = bytes_of_head(problem, kernel);
  int64_t most = CACHE_BYTES / bytes_per_head;
  if (has_large_groups(problem, visits, plan))
    return find_section_of_groups(problem, visits, plan, workers);
  if (problem->window_right < FA3_NO_LIMIT) {
    /* Some kernels are done with a query head before they take the next. */
    const bool by_head = plan->cluster > 1 || kernel->by_head;
    const int64_t group = query_heads_of_key_head(problem);
    const int64_t in_turn = by_head ? 1 : divide_up(group, plan->tiles.head_parts);
    const int64_t enough = enough_chains(plan, in_turn, workers);
    most = larger(most, enough / fa3_key_tile_parts(&plan->tiles));
    /* More keys are more rounds of tiles; a window's tiles have a short way. */
    const int64_t keys = smaller(problem->max_seqlen_k, problem->rows_k);
    const int64_t length = larger(queries, smaller(keys, 4 * queries));
    const int64_t way =
        problem->window_left < FA3_NO_LIMIT
            ? smaller(length, problem->window_left + problem->window_right + kernel->tile_k)
            : length;
    most = smaller(most, larger(TOGETHER_BYTES / (way * (bytes_per_head / queries)), 1));
  } else {
    most = larger(most, LEAST_HEADS);
    const int64_t fewer = find_short_section(problem, visits, plan);
    if (fewer > 0) most = smaller(most, fewer);
    /* Whole sequences, where lengths are packed: most are shorter than the longest. */
    if (is_packed(problem) && plan->cluster == 1 && 2 * most >= plan->tiles.heads)
      return smaller(round_up(most, plan->tiles.heads), all);
  }
  return larger(divide_up(all, larger(divide_up(all, larger(most, 1)), 1)), 1);
}

/* The last tile of a head is slow: in each step it reads what others have summed, and stores dQ.
 * Under a causal mask each tile is the last of a few blocks; without one the last tile is that of
 * all, and the others wait for it where tiles are few or long. Then a kernel of its own stores dQ,
 * on multiprocessors that have no tile left. But not where a head has one tile, which finds no sum
 * and is not waited for, unless half of the multiprocessors have nothing to do; nor two, if tiles
 * are many: all of dQ is then much beside what they read. The tiles of the wide kernel, whose
 * warpgroup for dQ is the last of a chain, always gain by that. */
static bool finish_later(const struct problem *problem, const struct backward_plan *plan) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t steps = plan->blocks_q * group / fa3_key_tile_parts(tiles);
  const bool masked = problem->window_left < FA3_NO_LIMIT || problem->window_right < FA3_NO_LIMIT;
  if (masked) return false;
  if (plan->cluster > 1) return tiles->tiles > 2 && plan->blocks_q > 0;
  const int tile_q = plan->kernel->tile_q;
  const int64_t count = fa3_key_tile_count(tiles);
  const bool many = count > FEW_TILES && tile_q != 80;
  const double rows = (double)longest_query(problem) * (double)problem->batch;
  if (tiles->tiles == 1 && 2 * count > MULTIPROCESSORS) return false;
  if (tiles->tiles == 2 && many) return false;
  if (problem->cu_seqlens_q && many && (double)problem->rows_q < least_filled * rows) return false;
  if (tile_q == 128) return steps >= (many ? LONGER_TILE_OF_128 : LONG_TILE_OF_128);
  return steps >= (many ? LONGER_TILE : LONG_TILE);
}

int64_t bytes_of_more_sums(int64_t sum_bytes) {
  return smaller((FA3_MOST_SUMS - 1) * sum_bytes, MORE_SUMS_BYTES);
}

/* Whether tiles that go upwards, all of a head, would begin at blocks of their own: under a causal
 * mask, if the plan knows how long sequences are. Pairs of blocks cannot go upwards. */
static bool may_rise(const struct problem *problem, const struct visits *visits,
                     const struct backward_plan *plan) {
  return plan->cluster == 1 && !is_packed(problem) && takes_more_sums(problem) &&
         visits->mean <= 0.6 * visits->most;
}

/* Under a causal mask all tiles of the first heads may go upwards, taken in reverse: each begins at
 * a block of its own, a step behind the tile before it, and workers come free one after the other.
 * So none waits, however few heads are in flight together; they are so few that their queries and
 * dQ stay in the L2 cache. The longest tiles come last. So the other heads, whose tiles are two for
 * each worker, go downwards: their short tiles fill the gaps. Heads of a group, which take a block
 * in turn, lose by it. */
static void deal_rising(const struct problem *problem, const struct visits *visits,
                        struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (!may_rise(problem, visits, plan) || problem->heads_q > problem->heads_k ||
      fa3_key_tile_parts(tiles) > 1 || fa3_sum_count(tiles) > 1)
    return;
  const int64_t all = (int64_t)tiles->heads * tiles->batches;
  const int64_t section = CACHE_BYTES / bytes_of_head(problem, plan->kernel);
  const int64_t downward = larger(divide_up((int64_t)2 * MULTIPROCESSORS, tiles->tiles), section);
  if (section < 1 || all < section + downward) return;
  tiles->rising_section = (int32_t)section;
  tiles->rising = (int32_t)(all - downward);
  tiles->section = (int32_t)downward;
}

/* Where chains are few, a round of tiles goes upwards, of half of the chains at most, or fewer
 * where there are not two rounds of all. The shortest of these are done first, and the longest
 * tiles of the other chains follow, each some steps behind the one before it: none waits, and one
 * sum takes the place of those dealt. A block's last tile is the first one of a chain that rises,
 * the longest, and slow; where all would wait for it, dQ is finished later. Then up to two heads of
 * a group may take a block in turn, for two rounds. */
static void deal_half_rising(const struct problem *problem, const struct visits *visits,
                             struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (!may_rise(problem, visits, plan) || tiles->rising > 0 || tiles->row_parts > 1) return;
  const int64_t all = fa3_chain_count(tiles);
  const double rounds = (double)(all * tiles->tiles) / MULTIPROCESSORS;
  const bool even_rounds = rounds >= least_rounds_of_long_steps && rounds <= two_rounds;
  const int64_t rising =
      smaller(MULTIPROCESSORS / tiles->tiles, even_rounds ? all / 2 : 3 * all / 8);
  const int64_t bytes_per_chain = bytes_of_head(problem, plan->kernel) / tiles->head_parts;
  if (rising < 1 || rising * bytes_per_chain > RISING_BYTES) return;
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
  tiles->section = (int32_t)(all - rising);
  tiles->sums_log2 = tiles->upward = 0;
  plan->finished_later = later;
}

/* Of a head, in the mean. */
static double tiles_side_by_side(const struct backward_plan *plan) {
  const fa3_key_tiles *tiles = &plan->tiles;
  const double workers = (double)MULTIPROCESSORS / plan->cluster;
  const int64_t in_flight = (int64_t)tiles->section * tiles->row_parts;
  return fmin(tiles->tiles, workers / (double)larger(in_flight, 1));
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
  const double waits = wait_steps * beside * (is_packed(problem) ? 2 : 1);
  return 2 * share * bytes <= CACHED_SUMS_BYTES && bytes <= MORE_SUMS_BYTES &&
         waits > 3 * bytes / BYTES_OF_STEP + finish_steps;
}

/* Without a mask, tiles of a head that run side by side may each begin at a block of their own
 * (backward_order.h); the more blocks are between two of them the better. There are to be places
 * for all tiles of the head, since one that begins where another did waits until those between them
 * have gone by. Or, where that takes no more rounds, no more places than run side by side: those of
 * a round then end before the next one begins. */
static void stagger_tiles(const struct problem *problem, struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  if (plan->cluster > 1 || (is_packed(problem) && !is_packed_self(problem)) ||
      problem->window_left < FA3_NO_LIMIT || problem->window_right < FA3_NO_LIMIT ||
      tiles->row_parts > 1)
    return;
  const double beside = tiles_side_by_side(plan);
  if (beside < LEAST_STAGGERED || !has_two_sums(problem, plan, beside)) return;
  const int64_t rounds = (int64_t)ceil(tiles->tiles / beside);
  const bool together = tiles->section >= fa3_chain_count(tiles); /* or there are no rounds */
  int best = -1;
  for (int log2 = 0; log2 <= MOST_STAGGER_LOG2; log2++) {
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
static void deal_sums(const struct problem *problem, const struct visits *visits,
                      struct backward_plan *plan) {
  fa3_key_tiles *tiles = &plan->tiles;
  const int parts = fa3_key_tile_parts(tiles);
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t all = larger(tiles->heads * count_sequences(problem), 1) * parts;
  const double bytes = bytes_of_sum(problem, plan);
  const double steps_of_sum = bytes / BYTES_OF_STEP;
  const int64_t workers = MULTIPROCESSORS / plan->cluster;
  if (!takes_more_sums(problem)) return;
  stagger_tiles(problem, plan);
  if (tiles->staggered) return;
  if (visits->mean > 0.75 * visits->most) {
    const double beside = floor(tiles_side_by_side(plan));
    const double steps = visits->most * (double)group / parts;
    const double rounds =
        steps < 1.75 * beside ? (double)divide_up(all * tiles->tiles, workers) : 1;
    double best = 0;
    /* More sums than tiles side by side are of no use. */
    for (int log2 = 1; (1 << log2) <= FA3_MOST_SUMS && (1 << log2) < 2 * beside; log2++) {
      const double sums = 1 << log2;
      if (sums * bytes > CACHED_SUMS_BYTES) break;
      const double gain = wait_steps * beside * (1 - 1 / sums) * rounds;
      const double cost = 3 * (sums - 1) * steps_of_sum + finish_steps;
      if (gain <= cost || (log2 > 1 && 0.6 * gain - cost <= best)) continue;
      best = 0.6 * gain - cost;
      tiles->sums_log2 = log2;
    }
  } else if (plan->cluster == 1 && bytes <= MORE_SUMS_BYTES) {
    const int64_t beside = workers / all;
    if (plan->kernel->tile_q == 128) { /* the last tile takes both sums */
      if (beside <= 1 || group > tiles->head_parts || all * tiles->tiles > FEW_ROUNDS * workers)
        return;
      tiles->sums_log2 = 1;
    } else {
      const double gain = 0.95 * (double)beside;
      if (is_packed(problem) || tiles->row_parts > 1 || 3 * beside < tiles->tiles ||
          beside >= tiles->tiles || gain < 1.1 * (finish_steps + 2.5 * steps_of_sum))
        return;
      /* Of three rounds the last tiles upwards, which are the longest, would end last. */
      tiles->upward = (int32_t)(2 * beside < tiles->tiles ? 0.8 * (double)beside : (double)beside);
    }
    tiles->section = fa3_chain_count(tiles);
  }
}

void deal_tiles(const struct problem *problem, int64_t workers, struct backward_plan *plan) {
  const struct visits visits = count_visits(problem, plan->kernel, plan->tiles.tiles);
  plan->tiles.head_parts = plan->tiles.row_parts = 1;
  if (fa3_key_tile_count(&plan->tiles) > 0) {
    deal_parts(problem, MULTIPROCESSORS / plan->cluster, plan);
    deal_groups(problem, &visits, plan);
  }
  if (goes_by_head(problem, &plan->tiles))
    plan->kernel = find_by_head(plan->kernel, problem->softcap > 0);
  plan->tiles.section =
      (int32_t)find_section(problem, &visits, plan, workers) * plan->tiles.head_parts;
  plan->tiles.sums_log2 = plan->tiles.upward = plan->tiles.rising = 0;
  plan->tiles.staggered = plan->tiles.stagger_log2 = 0;
  plan->finished_later = false;
  if (fa3_key_tile_count(&plan->tiles) > 0 && plan->blocks_q > 0) {
    deal_sums(problem, &visits, plan);
    deal_rising(problem, &visits, plan);
    deal_half_rising(problem, &visits, plan);
  }
  /* With 128 queries a step the last tile takes all sums, if it is not the last of all blocks. */
  const bool takes_sums = plan->kernel->tile_q == 128 && visits.mean <= 0.75 * visits.most;
  if ((fa3_sum_count(&plan->tiles) > 1 && !takes_sums) || finish_later(problem, plan))
    plan->finished_later = true;
}
