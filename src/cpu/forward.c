/* FlashAttention's forward pass (FlashAttention-2, arXiv 2307.08691, algorithm 1) on the CPU:
 * threads take blocks of query rows; a block visits its keys tile by tile; in a tile, strips of
 * rows small enough for the first cache go through product, softmax and product. */
#include "forward.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "cache.h"
#include "codes.h"
#include "decode.h"
#include "element.h"
#include "integer.h"
#include "row_end.h"
#include "scale.h"
#include "scratch.h"
#include "threads.h"
#include "work.h"

enum {
  TILE_K = 256,
  QUERY_WORDS = 96 << 10, /* of a block's queries and output, beside a tile in the second cache */
  LARGEST_TILE_Q = 768,
  TILE_Q_STEP = 96, /* a multiple of every level's strip */
  BLOCKS_PER_THREAD = 4
};

static const float log2_e = 1.44269504f;

/* What one thread works in, and its sizes in words. */
struct scratch {
  int64_t head_depth; /* of query * key^T */
  int64_t tile_depth; /* of probabilities * value, for a whole tile */
  int64_t output_width;
  float *queries;
  float *keys;
  float *values;
  float *gathered; /* of a cache in pages: keys or values of a tile, one after the other */
  float *scores;   /* one strip's */
  float *output;
  float *maximum;
  float *sum;
  float *decoded; /* a tile of keys or values of FP8 codes, row by row */
};

static void scratch_widths(const struct problem *problem, const struct routines *routines,
                           struct scratch *scratch) {
  const int64_t pair = routines->elements_per_word;
  scratch->head_depth = round_up(problem->head_dim / pair, routines->depth_step);
  scratch->tile_depth = round_up(TILE_K / pair, routines->depth_step);
  scratch->output_width = round_up(problem->value_head_dim, routines->panel);
}

/* Of a query and its output. */
static int64_t row_words(const struct scratch *scratch) {
  return scratch->head_depth + scratch->output_width;
}

/* The more rows share a tile's arranging the better, while they stay in the cache. */
static int64_t largest_tile_q(const struct scratch *scratch) {
  int64_t rows = round_down(QUERY_WORDS / row_words(scratch), TILE_Q_STEP);
  return larger(smaller(rows, LARGEST_TILE_Q), TILE_Q_STEP);
}

/* Of a block's queries and outputs: room for that many rows, and unlike what they take it never
 * falls when a head dim grows. */
static int64_t block_words(const struct scratch *scratch) {
  int64_t words = larger(QUERY_WORDS, TILE_Q_STEP * row_words(scratch));
  return smaller(words, LARGEST_TILE_Q * row_words(scratch));
}

static int64_t decoded_words(const struct problem *problem) {
  if (problem->key.dtype != FA3_FLOAT8_E4M3) return 0;
  return TILE_K * larger(problem->head_dim, problem->value_head_dim);
}

/* Lays the scratch out at `base` (null to measure only); returns its size in bytes. */
static size_t scratch_layout(const struct problem *problem, const struct routines *routines,
                             char *base, struct scratch *scratch) {
  scratch_widths(problem, routines, scratch);
  const int64_t query_words = largest_tile_q(scratch) * scratch->head_depth;
  const struct scratch_array arrays[] = {
      {&scratch->keys, TILE_K * scratch->head_depth},
      {&scratch->values, scratch->tile_depth * scratch->output_width},
      {&scratch->gathered, problem->features & FA3_FEATURE_PAGE_TABLE
                               ? TILE_K * larger(problem->head_dim, problem->value_head_dim)
                               : 0},
      {&scratch->scores, (int64_t)routines->strip * TILE_K},
      {&scratch->maximum, LARGEST_TILE_Q},
      {&scratch->sum, LARGEST_TILE_Q},
      {&scratch->queries, query_words},
      {&scratch->output, block_words(scratch) - query_words},
      {&scratch->decoded, decoded_words(problem)},
  };
  return lay_out(arrays, sizeof arrays / sizeof *arrays, base);
}

/* Blocks of equal size: as few as fit the scratch, but enough for all threads. */
static int64_t choose_tile_q(const struct problem *problem, const struct routines *routines,
                             int32_t num_threads) {
  struct scratch scratch;
  scratch_widths(problem, routines, &scratch);
  int64_t wanted = (int64_t)BLOCKS_PER_THREAD * num_threads;
  int64_t heads = larger(smaller(problem->batch, wanted) * smaller(problem->heads_k, wanted), 1);
  int64_t seqlen = longest_sequence(problem->max_seqlen_q, problem->rows_q);
  int64_t rows = larger(seqlen * group_size(problem), 1);
  int64_t blocks = larger(divide_up(rows, largest_tile_q(&scratch)), divide_up(wanted, heads));
  return round_up(divide_up(rows, blocks), routines->strip);
}

/* Whether a backward call can follow this one. */
static bool has_gradients(const struct problem *problem) {
  return problem->features & FA3_FEATURE_LSE && problem->key.dtype != FA3_FLOAT8_E4M3 &&
         !(problem->features & (FA3_FEATURE_PAGE_TABLE | FA3_FEATURE_BATCH_INDEX));
}

/* Of a thread, with either routines. */
static size_t scratch_size(const struct problem *problem, const struct routines *routines,
                           const struct routines *backward) {
  struct scratch scratch;
  const size_t size = scratch_layout(problem, routines, NULL, &scratch);
  if (!has_gradients(problem)) return size;
  const size_t again = scratch_layout(problem, backward, NULL, &scratch);
  return again > size ? again : size;
}

void cpu_plan_forward(const struct problem *problem, const struct routines *routines,
                      const struct routines *backward, struct cpu_plan *plan) {
  plan->num_threads = work_most_threads(problem);
  plan->tile_k = TILE_K;
  plan->tile_q = choose_tile_q(problem, routines, plan->num_threads);
  plan->workspace_size = scratch_size(problem, routines, backward) * (size_t)plan->num_threads +
                         CACHE_LINE + decode_workspace(problem, plan->num_threads);
}

/* A block of query rows of one key head, and the sequence they belong to. */
struct block {
  const struct problem *problem;
  const struct routines *routines;
  struct sequence sequence;
  struct scratch scratch;
  int64_t group;
  int64_t head_k;
  int64_t first_row;
  int64_t rows;
};

static int64_t query_of(const struct block *block, int64_t row) {
  return (block->first_row + row) / block->group;
}

static int64_t head_of(const struct block *block, int64_t row) {
  return block->head_k * block->group + (block->first_row + row) % block->group;
}

/* The scale of a row of a sequence. */
typedef float scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                       int64_t row);

/* If they are codes: the same rows as float32, in the scratch until others are asked for. `row` is
 * the first one's place in its sequence. */
static void decode_rows(const struct block *block, struct rows *rows, scale_of *scale, int64_t head,
                        int64_t row) {
  if (rows->dtype != FA3_FLOAT8_E4M3) return;
  float *values = block->scratch.decoded;
  for (int64_t i = 0; i < rows->count; i++)
    decode_row(rows->data + i * rows->stride, rows->width,
               scale(block->problem, &block->sequence, head, row + i), values + i * rows->width);
  rows->data = (const char *)values;
  rows->dtype = FA3_FLOAT32;
  rows->stride = rows->width * (int64_t)sizeof *values;
}

/* Arranges the queries and starts the rows' softmax. */
static void begin_block(const struct block *block) {
  const struct problem *problem = block->problem;
  const struct scratch *scratch = &block->scratch;
  for (int64_t row = 0; row < block->rows; row++) {
    int64_t head = head_of(block, row);
    struct rows query = {
        .data = element(&problem->query, block->sequence.batch_q,
                        block->sequence.row_q + query_of(block, row), head),
        .dtype = problem->query.dtype,
        .count = 1,
        .width = problem->head_dim,
    };
    decode_rows(block, &query, query_scale_of, head, query_of(block, row));
    block->routines->arrange_queries(&query, scale_sign(problem), scratch->head_depth,
                                     scratch->queries + row * scratch->head_depth);
    scratch->maximum[row] = -INFINITY;
    scratch->sum[row] = 0;
  }
  memset(scratch->output, 0,
         (size_t)(block->rows * scratch->output_width) * sizeof *scratch->output);
}

/* Keys or values of a tile, where they lie if their rows are evenly apart. */
static struct rows key_rows(const struct block *block, const struct operand *operand,
                            scale_of *scale, int64_t key, int64_t count) {
  struct rows rows = {
      .data = cache_row(operand, &block->sequence, key, block->head_k),
      .dtype = operand->dtype,
      .stride = operand->stride_row * element_size(operand),
      .count = count,
      .width = operand->dim,
  };
  if (block->sequence.pages) {
    char *gathered = (char *)block->scratch.gathered;
    rows.data = gathered;
    rows.stride = operand->dim * element_size(operand);
    for (int64_t i = 0; i < count; i++)
      memcpy(gathered + i * rows.stride,
             cache_row(operand, &block->sequence, key + i, block->head_k), (size_t)rows.stride);
  }
  decode_rows(block, &rows, scale, block->head_k, block->sequence.leftpad + key);
  return rows;
}

/* Of a strip's scores, whose first column is `key`: -infinity where a row does not see the key. */
static void mask_strip(const struct block *block, int64_t row, int64_t rows, int64_t key,
                       int64_t columns) {
  for (int64_t r = 0; r < rows; r++) {
    float *scores = block->scratch.scores + r * TILE_K;
    struct key_range seen = mask_row(&block->sequence.mask, query_of(block, row + r));
    int64_t begin = smaller(larger(seen.begin - key, 0), columns);
    int64_t end = larger(smaller(seen.end - key, columns), begin);
    for (int64_t i = 0; i < begin; i++) scores[i] = -INFINITY;
    for (int64_t i = end; i < columns; i++) scores[i] = -INFINITY;
  }
}

/* Rows [row, row + rows) of the block with the tile of keys [key, key + keys). */
static void attend_strip(const struct block *block, int64_t row, int64_t rows, int64_t key,
                         int64_t keys) {
  const struct problem *problem = block->problem;
  const struct routines *routines = block->routines;
  const struct scratch *scratch = &block->scratch;
  const int64_t panel = routines->panel;

  int64_t first = query_of(block, row), last = query_of(block, row + rows - 1);
  struct key_range visible = mask_visible(&block->sequence.mask, first, last);
  int64_t begin = round_down(larger(visible.begin - key, 0), panel);
  int64_t end = smaller(visible.end - key, keys);
  if (begin >= end) return;
  int64_t columns = round_up(end - begin, panel);

  routines->multiply(&(struct product){
      .rows = rows,
      .columns = round_up(end - begin, routines->vector),
      .depth = scratch->head_depth,
      .left = scratch->queries + row * scratch->head_depth,
      .left_stride = scratch->head_depth,
      .right = scratch->keys + begin * scratch->head_depth,
      .right_stride = panel * scratch->head_depth,
      .output = scratch->scores,
      .output_stride = TILE_K,
  });
  float scale = scale_size(problem); /* its sign and a zero are in the arranged queries */
  if (problem->softcap > 0) {
    for (int64_t r = 0; r < rows; r++)
      routines->cap(scratch->scores + r * TILE_K, columns, scale, problem->softcap);
    scale = 1;
  }
  struct key_range full = mask_full(&block->sequence.mask, first, last);
  if (full.begin > key + begin || full.end < key + begin + columns)
    mask_strip(block, row, rows, key + begin, columns);
  routines->softmax(&(struct softmax_step){
      .rows = rows,
      .columns = columns,
      .scores = scratch->scores,
      .score_stride = TILE_K,
      .scale = fminf(scale * log2_e, FLT_MAX),
      .maximum = scratch->maximum + row,
      .sum = scratch->sum + row,
      .output = scratch->output + row * scratch->output_width,
      .output_stride = scratch->output_width,
      .output_width = round_up(problem->value_head_dim, routines->vector),
  });
  const int64_t pair = routines->elements_per_word;
  routines->multiply(&(struct product){
      .rows = rows,
      .columns = round_up(problem->value_head_dim, routines->vector),
      .depth = round_up((end - begin + pair - 1) / pair, routines->depth_step),
      .left = scratch->scores,
      .left_stride = TILE_K,
      .right = scratch->values + begin / pair * panel,
      .right_stride = panel * scratch->tile_depth,
      .output = scratch->output + row * scratch->output_width,
      .output_stride = scratch->output_width,
      .accumulate = true,
  });
}

static void attend_tile(const struct block *block, int64_t key, int64_t keys) {
  const struct problem *problem = block->problem;
  const struct routines *routines = block->routines;
  const struct scratch *scratch = &block->scratch;
  const int64_t pair = routines->elements_per_word;

  struct rows rows = key_rows(block, &problem->key, key_scale_of, key, keys);
  routines->arrange_keys(&rows, scratch->head_depth, scratch->keys);
  rows = key_rows(block, &problem->value, value_scale_of, key, keys);
  routines->arrange_values(&rows, round_up((keys + pair - 1) / pair, routines->depth_step),
                           routines->panel * scratch->tile_depth, scratch->values);
  for (int64_t row = 0; row < block->rows; row += routines->strip)
    attend_strip(block, row, smaller(routines->strip, block->rows - row), key, keys);
}

static void end_block(const struct block *block) {
  const struct scratch *scratch = &block->scratch;
  for (int64_t row = 0; row < block->rows; row++)
    store_row_end(block->problem, block->routines, &block->sequence, query_of(block, row),
                  head_of(block, row), scratch->maximum[row], scratch->sum[row],
                  scratch->output + row * scratch->output_width);
}

static void run_block(const struct block *block) {
  begin_block(block);
  struct key_range visible =
      mask_visible(&block->sequence.mask, query_of(block, 0), query_of(block, block->rows - 1));
  if (block->routines->enter) block->routines->enter();
  /* The tiles are the same for every block, so that a row's sums do not depend on the number of
   * threads, which sets the blocks' size. */
  for (int64_t key = round_down(visible.begin, TILE_K); key < visible.end; key += TILE_K)
    attend_tile(block, key, smaller(TILE_K, visible.end - key));
  if (block->routines->leave) block->routines->leave();
  end_block(block);
}

struct forward_call {
  const struct problem *problem;
  const struct routines *routines;
  const struct routines *backward; /* those that a backward call after this one takes */
  int64_t tile_q;
  int64_t pairs; /* of a sequence and a key head */
  int64_t tasks; /* a block of rows of a pair each */
  char *scratch;
  size_t scratch_size; /* of a thread */
};

/* The block of a task; a shorter sequence has no rows there. */
static struct block block_at(const struct forward_call *call, const struct routines *routines,
                             int64_t task, int32_t seat) {
  const struct problem *problem = call->problem;
  struct block block = {
      .problem = problem,
      .routines = routines,
      .group = group_size(problem),
      .sequence = problem_sequence(problem, task % call->pairs / problem->heads_k),
      .head_k = task % problem->heads_k,
      .first_row = task / call->pairs * call->tile_q};
  block.rows = smaller(call->tile_q, block.sequence.seqlen_q * block.group - block.first_row);
  scratch_layout(problem, routines, call->scratch + (size_t)seat * call->scratch_size,
                 &block.scratch);
  return block;
}

/* The last rows first: under a causal mask they see the most keys. */
static void run_task(void *argument, int64_t task, int32_t seat) {
  const struct forward_call *call = argument;
  const struct block block = block_at(call, call->routines, call->tasks - 1 - task, seat);
  if (block.rows > 0 && !decodes(call->problem, block.sequence.seqlen_q)) run_block(&block);
}

/* From this magnitude on the backward pass needs lse as it rounds scores itself: P of a row's
 * largest one is exp(score - lse), and a last digit of them is then more than rounding. */
static const float large_lse = 4096;

static bool has_large_lse(const struct problem *problem, const struct sequence *sequence,
                          int64_t head_k, int64_t first_row, int64_t rows) {
  const int64_t group = group_size(problem);
  for (int64_t row = first_row; row < first_row + rows; row++) {
    const float lse =
        *(const float *)element(&problem->lse, sequence->batch_q, sequence->row_q + row / group,
                                head_k * group + row % group);
    if (isfinite(lse) && fabsf(lse) >= large_lse) return true;
  }
  return false;
}

/* Tiles sum scores in the same order as the backward pass, if the routines are the same. */
static bool sums_otherwise(const struct forward_call *call, const struct sequence *sequence) {
  return call->backward != call->routines || decodes(call->problem, sequence->seqlen_q);
}

static bool any_large_lse(const struct forward_call *call) {
  const struct problem *problem = call->problem;
  for (int64_t batch = 0; batch < problem->batch; batch++) {
    const struct sequence sequence = problem_sequence(problem, batch);
    if (!sums_otherwise(call, &sequence)) continue;
    const int64_t rows = sequence.seqlen_q * group_size(problem);
    for (int64_t head_k = 0; head_k < problem->heads_k; head_k++)
      if (has_large_lse(problem, &sequence, head_k, 0, rows)) return true;
  }
  return false;
}

/* A block with large lse, as the backward pass sums its scores. */
static void run_again(void *argument, int64_t task, int32_t seat) {
  const struct forward_call *call = argument;
  const struct block block = block_at(call, call->backward, task, seat);
  if (sums_otherwise(call, &block.sequence) &&
      has_large_lse(call->problem, &block.sequence, block.head_k, block.first_row, block.rows))
    run_block(&block);
}

void cpu_forward(const struct problem *problem, const struct routines *routines,
                 const struct routines *few, const struct routines *backward,
                 const struct cpu_plan *plan, void *workspace) {
  const struct work work = work_of(problem);
  if (work.longest_q == 0) return;
  struct forward_call call = {.problem = problem,
                              .routines = routines,
                              .backward = backward,
                              .tile_q = plan->tile_q,
                              .pairs = problem->batch * problem->heads_k,
                              .scratch = first_line(workspace),
                              .scratch_size = scratch_size(problem, routines, backward)};
  /* One thread arranges the fewest tiles with the largest blocks. */
  if (work_is_short(&work) && threads_crowded()) call.tile_q = choose_tile_q(problem, routines, 1);
  const int64_t rows = work.longest_q * group_size(problem);
  call.tasks = divide_up(rows, call.tile_q) * call.pairs;
  const int32_t threads = work_threads(&work, plan->num_threads);
  if (!decodes(problem, work.longest_q)) threads_for(threads, call.tasks, run_task, &call);
  cpu_decode(problem, few, threads, call.scratch + call.scratch_size * (size_t)plan->num_threads);
  if (!has_gradients(problem) || !any_large_lse(&call)) return;
  /* The smallest blocks: whatever the threads and the rest of the batch, the same rows are redone.
   */
  call.tile_q = backward->strip;
  threads_for(threads, divide_up(rows, call.tile_q) * call.pairs, run_again, &call);
}
