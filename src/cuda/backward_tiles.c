#include "cuda/backward_tiles.h"

#include <math.h>

#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "integer.h"

/* Where steps of 64 queries are taken at head dim 64: queries of a sequence, under a causal mask
 * and without one; tiles of all query heads. Measured: docs/notes/hopper-backward-tiles.md. */
enum { LEAST_CAUSAL_QUERIES = 385, FEW_CAUSAL_TILES = 48 };
enum { MOST_FULL_QUERIES = 2048, MOST_QUERIES_FOR_A_KEY = 4, FEW_FULL_TILES = 33 };

int64_t count_key_slots(const struct problem *problem) {
  return FA3_BACKWARD_SLOTS(problem->cu_seqlens_k, problem->batch,
                            problem->cu_seqlens_k ? problem->rows_k : longest_key(problem), TILE_K);
}

/* Of the longest sequence. */
static fa3_mask find_mask(const struct problem *problem) {
  const int queries = (int)longest_query(problem);
  const int keys = (int)longest_key(problem);
  return fa3_make_mask(queries, keys, keys - queries, problem->window_left, problem->window_right);
}

int64_t count_unseen_tiles(const struct problem *problem, int32_t tile_k) {
  if (queries_vary(problem) || keys_vary(problem) || problem->leftpad_k || problem->diagonal)
    return 0;
  const fa3_mask mask = find_mask(problem);
  const fa3_range seen = fa3_visible_tiles(&mask, 0, mask.queries, tile_k);
  return seen.begin;
}

int64_t count_key_tiles(const struct problem *problem) {
  return multiply(count_key_slots(problem), problem->heads_k);
}

int64_t query_heads_of_key_head(const struct problem *problem) {
  return problem->heads_q / larger(problem->heads_k, 1);
}

bool is_causal(const struct problem *problem) {
  return problem->window_left >= FA3_NO_LIMIT && problem->window_right < FA3_NO_LIMIT;
}

bool is_masked(const struct problem *problem) {
  return problem->window_left < FA3_NO_LIMIT || problem->window_right < FA3_NO_LIMIT;
}

bool has_window(const struct problem *problem) {
  return problem->window_left < FA3_NO_LIMIT;
}

/* Where tiles are few, the call takes as long as one of them, which has several short steps and
 * ends sooner with them. They also gain where at least half of the second step of 128 queries would
 * be empty, up to a round of tiles. The limits are measured. */
static bool gains_by_short_steps(const struct problem *problem) {
  const int64_t queries = longest_query(problem);
  const int64_t keys = longest_key(problem);
  const double tiles = (double)count_key_tiles(problem) * (double)query_heads_of_key_head(problem);
  if (problem->head_dim > 64 || problem->value_head_dim > 64 || queries <= LARGEST_TILE_Q ||
      is_packed(problem) || queries_vary(problem) || has_window(problem))
    return false;
  if (queries <= LARGEST_TILE_Q + SMALLEST_TILE_Q) return tiles <= MULTIPROCESSORS;
  if (is_causal(problem)) return queries >= LEAST_CAUSAL_QUERIES && tiles <= FEW_CAUSAL_TILES;
  return queries <= smaller(MOST_FULL_QUERIES, MOST_QUERIES_FOR_A_KEY * keys) &&
         tiles <= FEW_FULL_TILES;
}

bool takes_short_steps(const struct problem *problem) {
  return longest_query(problem) <= SMALLEST_TILE_Q || gains_by_short_steps(problem);
}

bool is_packed(const struct problem *problem) {
  return problem->cu_seqlens_q || problem->cu_seqlens_k;
}

bool lengths_differ(const struct problem *problem) {
  const double equal = 0.95; /* a batch that is filled so far counts as one of equal lengths */
  return filled_share(problem) < equal;
}

int64_t count_sequences(const struct problem *problem) {
  const int64_t longest = longest_key(problem);
  if (!problem->cu_seqlens_k || longest < 1) return problem->batch;
  return smaller(larger((problem->rows_k + longest / 2) / longest, 1), problem->batch);
}

int64_t count_tiles(const struct problem *problem, const fa3_key_tiles *tiles) {
  int64_t of_head = (int64_t)tiles->tiles * tiles->batches;
  if (problem->cu_seqlens_k) of_head = smaller(of_head, problem->rows_k / TILE_K + tiles->batches);
  return of_head * tiles->heads;
}

double find_typical_share(const struct problem *problem, const fa3_key_tiles *tiles) {
  const double all = (double)tiles->tiles * tiles->heads * tiles->batches;
  return fmin(1, 2 * (double)count_tiles(problem, tiles) / all);
}

int64_t bytes_of_head(const struct problem *problem, const struct kernel *kernel) {
  const int64_t group = query_heads_of_key_head(problem);
  const int64_t queries = larger(longest_query(problem), 1);
  return queries * group *
         (2 * (problem->head_dim + problem->value_head_dim) + 4 * (int64_t)kernel->head_dim);
}

double bytes_of_sum(const struct problem *problem, const struct backward_plan *plan) {
  return (double)sizeof(float) * (double)problem->heads_q * plan->slots * plan->kernel->tile_q *
         plan->kernel->head_dim;
}

struct visits count_visits(const struct problem *problem, const struct kernel *kernel,
                           const fa3_key_tiles *tiles) {
  const fa3_mask mask = find_mask(problem);
  const int samples = tiles->tiles < SAMPLES ? tiles->tiles : SAMPLES;
  struct visits visits = {.samples = samples};
  for (int i = 0; i < samples; i++) {
    const int tile = tiles->first + (int)((int64_t)i * tiles->tiles / samples);
    const int first = tile * kernel->tile_k;
    const fa3_range seen = fa3_seeing_tiles(&mask, first, first + kernel->tile_k, kernel->tile_q);
    const double blocks = seen.end > seen.begin ? seen.end - seen.begin : 0;
    visits.of[i] = seen;
    visits.mean += blocks / samples;
    if (blocks > visits.most) visits.most = blocks;
  }
  return visits;
}

bool alike(const struct visits *visits) {
  return visits->mean > 0.75 * visits->most;
}
