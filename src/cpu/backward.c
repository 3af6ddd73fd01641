/* FlashAttention's backward pass (FlashAttention-2, arXiv 2307.08691, algorithm 2) on the CPU:
 * threads take blocks of keys, whose gradients they keep, and go through the queries tile by tile;
 * the queries' gradients are summed in the order of the keys (query_tiles.h). */
#include "backward.h"

#include <math.h>
#include <omp.h>

#include "element.h"
#include "error.h"
#include "integer.h"
#include "key_block.h"
#include "query_tiles.h"

enum {
  SMALLEST_TILE_K = 48,
  CACHE_LINE = 64,
  MOST_THREADS = 1024, /* more than any call can use, few enough to be started */
  BLOCKS_PER_THREAD = 4
};

/* Blocks of equal size: as few as fit the scratch, but enough for all threads. */
static int64_t choose_tile_k(const struct problem *problem, const struct routines *routines,
                             int32_t num_threads) {
  int64_t wanted = (int64_t)BLOCKS_PER_THREAD * num_threads;
  int64_t heads = larger(smaller(problem->batch, wanted) * smaller(problem->heads_k, wanted), 1);
  int64_t keys = larger(longest_sequence(problem->max_seqlen_k, problem->rows_k), 1);
  int64_t blocks =
      larger(divide_up(keys, key_block_largest(problem, routines)), divide_up(wanted, heads));
  return round_up(larger(divide_up(keys, blocks), SMALLEST_TILE_K), routines->strip);
}

fa3_status cpu_plan_backward(const struct problem *problem, const struct routines *routines,
                             struct plan *plan) {
  int64_t tiles_size = query_tiles_size(problem, routines);
  if (tiles_size < 0)
    return set_error(FA3_UNSUPPORTED, "the workspace for the queries' gradients is too large");
  int64_t threads = problem->num_threads ? problem->num_threads : omp_get_max_threads();
  plan->num_threads = (int32_t)larger(smaller(threads, MOST_THREADS), 1);
  plan->tile_q = TILE_Q;
  plan->tile_k = choose_tile_k(problem, routines, plan->num_threads);
  struct key_scratch scratch;
  plan->workspace_size =
      (size_t)tiles_size +
      key_scratch_layout(problem, routines, NULL, &scratch) * (size_t)plan->num_threads +
      CACHE_LINE;
  return FA3_OK;
}

/* Calls `act` on every tile of queries, shared out among the team's threads. */
static void for_each_tile(const struct query_tiles *tiles, int64_t longest,
                          void (*act)(const struct query_tiles *, const struct query_tile *)) {
  const struct problem *problem = tiles->problem;
  const int64_t heads = problem->batch * problem->heads_k;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < divide_up(longest, TILE_Q) * heads; i++) {
    const int64_t first_row = i / heads * TILE_Q, batch = i % heads / problem->heads_k;
    const struct query_tile tile = query_tile_at(tiles, batch, i % problem->heads_k, first_row);
    if (tile.rows > 0) act(tiles, &tile);
  }
}

/* -sum of exp(sink - lse) * delta over the queries of a head. */
static double sink_gradient(const struct query_tiles *tiles, int64_t head, double sink) {
  const struct problem *problem = tiles->problem;
  const int64_t group = group_size(problem);
  double sum = 0;
  for (int64_t batch = 0; batch < problem->batch; batch++) {
    const struct sequence sequence = problem_sequence(problem, batch);
    for (int64_t query = 0; query < sequence.seqlen_q; query++) {
      const int64_t row = query * group + head % group;
      const struct query_tile tile =
          query_tile_at(tiles, batch, head / group, round_down(row, TILE_Q));
      const double lse =
          *(const float *)element(&problem->lse, sequence.batch_q, sequence.row_q + query, head);
      sum -= exp(sink - lse) * (double)tile.delta[row % TILE_Q];
    }
  }
  return sum;
}

static void store_sinks(const struct query_tiles *tiles) {
  const struct problem *problem = tiles->problem;
  const struct operand *gradient = &problem->grad_sink;
#pragma omp for schedule(static)
  for (int64_t head = 0; head < problem->heads_q; head++) {
    const float sink = load_head_value(&problem->sink, head);
    double sum = sink == -INFINITY ? 0 : sink_gradient(tiles, head, (double)sink);
    if (problem->accumulate) sum += (double)load_head_value(gradient, head);
    store_head_value(gradient, head, (float)sum);
  }
}

/* The first keys first: under a causal mask they are seen by the most queries. Threads take the
 * blocks in this order, which key_block_run asks for. */
static void run_blocks(const struct query_tiles *tiles, const struct plan *plan, int64_t blocks,
                       atomic_llong *next, char *scratch) {
  const struct problem *problem = tiles->problem;
  const int64_t heads = problem->batch * problem->heads_k;
  struct key_block block = {.tiles = tiles, .tile_k = plan->tile_k};
  key_scratch_layout(problem, tiles->routines, scratch, &block.scratch);
  for (;;) {
    const int64_t task = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
    if (task >= blocks * heads) return;
    block.batch = task % heads / problem->heads_k;
    block.head_k = task % problem->heads_k;
    block.key = task / heads * plan->tile_k;
    block.sequence = problem_sequence(problem, block.batch);
    block.keys = smaller(plan->tile_k, block.sequence.mask.seqlen_k - block.key);
    if (block.keys > 0) key_block_run(&block);
  }
}

void cpu_backward(const struct problem *problem, const struct routines *routines,
                  const struct plan *plan, void *workspace) {
  int64_t rows = 0, keys = 0;
  for (int64_t batch = 0; batch < problem->batch; batch++) {
    const struct sequence sequence = problem_sequence(problem, batch);
    rows = larger(rows, query_rows(problem, &sequence));
    keys = larger(keys, sequence.mask.seqlen_k);
  }
  const int64_t blocks = divide_up(keys, plan->tile_k);

  char *base = (char *)(((uintptr_t)workspace + CACHE_LINE - 1) & -(uintptr_t)CACHE_LINE);
  const struct query_tiles tiles = query_tiles_at(problem, routines, base);
  base += query_tiles_size(problem, routines);
  struct key_scratch layout;
  const size_t scratch_size = key_scratch_layout(problem, routines, NULL, &layout);
  atomic_llong next = 0;
#pragma omp parallel num_threads(plan->num_threads)
  {
    for_each_tile(&tiles, rows, query_tile_prepare);
    run_blocks(&tiles, plan, blocks, &next, base + (size_t)omp_get_thread_num() * scratch_size);
    if (problem->grad_sink.data) store_sinks(&tiles);
#pragma omp barrier
    for_each_tile(&tiles, rows, query_tile_store);
  }
}
