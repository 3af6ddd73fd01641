/* FlashAttention's backward pass (FlashAttention-2, arXiv 2307.08691, algorithm 2) on the CPU:
 * threads take blocks of keys, whose gradients they keep, and go through the queries tile by tile;
 * the queries' gradients are summed in the order of the keys (query_tiles.h). */
#include "backward.h"

#include <math.h>

#include "element.h"
#include "error.h"
#include "integer.h"
#include "key_block.h"
#include "query_tiles.h"
#include "scratch.h"
#include "threads.h"
#include "work.h"

enum { SMALLEST_TILE_K = 48, BLOCKS_PER_THREAD = 4 };

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
                             struct cpu_plan *plan) {
  int64_t tiles_size = query_tiles_size(problem, routines);
  if (tiles_size < 0)
    return set_error(FA3_UNSUPPORTED, "the workspace for the queries' gradients is too large");
  plan->num_threads = work_most_threads(problem);
  plan->tile_q = TILE_Q;
  plan->tile_k = choose_tile_k(problem, routines, plan->num_threads);
  struct key_scratch scratch;
  plan->workspace_size =
      (size_t)tiles_size +
      key_scratch_layout(problem, routines, NULL, &scratch) * (size_t)plan->num_threads +
      CACHE_LINE;
  return FA3_OK;
}

struct backward_call {
  const struct query_tiles *tiles;
  int64_t tile_k;
  int64_t pairs; /* of a sequence and a key head */
  char *scratch;
  size_t scratch_size; /* of a thread */
  /* What a task does with a tile of queries. */
  void (*act)(const struct query_tiles *, const struct query_tile *);
};

static void run_tile(void *argument, int64_t task, int32_t seat) {
  (void)seat;
  const struct backward_call *call = argument;
  const int64_t heads = call->tiles->problem->heads_k, pair = task % call->pairs;
  const struct query_tile tile =
      query_tile_at(call->tiles, pair / heads, pair % heads, task / call->pairs * TILE_Q);
  if (tile.rows > 0) call->act(call->tiles, &tile);
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

static void store_sink(void *argument, int64_t head, int32_t seat) {
  (void)seat;
  const struct backward_call *call = argument;
  const struct problem *problem = call->tiles->problem;
  const float sink = load_head_value(&problem->sink, head);
  const bool none = sink == -INFINITY || call->pairs == 0;
  double sum = none ? 0 : sink_gradient(call->tiles, head, (double)sink);
  if (problem->accumulate) sum += (double)load_head_value(&problem->grad_sink, head);
  store_head_value(&problem->grad_sink, head, (float)sum);
}

/* The first keys first: under a causal mask they are seen by the most queries. Blocks are started
 * in this order, which key_block_run asks for. */
static void run_block(void *argument, int64_t task, int32_t seat) {
  const struct backward_call *call = argument;
  const struct problem *problem = call->tiles->problem;
  const int64_t pair = task % call->pairs;
  struct key_block block = {.tiles = call->tiles,
                            .tile_k = call->tile_k,
                            .batch = pair / problem->heads_k,
                            .head_k = pair % problem->heads_k,
                            .key = task / call->pairs * call->tile_k};
  block.sequence = problem_sequence(problem, block.batch);
  block.keys = smaller(call->tile_k, block.sequence.mask.seqlen_k - block.key);
  if (block.keys <= 0) return;
  key_scratch_layout(problem, call->tiles->routines,
                     call->scratch + (size_t)seat * call->scratch_size, &block.scratch);
  key_block_run(&block);
}

void cpu_backward(const struct problem *problem, const struct routines *routines,
                  const struct cpu_plan *plan, void *workspace) {
  const struct work work = work_of(problem);
  const int32_t threads = work_threads(&work, plan->num_threads);
  char *base = first_line(workspace);
  const struct query_tiles tiles = query_tiles_at(problem, routines, base);
  struct key_scratch layout;
  struct backward_call call = {
      .tiles = &tiles,
      .tile_k = plan->tile_k,
      .pairs = work.longest_q || work.longest_k ? problem->batch * problem->heads_k : 0,
      .scratch = base + query_tiles_size(problem, routines),
      .scratch_size = key_scratch_layout(problem, routines, NULL, &layout)};
  const int64_t query_tasks = divide_up(work.longest_q * group_size(problem), TILE_Q) * call.pairs;

  call.act = query_tile_prepare;
  threads_for(threads, query_tasks, run_tile, &call);
  threads_for(threads, divide_up(work.longest_k, plan->tile_k) * call.pairs, run_block, &call);
  if (problem->grad_sink.data) threads_for(threads, problem->heads_q, store_sink, &call);
  call.act = query_tile_store;
  threads_for(threads, query_tasks, run_tile, &call);
}
