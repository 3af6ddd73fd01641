#include "cuda/backward_parts.h"

#include <math.h>

#include "cuda/backward_sums.h"
#include "cuda/kernels.h"
#include "cuda/limits.h"
#include "cuda/sequences.h"
#include "integer.h"

/* The most tiles in all their parts, for each worker and in all; and twice as many where they are
 * nearly alike. */
enum { MOST_PER_WORKER = 5, MOST_TILE_PARTS = 660 };

/* And with those that turn out to be beyond a packed sequence's end. */
enum { MOST_TAKEN = 16384 };

/* Of large groups: queries of a step for each head that takes a block in turn, at most, and steps
 * of a part in the mean, at least; under a window queries of all its heads, at least. Measured:
 * docs/notes/hopper-backward-tiles.md. */
enum { QUERIES_PER_HEAD = 32, LEAST_STEPS = 32, LEAST_QUERIES_IN_WINDOW = 2600 };

/* Times are counted in steps of 64 queries and 128 columns, and fitted to measured ones
 * (docs/notes/hopper-backward-tiles.md): where a part begins and ends; passing over one without
 * work; each time that sums of parts are added up in pairs, and their bytes' share of what writing
 * and reading takes. */
static const double ends_of_part = 4.5, empty_part = 4, adding_up = 1, share_of_bytes = 0.4;
static const double smallest_step = 0.7; /* of 64 queries and 64 columns, for 0.5 by its products */

/* In steps of the kernel: how far tiles of a chain are apart at a block, times the root of the
 * heads that take it in turn. Times as much where tiles are alike; in parts by rows, and in those
 * of a kernel whose last tile would take several sums of dQ, but not of so many parts; where it
 * does; where some tiles go upwards; and of pairs of blocks. */
static const double apart_in_chain = 0.35, apart_if_alike = 0.45, apart_in_row_parts = 1.8,
                    apart_without_sums = 2.5, apart_with_sums = 0.4, apart_with_upward = 0.2,
                    apart_in_pairs = 0.3;

/* Where the tiles of all query heads are a round at most before they are dealt out, tiles of a
 * chain are so many times as far apart, and in parts by rows so many. If parts are more than
 * workers, the call takes so many steps longer: blocks take them from a counter then, and not by
 * their own numbers. Fitted to some 1700 calls, each in several forms of parts. */
static const double apart_of_few = 0.25, apart_of_few_in_rows = 0.4, counter_of_few = 1;

/* Tiles of a chain from which on apart_in_pairs is right. */
enum { LONG_CHAIN = 16 };

/* Parts that end last, of the mean, where there are more than workers. Of the longest, where
 * sequences differ in length; and where tiles are alike, but not their parts by rows, which are not
 * taken longest first. */
static const double last_parts = 0.235, last_of_packed = 0.3, last_of_unequal = 0.5;

/* Parts by rows with fewer blocks than this are much shorter than those with one more. */
enum { FEW_BLOCKS = 4 };

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
  if (!(problem->features & masks) || plan->cluster > 1 || takes_short_steps(problem)) return few;
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
  double step;     /* of the kernel, for a query head */
  bool passes;     /* parts without work are passed over */
  int64_t alike;   /* tiles that are as long as the longest, of these at least */
  bool few;        /* tiles of all query heads are no more than workers, and lengths are equal */
  bool vary;       /* sequences differ in length: */
  double length;   /* of a tile's in the mean, as a share of the longest one's */
  bool two_sums;   /* there is room for a second sum of dQ, */
  bool taken;      /* which the last tile takes */
  double sum_bytes;
};

/* The parts by rows of the tiles that are looked at: their blocks of queries, for a query head. */
struct row_parts {
  int64_t count; /* of parts by rows that a tile has */
  int64_t with_work, blocks, longest;
  int width_log2;             /* lengths are counted by how many times 2^this they are: */
  int64_t of_length[SAMPLES]; /* parts, */
  int64_t least[SAMPLES];     /* and the shortest of them */
};

static struct row_parts count_row_parts(const struct deal *deal, int64_t count) {
  struct row_parts parts = {.count = count};
  while (deal->blocks >> parts.width_log2 >= SAMPLES) parts.width_log2++;
  for (int64_t part = 0; part < count; part++) {
    const int64_t begin = deal->blocks * part / count, end = deal->blocks * (part + 1) / count;
    for (int i = 0; i < deal->visits->samples; i++) {
      const fa3_range seen = deal->visits->of[i];
      const int64_t length = smaller(seen.end, end) - larger(seen.begin, begin);
      if (length <= 0) continue;
      parts.with_work++;
      parts.blocks += length;
      parts.longest = larger(parts.longest, length);
      const int64_t widths = length >> parts.width_log2;
      if (parts.of_length[widths] == 0 || length < parts.least[widths])
        parts.least[widths] = length;
      parts.of_length[widths]++;
    }
  }
  return parts;
}

/* At least: where there are so many parts of some length or longer that a worker has n of them.
 * Each part that is counted stands for so many. */
static double longest_rounds(const struct deal *deal, const struct row_parts *parts,
                             int64_t head_parts, double step) {
  const int64_t of_counted = deal->alike * head_parts;
  const int64_t of_workers = deal->visits->samples * deal->workers;
  int64_t counted = 0, rounds = 0;
  double time = 0;
  for (int64_t i = parts->longest >> parts->width_log2; i >= 0; i--) {
    counted += parts->of_length[i];
    if (counted * of_counted <= rounds * of_workers) continue;
    rounds = divide_up(counted * of_counted, of_workers);
    time = fmax(time, (double)rounds * ((double)parts->least[i] * step + ends_of_part));
  }
  return time;
}

/* Of so many heads that take a block in turn, parts by rows, parts in all, and tiles of a chain
 * that run side by side. */
static double find_apart(const struct deal *deal, double heads, double rows, double parts,
                         int64_t beside) {
  const bool same = alike(deal->visits), dealt_in_two = deal->two_sums && !same;
  const bool sums = heads == 1 && parts <= (double)(FEW_ROUNDS * deal->workers);
  double apart = 1;
  if (!deal->passes && rows == 1 && !same && deal->tiles >= LONG_CHAIN * deal->heads)
    apart = apart_in_pairs;
  else if (rows > 1)
    apart = deal->taken && deal->two_sums && !sums ? apart_without_sums : apart_in_row_parts;
  else if (dealt_in_two && deal->taken)
    apart = sums ? apart_with_sums : 1;
  else if (dealt_in_two && count_upward(deal->tiles / deal->heads, beside, deal->sum_bytes) > 0)
    apart = apart_with_upward;
  if (deal->few) apart *= rows > 1 ? apart_of_few_in_rows : apart_of_few;
  return apart_in_chain * (same ? apart_if_alike : 1) * apart * sqrt(heads);
}

/* When the last of so many parts ends, of so many steps in the mean; all workers would end together
 * at `even`. */
static double find_end(const struct deal *deal, const struct row_parts *row_parts,
                       int64_t head_parts, double parts, double mean, double even) {
  const double step = (double)divide_up(deal->group, head_parts) * deal->step;
  const double longest = (double)row_parts->longest * step + ends_of_part;
  const bool same = alike(deal->visits), in_turn = parts > (double)deal->workers;
  const bool unequal =
      deal->blocks % row_parts->count != 0 && deal->blocks < FEW_BLOCKS * row_parts->count;
  double last = 0;
  if (in_turn && deal->vary)
    last = last_of_packed * longest;
  else if (in_turn && !same)
    last = last_parts * mean;
  if (in_turn && same && unequal) last = fmax(last, last_of_unequal * longest);
  /* Under a mask others end after the longest part too; but not of pairs of blocks, as measured. */
  const bool after_longest = deal->passes && !same && !deal->vary;
  const double end = after_longest ? fmax(even, longest) + last : fmax(even + last, longest);
  return fmax(end, longest_rounds(deal, row_parts, head_parts, step));
}

/* How long it takes where each tile's work is dealt out so. */
static double estimate(const struct deal *deal, const struct row_parts *row_parts,
                       int64_t head_parts) {
  const double workers = (double)deal->workers, of_sample = deal->visits->samples;
  const double heads = (double)divide_up(deal->group, head_parts);
  const double tiles = (double)(deal->tiles * head_parts), rows = (double)row_parts->count;
  const double with_work = (double)row_parts->with_work * tiles / of_sample;
  const double parts = deal->passes ? with_work : rows * tiles;
  const double blocks =
      deal->length * (double)(row_parts->blocks * deal->group * deal->tiles) / of_sample;
  const double work = blocks * deal->step + parts * ends_of_part;
  const double even = (work + empty_part * (rows * tiles - parts)) / workers;
  double time = find_end(deal, row_parts, head_parts, parts, work / parts, even);
  if (deal->few && rows * tiles > workers) time += counter_of_few;
  const double chains = (double)(deal->heads * head_parts) * rows;
  time += find_apart(deal, heads, rows, tiles * rows, (int64_t)(workers / chains)) * deal->step *
          fmin(workers, with_work) / chains;
  if (head_parts * row_parts->count == 1) return time;
  return time + adding_up * log2((double)head_parts * rows) +
         share_of_bytes * parts * (double)deal->bytes / bytes_of_step;
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

/* The length of a tile's sequence in the mean, as a share of the longest one's. Where longer ones
 * have more tiles it is at least so much, if all but the longest are equal. */
static double find_mean_length(const struct problem *problem) {
  const double longest = (double)longest_query(problem), rows = (double)problem->rows_q;
  const double rest = rows - longest;
  if (!problem->cu_seqlens_k || problem->batch < 2 || longest < 1) return filled_share(problem);
  if (!problem->cu_seqlens_q) return 1;
  return (longest * longest + rest * rest / (double)(problem->batch - 1)) / (rows * longest);
}

/* How long a step takes for a query head: of pairs of blocks 1; else in proportion to queries times
 * columns, but for the smallest. */
static double find_step(const struct backward_plan *plan) {
  const int size = plan->kernel->tile_q * plan->kernel->head_dim;
  if (plan->cluster > 1) return 1;
  return size == 64 * 64 ? smallest_step : (double)size / (64 * 128);
}

void deal_parts(const struct problem *problem, const struct visits *visits, int64_t workers,
                struct backward_plan *plan) {
  const struct kernel *kernel = plan->kernel;
  fa3_key_tiles *tiles = &plan->tiles;
  const double sum_bytes = bytes_of_sum(problem, plan);
  const bool vary = lengths_differ(problem);
  const struct deal deal = {
      .visits = visits,
      .tiles = count_tiles(problem, tiles),
      .heads = tiles->heads * count_sequences(problem),
      .group = query_heads_of_key_head(problem),
      .blocks = divide_up(longest_query(problem), kernel->tile_q),
      .workers = workers,
      .bytes = bytes_of_part(kernel),
      .step = find_step(plan),
      .passes = plan->cluster == 1,
      .alike = vary ? (int64_t)tiles->tiles * tiles->heads : count_tiles(problem, tiles),
      .few = !vary && count_tiles(problem, tiles) * query_heads_of_key_head(problem) <= workers,
      .vary = vary,
      .length = find_mean_length(problem),
      .two_sums = !has_window(problem) && plan->cluster == 1 && sum_bytes <= MORE_SUMS_BYTES,
      .taken = kernel->tile_q == 128,
      .sum_bytes = sum_bytes};
  int64_t most = smaller(MOST_PER_WORKER * workers, MOST_TILE_PARTS);
  if (plan->cluster == 1 && alike(visits)) most *= 2;
  if (2 * deal.tiles > most || visits->most == 0) return;
  const int64_t taken = fa3_key_tile_count(tiles);
  /* What a tile sees through a window lies in few of the parts by rows; parts by heads do as well
   * there. */
  const bool narrow =
      visits->most < 0.75 * (double)deal.blocks || (has_window(problem) && deal.group > 1);
  const int64_t most_rows = narrow ? 1 : smaller(FA3_MOST_PARTS, deal.blocks);
  double least = INFINITY;
  for (int64_t rows = 1; rows <= most_rows && rows * deal.tiles <= most; rows++) {
    const struct row_parts row_parts = count_row_parts(&deal, rows);
    for (int64_t heads = 1; heads <= deal.group && heads * rows <= FA3_MOST_PARTS; heads++) {
      const int64_t parts = heads * rows;
      if (parts > 1 && (parts * taken > MOST_TAKEN || parts * deal.tiles > most ||
                        bytes_of_all_parts(problem, plan, parts) > plan->part_bytes))
        break;
      const double time = estimate(&deal, &row_parts, heads);
      if (time > 0.99 * least) continue;
      least = time;
      tiles->head_parts = (int32_t)heads;
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
