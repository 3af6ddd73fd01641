#include "cuda/decode_time.h"

#include <math.h>

#include "cuda/decode_splits.h"
#include "cuda/kernels.h"
#include "cuda/plan.h"
#include "cuda/sequences.h"
#include "integer.h"
#include "kernels/decode_params.h"

/* What short work has at most: numbers in keys and values, and keys of a sequence of 16 bits. From
 * DECODE_LONG_KEYS on those too few to fill the GPU have splits that another kernel puts together.
 */
static const int64_t most_numbers = 64 << 20, most_codes = 32 << 20, most_keys = 16384;

/* Clusters of 1, 2, 4, 8 and 16 blocks that run at once where each block has a multiprocessor of an
 * H100 or H200: results do not depend on how many a call may use. */
enum { SIZES = 5 };
static const double at_once[SIZES] = {132, 66, 31, 15, 7};

/* In microseconds, fitted to measured times (docs/notes/hopper-decode.md): a call; a cluster, each
 * time that it doubles; a block, beside its units; a round of blocks, where some have few keys. */
static const double call_time = 2, join_time = 0.35, block_time = 1, round_time = 0.8;

/* A unit, of a block that does not wait for the memory: of 16 bits, of those at head dim 256, and
 * of codes. A block of codes with all warps of a multiprocessor, and each of two blocks that share
 * one, take so many times as long. */
static const double unit_time = 0.57, wide_unit_time = 0.66, unit_time_of_codes = 0.65;
static const double with_all_warps = 0.65, as_one_of_two = 1.11;

/* What codes use of the memory's bandwidth. */
static const double bandwidth_of_codes = 0.7;

/* Lengths that differ: keys of all sequences, of as many as the longest has, and how much longer a
 * unit of that one takes; and each round before its own is as long as this much of it. */
static const double typical_length = 0.75, longest_unit = 1.25, rounds_before = 0.18;

/* The keys of a call, and a kernel that reads them. */
struct work {
  double units; /* of the longest sequence */
  double step;  /* units that a block has at once */
  double tiles;
  double unit_time;
  double unit_bytes; /* that a tile reads from the memory */
  double bandwidth;  /* in bytes a microsecond */
  double room;       /* blocks of a multiprocessor */
};

static struct work measure_work(const struct problem *problem, const struct cuda_facts *facts,
                                const struct kernel *kernel, int64_t tiles) {
  const bool codes = decode_has_codes(problem), wide = kernel->head_dim > 128;
  const double numbers = FA3_DECODE_KEYS * (double)(problem->head_dim + problem->value_head_dim);
  const int64_t row_tiles = decode_row_tiles(problem, longest_query(problem));
  return (struct work){
      .units = (double)divide_up(larger(problem->max_seqlen_k, 1), FA3_DECODE_KEYS),
      .step = (double)decode_loads(kernel),
      .tiles = (double)tiles,
      .unit_time = codes  ? unit_time_of_codes
                   : wide ? wide_unit_time
                          : unit_time,
      .unit_bytes = numbers * (codes ? 1 : 2) / (double)larger(row_tiles, 1),
      .bandwidth = 1e3 * facts->bandwidth * (codes ? bandwidth_of_codes : 1),
      .room = wide ? 1 : 2};
}

static double reading_time(const struct work *work) {
  return work->tiles * work->units * work->unit_bytes / work->bandwidth;
}

/* Where one is near the other, both count. */
static double longer_of(double a, double b) {
  return sqrt(sqrt(a * a * a * a + b * b * b * b));
}

/* All sequences are as long. */
static double time_alike(const struct work *work, double steps, double clusters, double splits) {
  const double blocks = splits * fmin(work->tiles, clusters);
  const double second = fmin(fmax(blocks / at_once[0] - 1, 0), 1);
  const double unit = work->unit_time * (1 + second * (as_one_of_two - 1));
  double rounds = ceil(work->tiles / clusters);
  if (rounds > 2) rounds = work->tiles / clusters + 0.5; /* they end at different times */
  return longer_of(rounds * steps * unit, reading_time(work)) + rounds * block_time;
}

/* Few are as long as the longest. */
static double time_apart(const struct work *work, double steps, double clusters) {
  const double rounds = work->tiles / clusters, longest = steps * work->unit_time;
  return longer_of(longest_unit * longest, typical_length * reading_time(work)) + block_time +
         round_time * rounds + rounds_before * (ceil(rounds) - 1) * longest;
}

bool decode_is_short(const struct problem *problem, int64_t tiles) {
  const int64_t keys = larger(problem->max_seqlen_k, 1);
  const int64_t dims = problem->head_dim + problem->value_head_dim;
  const bool codes = decode_has_codes(problem);
  int64_t numbers;
  if (__builtin_mul_overflow(problem->batch * problem->heads_k, keys, &numbers) ||
      __builtin_mul_overflow(numbers, dims, &numbers) ||
      numbers > (codes ? most_codes : most_numbers))
    return false;
  return keys < DECODE_LONG_KEYS ||
         (!codes && keys < most_keys && tiles << (SIZES - 1) >= DECODE_FULL_GRID);
}

struct decode_way decode_fastest_way(const struct problem *problem, const struct cuda_facts *facts,
                                     const struct kernel *kernel, const struct kernel *lone,
                                     int64_t tiles) {
  enum { WAYS = 2 * SIZES };
  const struct work work = measure_work(problem, facts, kernel, tiles);
  const bool differ = decode_lengths_differ(problem);
  double alike[WAYS], apart[WAYS], least_alike = INFINITY, least_apart = INFINITY;
  for (int way = 0; way < WAYS; way++) alike[way] = apart[way] = INFINITY;
  for (int way = 0; way < WAYS; way++) {
    const int size = way / 2;
    const bool alone = way % 2;
    const bool shares = !alone && size < SIZES - 1; /* multiprocessors: the largest rather not */
    const double splits = 1 << size, clusters = at_once[size] * (shares ? work.room : 1);
    if (size > 0 && splits * work.step > work.units) break;
    if (alone && (!lone || work.tiles > clusters)) continue;
    struct work of_way = work;
    if (alone) of_way.unit_time *= with_all_warps;
    const double steps = work.step * ceil(work.units / (splits * work.step));
    const double time = call_time + join_time * size;
    alike[way] = time + time_alike(&of_way, steps, clusters, splits);
    apart[way] = time + time_apart(&of_way, steps, clusters);
    least_alike = fmin(least_alike, alike[way]);
    least_apart = fmin(least_apart, apart[way]);
  }
  /* Lengths that may differ may also be alike. */
  int best = 0;
  double least = INFINITY;
  for (int way = 0; way < WAYS; way++) {
    const double time = alike[way] / least_alike + (differ ? apart[way] / least_apart : 0);
    if (time >= least) continue;
    least = time;
    best = way;
  }
  return (struct decode_way){.splits = 1 << best / 2, .alone = best % 2};
}
