#include "cuda/forward_steps.h"

#include <math.h>

#include "cuda/forward_splits.h"
#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "integer.h"
#include "kernels/mask.h"

enum { ROWS = 64 /* of a warpgroup */ };

/* Where equal tiles go in so many rounds or fewer, a part of one takes as long as a whole. */
enum { MOST_ROUNDS = 4 };

double keys_seen(const struct problem *problem, double queries, double keys) {
  double seen = keys;
  if (problem->window_right < MASK_UNBOUNDED) seen -= (queries < keys ? queries : keys) / 2;
  const double window = (double)problem->window_left + (double)problem->window_right + 1;
  return seen < window ? seen : window;
}

/* What a tile takes beside its keys, in tiles of keys. */
static const double tile_steps = 2.4;

double time_of_rounds(double longest, double mean, double rounds) {
  const double full = fmax(ceil(rounds) - 1, 0);
  return (full + 1) * (longest - 2 * (longest - mean) * full / fmax(rounds, 1));
}

double grid_time(const struct problem *problem, const struct cuda_facts *facts,
                 const struct kernel *kernel, int64_t warpgroups, int64_t tile_queries,
                 int64_t tiles) {
  const double time = forward_tile_time(kernel, warpgroups);
  const double queries = (double)problem->max_seqlen_q, keys = (double)problem->max_seqlen_k;
  const double rounds = (double)tiles / facts->multiprocessors, width = kernel->tile_k;
  if (problem->window_right >= MASK_UNBOUNDED) return ceil(rounds) * time;
  /* The mask ends in the midst of a tile of queries, or of keys. */
  const double rows = (double)tile_queries, ends = problem->window_left < MASK_UNBOUNDED ? 2 : 1;
  const double seen = keys_seen(problem, queries, keys) + ends * fmax(rows, width) / 2;
  const double most = (double)problem->window_left + (double)problem->window_right + rows;
  const double longest = ceil(fmin(keys, most) / width) + tile_steps;
  const double mean = fmin(fmin(keys, seen) / width + tile_steps, longest);
  return time * fmax(fmax(longest, rounds * mean), time_of_rounds(longest, mean, rounds));
}

/* What a step of codes takes less where no key is in its second half, in steps: then it computes
 * the first half alone. */
static const double half_less = 0.4;

/* Whether the last of so many keys is in the first half of a step. */
static bool half_filled(int64_t keys, int64_t width) {
  return (keys - 1) % width < width / 2;
}

/* The steps that a tile of scales of heads has for so many keys, of `width` each. */
static double steps_of(double keys, double width) {
  const double steps = fmax(ceil(keys / width), 1);
  return keys - (steps - 1) * width <= width / 2 ? steps - half_less : steps;
}

/* What a tile costs more where so many query heads share it, in steps: O leaves by the copy engine
 * if a warp's 16 rows are whole queries, else row by row. As measured. */
static double sharing_cost(const struct kernel *kernel, int64_t tile_heads) {
  if (tile_heads == 1) return 0;
  const bool whole = 16 % tile_heads == 0, codes = kernel->dtype == FA3_FLOAT8_E4M3;
  if (codes && whole) return 0.7;
  if (!codes && !whole && kernel->tile_q == 3 * ROWS) return 1;
  return (whole ? 0.35 : codes ? 0.8 : 0.5) / 128 * kernel->value_head_dim;
}

bool has_grid_steps(const struct kernel *kernel) {
  return kernel->head_scales && kernel->tile_q == 3 * ROWS;
}

/* What a tile of scales of heads costs, in steps of keys of one of three warpgroups
 * (docs/notes/hopper-fp8.md). */
struct grid_cost {
  double tile, step;
  double single; /* less, where there is but one step, and nothing waits for another */
  double uneven; /* more, where a mask ends in the midst of steps */
};

bool small_tiles_pay(const struct problem *problem, const struct kernel *kernel) {
  /* Measured: docs/notes/hopper-fp8.md. */
  enum { LEAST_OF_ONE_STEP = 96, MOST_OF_ONE_STEP = 192, MANY_KEYS = 400 };
  const double queries = (double)problem->max_seqlen_q, keys = (double)problem->max_seqlen_k;
  return kernel->head_dim > 64 && ((keys > LEAST_OF_ONE_STEP && keys <= MOST_OF_ONE_STEP) ||
                                   keys_seen(problem, queries, keys) > MANY_KEYS);
}

/* Of a tile with room for `size` warpgroups, `taken` of which have queries. Two may be the kernel
 * for small tiles, whose steps are of twice as many keys. */
static const struct grid_cost *grid_cost(const struct problem *problem, const struct kernel *kernel,
                                         int64_t size, int64_t taken) {
  static const struct grid_cost of_64[] = {{2.5, 0.6, 0.65, 0},
                                           {2.65, 0.8, 0.65, 0},
                                           {2.7, 1, 0.65, 0}},
                                of_128[] = {{2.95, 0.64, 0.85, 0},
                                            {3.2, 0.85, 0.85, 0},
                                            {3.75, 1, 0.85, 0}},
                                small = {3.65, 1.42, 1.1, 0.5};
  if (size == 2 && small_tiles_pay(problem, kernel)) return &small;
  return (kernel->head_dim > 64 ? of_128 : of_64) + taken - 1;
}

static int64_t grid_width(const struct problem *problem, const struct kernel *kernel,
                          int64_t size) {
  return (int64_t)kernel->tile_k * (size == 2 && small_tiles_pay(problem, kernel) ? 2 : 1);
}

bool counts_tiles(const struct problem *problem) {
  enum { FEW = 1024 };
  return longest_query(problem) <= FEW && problem->max_seqlen_k <= FEW;
}

/* What the tiles of a head take, or of a group of heads that share them, each by its own number of
 * warpgroups. In steps: a tile of keys for all of a tile's warpgroups. */
struct tile_times {
  double all, longest, shortest;
};

static struct tile_times time_tiles(const struct problem *problem, const struct kernel *kernel,
                                    int64_t warpgroups, int64_t tile_heads) {
  const bool grid = has_grid_steps(kernel) && counts_tiles(problem);
  const double shared = sharing_cost(kernel, tile_heads);
  const int64_t queries = longest_query(problem), keys = problem->max_seqlen_k;
  const int64_t rows = ROWS / tile_heads, step = warpgroups * rows;
  const int64_t width = grid ? grid_width(problem, kernel, warpgroups) : kernel->tile_k;
  const fa3_mask mask = fa3_make_mask((int)queries, (int)keys, keys - queries, problem->window_left,
                                      problem->window_right);
  struct tile_times times = {0, 0, INFINITY};
  for (int64_t first = 0; first < queries; first += step) {
    const int64_t last = smaller(first + step, queries), taken = divide_up(last - first, rows);
    const fa3_range seen = fa3_visible_tiles(&mask, (int)first, (int)last, (int)width);
    const double steps = seen.end - seen.begin;
    double time = forward_tile_time(kernel, taken) * (steps + tile_steps + shared);
    if (grid) {
      const struct grid_cost *cost = grid_cost(problem, kernel, warpgroups, taken);
      const int64_t end = fa3_visible_keys(&mask, (int)last - 1).end;
      time = cost->tile + shared +
             cost->step * (half_filled(end, width) ? steps - half_less : steps) -
             (steps > 1 ? 0 : cost->single);
    }
    times.all += time;
    times.longest = fmax(times.longest, time);
    times.shortest = fmin(times.shortest, time);
  }
  return times;
}

double grid_steps(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel, int64_t warpgroups, int64_t tile_heads) {
  const struct grid_cost *cost = grid_cost(problem, kernel, warpgroups, warpgroups);
  const double width = (double)grid_width(problem, kernel, warpgroups);
  const int64_t tile_queries = warpgroups * (ROWS / tile_heads);
  const int64_t heads = problem->batch * problem->heads_q / tile_heads;
  const int64_t blocks = divide_up(longest_query(problem), tile_queries);
  const double rounds = (double)(blocks * heads) / facts->multiprocessors;
  const double beside = cost->tile + sharing_cost(kernel, tile_heads);
  const double queries = (double)problem->max_seqlen_q, keys = (double)problem->max_seqlen_k;
  const bool uneven = problem->window_right < MASK_UNBOUNDED;
  /* A tile's last row sees the most. */
  const double rows = uneven ? (double)tile_queries / 2 : 0;
  const double seen = fmin(keys_seen(problem, queries, keys) + rows, keys);
  double mean = beside + cost->step * steps_of(seen, width) - (seen <= width ? cost->single : 0);
  if (!uneven) return ceil(rounds) * mean;
  /* They are given out, longest first. */
  const double most = (double)problem->window_left + (double)problem->window_right + rows;
  double longest = beside + cost->step * steps_of(fmin(keys, most), width), next = 0;
  if (blocks > 0 && counts_tiles(problem)) {
    const struct tile_times times = time_tiles(problem, kernel, warpgroups, tile_heads);
    mean = times.all / (double)blocks;
    longest = times.longest;
    next = time_of_rounds(longest, mean, rounds);
  }
  const double mixed = rounds * (mean + cost->uneven) + (rounds > 1 ? mean / 3 : 0);
  return fmax(fmax(longest, mixed), next);
}

bool are_two(const struct problem *problem, const struct kernel *kernel, int64_t rows,
             int64_t longest) {
  return small_tiles_pay(problem, kernel) && longest > rows && longest <= 2 * rows;
}

/* Of tiles that are looked at one by one. Few rounds of equal ones take as long as whole rounds; of
 * others, all rounds but the last are of the shortest at least. */
static double counted_time(const struct problem *problem, const struct cuda_facts *facts,
                           const struct kernel *kernel, int64_t warpgroups, int64_t tile_heads) {
  const double last = 0.25; /* tiles of the mean length, which the others end before */
  const struct tile_times times = time_tiles(problem, kernel, warpgroups, tile_heads);
  const int64_t blocks = divide_up(longest_query(problem), warpgroups * (ROWS / tile_heads));
  const int64_t heads = problem->batch * (problem->heads_q / tile_heads);
  const double mean = times.all / (double)larger(blocks, 1);
  const double rounds = (double)blocks * (double)heads / facts->multiprocessors;
  if (rounds <= 1) return times.longest;
  const double some = fmax(times.longest, (rounds + last) * mean);
  if (rounds > MOST_ROUNDS) return some;
  const double all = ceil(rounds);
  if (problem->window_right >= MASK_UNBOUNDED) return fmax(times.longest, all * mean);
  return fmax(some, all * (times.shortest + (mean - times.shortest) * (rounds - all + 1)));
}

bool counts_tile_size(const struct problem *problem, const struct kernel *kernel) {
  return counts_tiles(problem) && kernel->dtype != FA3_FLOAT8_E4M3;
}

/* Whether two warpgroups, of which the second has few rows, are faster than one and one, though the
 * multiprocessors are there: with few keys. A warpgroup has so many rows. */
static bool stay_together(const struct problem *problem, const struct kernel *kernel,
                          int64_t rows) {
  const int64_t longest = longest_query(problem);
  return kernel->tile_q == 2 * ROWS && longest > rows && 4 * longest <= 7 * rows &&
         problem->max_seqlen_k <= 2 * (int64_t)ROWS;
}

struct tile_size find_tile_size(const struct problem *problem, const struct cuda_facts *facts,
                                const struct kernel *kernel, int64_t tile_heads) {
  const double gain = 0.96; /* or better, to be taken */
  const int64_t rows = ROWS / tile_heads, all = kernel->tile_q / ROWS;
  const int64_t least = stay_together(problem, kernel, rows) ? 2 : 1;
  struct tile_size best = {all, counted_time(problem, facts, kernel, all, tile_heads)};
  for (int64_t warpgroups = all - 1; warpgroups >= least; warpgroups--) {
    const double time = counted_time(problem, facts, kernel, warpgroups, tile_heads);
    if (time <= gain * best.time) best = (struct tile_size){warpgroups, time};
  }
  return best;
}

/* Of the tile sizes, the best. */
static double least_grid_steps(const struct problem *problem, const struct cuda_facts *facts,
                               const struct kernel *kernel, int64_t tile_heads) {
  double least = grid_steps(problem, facts, kernel, 1, tile_heads);
  for (int64_t warpgroups = 2; warpgroups <= kernel->tile_q / ROWS; warpgroups++)
    least = fmin(least, grid_steps(problem, facts, kernel, warpgroups, tile_heads));
  return least;
}

/* What a call takes whose query heads share tiles, so many each, in steps: all that its tiles do,
 * or in rounds, where tiles are few. */
struct shared_time {
  double work, rounds;
};

static struct shared_time time_shared(const struct problem *problem, const struct cuda_facts *facts,
                                      const struct kernel *kernel, int64_t tile_heads) {
  const int64_t longest = longest_query(problem);
  const bool two = has_grid_steps(kernel) && are_two(problem, kernel, ROWS / tile_heads, longest);
  const int64_t warpgroups = two ? 2 : kernel->tile_q / ROWS;
  const struct tile_times times = time_tiles(problem, kernel, warpgroups, tile_heads);
  const int64_t heads = problem->batch * (problem->heads_q / tile_heads);
  const int64_t blocks = divide_up(longest, warpgroups * (ROWS / tile_heads));
  const double mean = times.all / (double)larger(blocks, 1);
  const double rounds = (double)blocks * (double)heads / facts->multiprocessors;
  const double next = time_of_rounds(times.longest, mean, rounds);
  return (struct shared_time){.work = rounds * mean,
                              .rounds = problem->window_right < MASK_UNBOUNDED
                                            ? fmax(fmax(times.longest, rounds * mean), next)
                                            : ceil(rounds) * mean};
}

bool sharing_pays(const struct problem *problem, const struct cuda_facts *facts,
                  const struct kernel *kernel) {
  enum { MOST_QUERIES = 1024 };
  const double gain = 0.97; /* or better */
  const int64_t group = problem->heads_q / problem->heads_k, queries = longest_query(problem);
  if (queries > MOST_QUERIES) return false;
  const double tiles = (double)divide_up(queries, kernel->tile_q) * (double)problem->heads_q;
  if (has_grid_steps(kernel) && tiles * (double)problem->batch <= 2 * facts->multiprocessors)
    return least_grid_steps(problem, facts, kernel, group) <=
           gain * least_grid_steps(problem, facts, kernel, 1);
  if (counts_tile_size(problem, kernel))
    return find_tile_size(problem, facts, kernel, group).time <=
           gain * find_tile_size(problem, facts, kernel, 1).time;
  const struct shared_time shared = time_shared(problem, facts, kernel, group),
                           apart = time_shared(problem, facts, kernel, 1);
  /* In many rounds it is the work that counts. */
  const double rounds = tiles * (double)problem->batch / facts->multiprocessors;
  const bool in_rounds = counts_tiles(problem) && !has_grid_steps(kernel) && rounds <= MOST_ROUNDS;
  return in_rounds ? shared.rounds <= gain * apart.rounds : shared.work <= gain * apart.work;
}
