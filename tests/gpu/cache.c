/* A cache on a GPU: mixed batches and combinations against the CPU's, lengths that change between
 * the replays of a graph, and results that do not depend on the batch. Everything is in page-locked
 * memory, which both engines take.
 *
 *   test_gpu_cache [HEAD_DIM]      64 or 128; both if there is none */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "float8.h"
#include "gpu.h"
#include "half.h"
#include "rng.h"
#include "test.h"

enum {
  BATCH = 64,
  MOST_QUERIES = 1024, /* of all sequences */
  HEADS_Q = 8,
  HEADS_K = 2,
  MOST_DIM = 128,
  PAGE_SIZE = 16,
  COLUMNS = 260, /* of codes enough for keys that are dealt out, and two heads a block */
  USUAL_COLUMNS = 100,
  PAGES = 1200,
  ROWS = PAGES * PAGE_SIZE,
  ROW_K = HEADS_K * MOST_DIM,
  ROW_Q = HEADS_Q * MOST_DIM
};

static const fa3_device cuda = {FA3_CUDA, 0};

struct cache {
  uint16_t key[ROWS * ROW_K], value[ROWS * ROW_K];
  uint8_t key_codes[ROWS * ROW_K], value_codes[ROWS * ROW_K];
  float key_scale[ROWS * HEADS_K], value_scale[ROWS * HEADS_K];
  uint8_t query_codes[BATCH * ROW_Q];
  float query_scale[BATCH * HEADS_Q];
  uint16_t query[MOST_QUERIES * ROW_Q];
  uint16_t output[MOST_QUERIES * ROW_Q], other_output[MOST_QUERIES * ROW_Q];
  float partial[4 * BATCH * ROW_Q], partial_lse[4 * BATCH * HEADS_Q];
  float lse[MOST_QUERIES * HEADS_Q], other_lse[MOST_QUERIES * HEADS_Q], sink[HEADS_Q];
  int32_t page_table[BATCH * COLUMNS];
  int32_t used[BATCH], starts[BATCH + 1];
  char workspace[64 << 20];
};

static struct cache *cache;
static int head_dim; /* and elements of a row of key and value, and of query */
static int row_k, row_q;

static double number(uint16_t bits) {
  return (double)float_from_bfloat(bits);
}

static void fill(uint16_t *x, size_t bytes, struct rng *rng) {
  for (size_t i = 0; i < bytes / sizeof *x; i++) x[i] = bfloat_from_float((float)rng_normal(rng));
}

/* Codes, and a scale for each head, of numbers of about 1. */
static void fill_codes(uint8_t *codes, float *scales, int heads, struct rng *rng) {
  for (int i = 0; i < heads * head_dim; i++)
    codes[i] = e4m3_from_float((float)(4 * rng_normal(rng)));
  for (int i = 0; i < heads; i++) scales[i] = 0.125f + (float)rng_uniform(rng) / 4;
}

/* Every sequence has pages of its own as long as there are, then shared ones. */
static void new_lengths(struct rng *rng) {
  for (int b = 0; b < BATCH; b++) {
    const bool edge = rng_chance(rng, 0.3);
    const int64_t columns = rng_chance(rng, 0.05) ? COLUMNS : USUAL_COLUMNS;
    cache->used[b] = (int32_t)(edge ? PAGE_SIZE * rng_between(rng, 0, columns - 1)
                                    : rng_between(rng, 0, PAGE_SIZE * columns));
    for (int i = 0; i < COLUMNS; i++)
      cache->page_table[b * COLUMNS + i] = (int32_t)rng_between(rng, 0, PAGES - 1);
  }
}

static int open_cache(void **state) {
  (void)state;
  void *memory;
  struct rng rng = rng_for(0);
  GPU(cuMemAllocHost, &memory, sizeof *cache);
  cache = memory;
  fill(cache->key, sizeof cache->key, &rng);
  fill(cache->value, sizeof cache->value, &rng);
  fill_codes(cache->key_codes, cache->key_scale, ROWS * HEADS_K, &rng);
  fill_codes(cache->value_codes, cache->value_scale, ROWS * HEADS_K, &rng);
  fill_codes(cache->query_codes, cache->query_scale, BATCH * HEADS_Q, &rng);
  fill(cache->query, sizeof cache->query, &rng);
  for (int i = 0; i < HEADS_Q; i++) cache->sink[i] = (float)(3 * rng_normal(&rng));
  new_lengths(&rng);
  return 0;
}

static int close_cache(void **state) {
  (void)state;
  GPU(cuMemFreeHost, cache);
  return 0;
}

static fa3_tensor table(int32_t *data, int64_t rows) {
  return make_matrix(data, FA3_INT32, rows, COLUMNS);
}

/* What the calls of the tests attend to: a cache of bfloat16, or of codes with scales: of each head
 * of a page, of each head, of each row of a head of a page. */
enum { BFLOAT, PAGE_SCALES, HEAD_SCALES, ROW_SCALES, KINDS };

/* Heads are innermost. */
static fa3_tensor scales_of(float *data, int kind) {
  const int64_t rows = kind == ROW_SCALES, blocks = rows ? PAGE_SIZE : 1;
  return (fa3_tensor){
      .data = data,
      .dtype = FA3_FLOAT32,
      .rank = rows ? 3 : 2,
      .shape = {PAGES, HEADS_K, rows ? blocks : 0},
      .strides = {kind == HEAD_SCALES ? 0 : HEADS_K * blocks, 1, rows ? HEADS_K : 0}};
}

/* One token of sequences `first` to `first + batch - 1`. */
static fa3_forward_args forward_of(int kind, int64_t first, int64_t batch, uint16_t *output) {
  fa3_forward_args args = {
      .struct_size = sizeof args,
      .device = cuda,
      .query = fa3_dense(cache->query + first * row_q, FA3_BFLOAT16, batch, 1, HEADS_Q, head_dim),
      .key = fa3_dense(cache->key, FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS_K, head_dim),
      .value = fa3_dense(cache->value, FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS_K, head_dim),
      .output = fa3_dense(output + first * row_q, FA3_BFLOAT16, batch, 1, HEADS_Q, head_dim),
      .page_table = table(cache->page_table + first * COLUMNS, batch),
      .seqused_k = fa3_vector(cache->used + first, FA3_INT32, batch),
      .workspace = cache->workspace,
      .workspace_size = sizeof cache->workspace};
  if (kind == BFLOAT) return args;
  args.key = fa3_dense(cache->key_codes, FA3_FLOAT8_E4M3, PAGES, PAGE_SIZE, HEADS_K, head_dim);
  args.value = args.key;
  args.value.data = cache->value_codes;
  args.key_scale = scales_of(cache->key_scale, kind);
  args.value_scale = scales_of(cache->value_scale, kind);
  args.key_scale_rows = args.value_scale_rows = kind == ROW_SCALES;
  return args;
}

/* Several queries of each of the first sequences. */
static fa3_forward_args queries_of(int kind, int64_t batch, int64_t queries, uint16_t *output) {
  fa3_forward_args args = forward_of(kind, 0, batch, output);
  args.query = fa3_dense(cache->query, FA3_BFLOAT16, batch, queries, HEADS_Q, head_dim);
  args.output = fa3_dense(output, FA3_BFLOAT16, batch, queries, HEADS_Q, head_dim);
  return args;
}

static void replay(int kind, int64_t batch, int64_t queries) {
  const int replays = (gpu_trials(10000) + 2) / 3; /* and as many twice more */
  const int64_t elements = batch * queries * row_q;
  struct rng rng = rng_for((uint64_t)(kind + queries));
  gpu_stream stream;
  gpu_graph graph;
  gpu_graph_exec exec;
  const fa3_forward_args direct = queries_of(kind, batch, queries, cache->other_output);
  fa3_forward_args captured = queries_of(kind, batch, queries, cache->output);
  GPU(cuStreamCreate, &stream, 1);
  captured.stream = stream;
  GPU(cuStreamBeginCapture, stream, 1);
  if (fa3_forward(&captured)) fail_msg("%s", fa3_last_error());
  GPU(cuStreamEndCapture, stream, &graph);
  GPU(cuGraphInstantiateWithFlags, &exec, graph, 0);
  for (int replay = 0; replay < replays; replay++) {
    new_lengths(&rng);
    memset(cache->output, 0xff, sizeof cache->output);
    memset(cache->other_output, 0xff, sizeof cache->other_output);
    GPU(cuGraphLaunch, exec, stream);
    GPU(cuStreamSynchronize, stream);
    if (fa3_forward(&direct)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    if (memcmp(cache->output, cache->other_output, (size_t)elements * sizeof *cache->output) != 0)
      fail_msg("replay %d differs from a call of its own", replay);
    for (int64_t i = 0; i < elements; i++)
      if (!(fabs(number(cache->output[i])) < 8)) fail_msg("element %d is not written", (int)i);
  }
  GPU(cuGraphExecDestroy, exec);
  GPU(cuGraphDestroy, graph);
  GPU(cuStreamDestroy, stream);
}

static void test_lengths_change_between_replays(void **state) {
  (void)state;
  replay(BFLOAT, BATCH, 1);
  replay(ROW_SCALES, BATCH, 1);
  replay(ROW_SCALES, 32, 8); /* whose keys are dealt out */
}

static void compare_batches(int kind) {
  struct rng rng = rng_for(10 + (uint64_t)kind);
  new_lengths(&rng);
  fa3_forward_args all = forward_of(kind, 0, BATCH, cache->other_output);
  all.split_keys = 128;
  if (fa3_forward(&all)) fail_msg("%s", fa3_last_error());
  const int trials = gpu_trials(BATCH);
  for (int64_t batch = 1; batch <= BATCH && batch <= trials; batch++) {
    const int64_t first = rng_between(&rng, 0, BATCH - batch);
    fa3_forward_args part = forward_of(kind, first, batch, cache->output);
    part.split_keys = 128;
    memset(cache->output, 0xff, sizeof cache->output);
    if (fa3_forward(&part)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    if (memcmp(cache->output + first * row_q, cache->other_output + first * row_q,
               (size_t)(batch * row_q) * sizeof *cache->output) != 0)
      fail_msg("%d sequences from %d on differ", (int)batch, (int)first);
  }
}

/* Nor does another sequence's having more queries, for which blocks have more rows. */
static void compare_longer(int kind) {
  enum { LONGER = 3, SEQUENCES = BATCH - LONGER + 1 };
  struct rng rng = rng_for(20 + (uint64_t)kind);
  new_lengths(&rng);
  fa3_forward_args all = forward_of(kind, 0, BATCH, cache->other_output);
  fa3_forward_args longer = forward_of(kind, 0, SEQUENCES, cache->output);
  all.split_keys = longer.split_keys = 128;
  for (int b = 0; b < SEQUENCES; b++) cache->starts[b] = b;
  cache->starts[SEQUENCES] = BATCH;
  longer.query = fa3_packed(cache->query, FA3_BFLOAT16, BATCH, HEADS_Q, head_dim);
  longer.output = fa3_packed(cache->output, FA3_BFLOAT16, BATCH, HEADS_Q, head_dim);
  longer.cu_seqlens_q = fa3_vector(cache->starts, FA3_INT32, SEQUENCES + 1);
  longer.max_seqlen_q = LONGER;
  memset(cache->output, 0xff, sizeof cache->output);
  if (fa3_forward(&all) || fa3_forward(&longer)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  assert_memory_equal(cache->output, cache->other_output,
                      (size_t)(SEQUENCES - 1) * (size_t)row_q * sizeof *cache->output);
}

static void test_the_batch_changes_no_bit(void **state) {
  (void)state;
  for (int kind = 0; kind < KINDS; kind++) {
    compare_batches(kind);
    compare_longer(kind);
  }
}

/* The greatest value of such a cache. */
static double largest_value(int kind) {
  double largest = 0;
  for (int i = 0; i < ROWS * row_k; i++) {
    const int row = i / head_dim, head = row % HEADS_K, page = row / (HEADS_K * PAGE_SIZE);
    const int scale = kind == ROW_SCALES ? row : kind == PAGE_SCALES ? page * HEADS_K + head : head;
    const double x = kind == BFLOAT ? number(cache->value[i])
                                    : (double)float_from_e4m3(cache->value_codes[i]) *
                                          (double)cache->value_scale[scale];
    largest = fmax(largest, fabs(x));
  }
  return largest;
}

/* The same call on the GPU and on the CPU. Each engine may round a probability by 2^-9 (times a
 * value of at most `largest`), and an output; and the sum of probabilities, for lse. */
static void compare_rows_with_cpu(fa3_forward_args *args, double largest, int64_t rows) {
  memset(cache->output, 0xff, sizeof cache->output);
  memset(cache->lse, 0xff, sizeof cache->lse);
  if (fa3_forward(args)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  args->device = (fa3_device){FA3_CPU, 0};
  args->output.data = cache->other_output;
  if (args->lse.data) args->lse.data = cache->other_lse;
  if (fa3_forward(args)) fail_msg("%s", fa3_last_error());
  for (int64_t i = 0; i < rows * row_q; i++) {
    const double got = number(cache->output[i]), expected = number(cache->other_output[i]);
    if (!(fabs(got - expected) <= 0x1p-8 * (largest + fabs(expected))))
      fail_msg("output %" PRId64 " is %g: expected %g", i, got, expected);
  }
  for (int64_t i = 0; args->lse.data && i < rows * HEADS_Q; i++) {
    const double got = (double)cache->lse[i], expected = (double)cache->other_lse[i];
    if (got != expected && !(fabs(got - expected) <= 0x1p-8 + 0x1p-20 * fabs(expected)))
      fail_msg("lse %" PRId64 " is %g: expected %g", i, got, expected);
  }
}

static void compare_with_cpu(fa3_forward_args *args, double largest) {
  compare_rows_with_cpu(args, largest, BATCH);
}

/* Tokens, parts of prompts and a sequence without queries in one packed batch. */
static void test_mixed_batch(void **state) {
  (void)state;
  static const int queries[] = {1, 37, 0, 2, 1, 4, 5, 14}; /* a group of 4 has 16 rows in 4 */
  enum { SEQUENCES = sizeof queries / sizeof *queries };
  struct rng rng = rng_for(6);
  double largest[KINDS];
  for (int kind = 0; kind < KINDS; kind++) largest[kind] = largest_value(kind);
  const int trials = gpu_trials(20);
  for (int trial = 0; trial < trials; trial++) {
    const int kind = trial % KINDS;
    new_lengths(&rng);
    cache->starts[0] = 0;
    for (int b = 0; b < SEQUENCES; b++) cache->starts[b + 1] = cache->starts[b] + queries[b];
    assert_int_equal(cache->starts[SEQUENCES], BATCH);
    fa3_forward_args args = forward_of(kind, 0, SEQUENCES, cache->output);
    args.query = fa3_packed(cache->query, FA3_BFLOAT16, BATCH, HEADS_Q, head_dim);
    args.output = fa3_packed(cache->output, FA3_BFLOAT16, BATCH, HEADS_Q, head_dim);
    args.cu_seqlens_q = fa3_vector(cache->starts, FA3_INT32, SEQUENCES + 1);
    args.max_seqlen_q = 37;
    args.flags = FA3_CAUSAL;
    compare_with_cpu(&args, largest[kind]);
  }
}

/* So many packed queries, at least one of each sequence. */
static void pack_queries(fa3_forward_args *args, int64_t batch, int64_t total, struct rng *rng) {
  int64_t most = 0;
  cache->starts[0] = 0;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t left = total - cache->starts[b] - (batch - b - 1);
    const int64_t queries = b + 1 < batch ? rng_between(rng, 1, left) : left;
    cache->starts[b + 1] = cache->starts[b] + (int32_t)queries;
    if (queries > most) most = queries;
  }
  args->query = fa3_packed(cache->query, FA3_BFLOAT16, total, HEADS_Q, head_dim);
  args->output = fa3_packed(cache->output, FA3_BFLOAT16, total, HEADS_Q, head_dim);
  args->lse = make_matrix(cache->lse, FA3_FLOAT32, HEADS_Q, total);
  args->cu_seqlens_q = fa3_vector(cache->starts, FA3_INT32, batch + 1);
  args->max_seqlen_q = most;
}

/* Parts of prompts, whose keys may be split or, from about 10 sequences on, dealt out; some see no
 * key. The first trial's are. */
static void test_chunks(void **state) {
  (void)state;
  struct rng rng = rng_for(8);
  double largest[KINDS];
  for (int kind = 0; kind < KINDS; kind++) largest[kind] = largest_value(kind);
  const int trials = gpu_trials(100);
  for (int trial = 0; trial < trials; trial++)
    for (int codes = 0; codes < 2; codes++) {
      const int64_t batch = trial == 0 ? 12 : rng_between(&rng, 1, 16), queries = BATCH / batch;
      const int kind = codes ? (int)rng_between(&rng, PAGE_SCALES, ROW_SCALES) : BFLOAT;
      new_lengths(&rng);
      fa3_forward_args args = queries_of(kind, batch, queries, cache->output);
      args.lse = fa3_lse(cache->lse, batch, HEADS_Q, queries);
      const bool packed = rng_chance(&rng, 0.4);
      if (packed) pack_queries(&args, batch, BATCH, &rng);
      if (rng_chance(&rng, 0.5)) args.flags = FA3_CAUSAL;
      if (rng_chance(&rng, 0.2)) {
        args.flags |= FA3_WINDOW;
        args.window_left = rng_between(&rng, 0, 1500);
        args.window_right = rng_between(&rng, 0, 10);
      }
      if (rng_chance(&rng, 0.3)) args.sink = fa3_vector(cache->sink, FA3_FLOAT32, HEADS_Q);
      compare_rows_with_cpu(&args, largest[kind], packed ? BATCH : batch * queries);
    }
}

/* Sequences of one length that the host knows: of codes, blocks of eight warps that have a
 * multiprocessor each, with 8 rows, with 16, and with two heads (tests/cuda_plan_decode.c). */
static void test_lone_blocks(void **state) {
  (void)state;
  static const struct { int64_t batch, queries; } cases[] = {{32, 1}, {32, 4}, {64, 1}, {32, 3}};
  enum { CASES = sizeof cases / sizeof *cases };
  struct rng rng = rng_for(9);
  double largest[KINDS];
  for (int kind = 0; kind < KINDS; kind++) largest[kind] = largest_value(kind);
  const int trials = gpu_trials(CASES * KINDS);
  for (int trial = 0; trial < trials; trial++) {
    const int64_t batch = cases[trial % CASES].batch, queries = cases[trial % CASES].queries;
    const int kind = trial / CASES % KINDS;
    new_lengths(&rng);
    fa3_forward_args args = queries_of(kind, batch, queries, cache->output);
    args.lse = fa3_lse(cache->lse, batch, HEADS_Q, queries);
    args.seqused_k = (fa3_tensor){0};
    args.flags = FA3_CAUSAL;
    compare_rows_with_cpu(&args, largest[kind], batch * queries);
  }
}

/* Codes under more queries than a block of decode_fp8 has rows for: chunk_fp8, up to 64 rows by
 * both consumers in turns, in several splits; of many sequences speculative_fp8, to whose blocks
 * keys are dealt out where the host does not know the lengths (tests/cuda_plan_decode.c). */
static void test_small_chunks(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries;
  } cases[] = {{32, 8}, {4, 8}, {16, 8}, {21, 6}, {4, 12}, {10, 12}, {7, 18}, {51, 5}, {36, 7}};
  /* The first is all that a few trials under racecheck come to: keys dealt out. */
  enum { CASES = sizeof cases / sizeof *cases };
  struct rng rng = rng_for(10);
  const int trials = gpu_trials(6 * CASES);
  for (int trial = 0; trial < trials; trial++) {
    const int64_t batch = cases[trial % CASES].batch, queries = cases[trial % CASES].queries;
    const int kind = PAGE_SCALES + trial / CASES % (KINDS - PAGE_SCALES);
    new_lengths(&rng);
    fa3_forward_args args = queries_of(kind, batch, queries, cache->output);
    args.lse = fa3_lse(cache->lse, batch, HEADS_Q, queries);
    if (rng_chance(&rng, 0.5)) args.sink = fa3_vector(cache->sink, FA3_FLOAT32, HEADS_Q);
    if (trial < trials / 2) args.seqused_k = (fa3_tensor){0};
    args.flags = FA3_CAUSAL;
    if (rng_chance(&rng, 0.2)) args.softcap = 5;
    if (rng_chance(&rng, 0.2)) {
      args.flags |= FA3_WINDOW;
      args.window_left = rng_between(&rng, 0, 3000);
    }
    compare_rows_with_cpu(&args, largest_value(kind), batch * queries);
  }
}

/* Every row of the last call's first output that reads a key head is NaN, or none is. */
static void expect_nan(int64_t rows, int head_k, bool nan) {
  for (int64_t i = 0; i < rows * row_q; i++)
    if (i / head_dim % HEADS_Q / (HEADS_Q / HEADS_K) == head_k &&
        isnan(number(cache->output[i])) != nan)
      fail_msg("output %" PRId64 " is %g", i, number(cache->output[i]));
}

/* Codes under so many queries that they are unpacked ahead: of whole sequences, beside others with
 * few queries, with lengths that only the device knows, a window; scales of 0, and of rows that are
 * far from others', too. */
static void test_unpacked(void **state) {
  (void)state;
  static const struct {
    int64_t batch, queries; /* 0: they are packed */
  } cases[] = {{1, 1024}, {2, 512}, {3, 340}, {4, 0}, {9, 0}};
  enum { CASES = sizeof cases / sizeof *cases };
  struct rng rng = rng_for(11);
  const int trials = gpu_trials(6 * CASES);
  float *const scales[] = {cache->key_scale, cache->value_scale};
  const float before[] = {scales[0][0], scales[1][0]};
  for (int trial = 0; trial < trials; trial++) {
    const int64_t batch = cases[trial % CASES].batch, queries = cases[trial % CASES].queries;
    const int64_t rows = queries ? batch * queries : MOST_QUERIES;
    const int kind = PAGE_SCALES + trial / CASES % (KINDS - PAGE_SCALES);
    new_lengths(&rng);
    for (int i = 0; i < 2; i++) scales[i][0] = rng_chance(&rng, 0.2) ? 0 : before[i];
    fa3_forward_args args = queries_of(kind, batch, queries ? queries : 1, cache->output);
    args.lse = fa3_lse(cache->lse, batch, HEADS_Q, queries);
    if (!queries) pack_queries(&args, batch, rows, &rng);
    if (rng_chance(&rng, 0.5)) args.sink = fa3_vector(cache->sink, FA3_FLOAT32, HEADS_Q);
    if (rng_chance(&rng, 0.5)) args.seqused_k = (fa3_tensor){0};
    if (rng_chance(&rng, 0.5)) args.flags = FA3_CAUSAL;
    if (rng_chance(&rng, 0.2)) {
      args.flags |= FA3_WINDOW;
      args.window_left = rng_between(&rng, 1000, 3000);
      args.window_right = rng_between(&rng, 0, 10);
    }
    compare_rows_with_cpu(&args, largest_value(kind), rows);
  }
  /* A scale of NaN or infinity reaches the rows of its head, and these alone; lse only if it is a
   * key's. */
  for (int n = 0; n < 4; n++) {
    const int i = n % 2;
    fa3_forward_args args = queries_of(HEAD_SCALES, 1, MOST_QUERIES, cache->output);
    args.lse = fa3_lse(cache->lse, 1, HEADS_Q, MOST_QUERIES);
    args.seqused_k = (fa3_tensor){0};
    scales[i][0] = n < 2 ? NAN : INFINITY;
    if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    expect_nan(MOST_QUERIES, 0, true);
    expect_nan(MOST_QUERIES, 1, false);
    for (int j = 0; j < HEADS_Q * MOST_QUERIES; j++)
      assert_int_equal(isnan(cache->lse[j]) != 0, i == 0 && j / MOST_QUERIES < HEADS_Q / HEADS_K);
    scales[i][0] = before[i];
  }
}

/* Queries that are codes themselves: a token, a few, a part of a prompt; in pages. */
static void test_queries_of_codes(void **state) {
  (void)state;
  struct rng rng = rng_for(7);
  const double largest = largest_value(ROW_SCALES);
  const int trials = gpu_trials(20);
  for (int trial = 0; trial < trials; trial++) {
    const int64_t queries = INT64_C(1) << trial % 5, batch = BATCH / queries;
    new_lengths(&rng);
    fa3_forward_args args = forward_of(ROW_SCALES, 0, batch, cache->output);
    args.query = fa3_dense(cache->query_codes, FA3_FLOAT8_E4M3, batch, queries, HEADS_Q, head_dim);
    args.output = fa3_dense(cache->output, FA3_BFLOAT16, batch, queries, HEADS_Q, head_dim);
    args.query_scale = make_matrix(cache->query_scale, FA3_FLOAT32, batch, HEADS_Q);
    args.flags = FA3_CAUSAL;
    compare_with_cpu(&args, largest);
  }
}

static void test_combine(void **state) {
  (void)state;
  struct rng rng = rng_for(4);
  enum { SETS = 4 };
  for (int i = 0; i < SETS * BATCH * row_q; i++) cache->partial[i] = (float)rng_normal(&rng);
  for (int i = 0; i < SETS * BATCH * HEADS_Q; i++)
    cache->partial_lse[i] = rng_chance(&rng, 0.4) ? -INFINITY : (float)(3 * rng_normal(&rng));
  for (int i = 0; i < SETS * BATCH * row_q; i++) /* what has seen no key is not read */
    if (cache->partial_lse[i / head_dim] == -INFINITY) cache->partial[i] = NAN;
  fa3_combine_args args = {
      .struct_size = sizeof args,
      .device = cuda,
      .partial_output =
          fa3_dense(cache->partial, FA3_FLOAT32, (int64_t)SETS * BATCH, 1, HEADS_Q, head_dim),
      .partial_lse = fa3_lse(cache->partial_lse, (int64_t)SETS * BATCH, HEADS_Q, 1),
      .output = fa3_dense(cache->output, FA3_BFLOAT16, BATCH, 1, HEADS_Q, head_dim),
      .lse = fa3_lse(cache->lse, BATCH, HEADS_Q, 1)};
  if (fa3_combine(&args)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  args.device = (fa3_device){FA3_CPU, 0};
  args.output.data = cache->other_output;
  args.lse.data = cache->other_lse;
  if (fa3_combine(&args)) fail_msg("%s", fa3_last_error());
  for (int i = 0; i < BATCH * row_q; i++) {
    const double got = number(cache->output[i]), expected = number(cache->other_output[i]);
    if (!(fabs(got - expected) <= 0x1p-7 * fabs(expected) + 0x1p-16))
      fail_msg("output %d is %g: expected %g", i, got, expected);
  }
  for (int i = 0; i < BATCH * HEADS_Q; i++)
    if (cache->lse[i] != cache->other_lse[i] &&
        !(fabs((double)cache->lse[i] - (double)cache->other_lse[i]) <= 1e-5))
      fail_msg("lse %d is %g: expected %g", i, (double)cache->lse[i], (double)cache->other_lse[i]);

  /* No set at all: zeros, in rows that a thread has four columns of, and in others. */
  args.device = cuda;
  args.lse.data = cache->lse;
  args.partial_output.shape[0] = args.partial_lse.shape[0] = 0;
  for (int float32 = 0; float32 < 2; float32++) {
    args.output = float32 ? fa3_dense(cache->partial, FA3_FLOAT32, BATCH, 1, HEADS_Q, head_dim)
                          : fa3_dense(cache->output, FA3_BFLOAT16, BATCH, 1, HEADS_Q, head_dim);
    memset(args.output.data, 0xff, (size_t)(BATCH * row_q) * (float32 ? 4 : 2));
    memset(cache->lse, 0xff, sizeof cache->lse);
    if (fa3_combine(&args)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    for (int i = 0; i < BATCH * row_q; i++)
      assert_true(float32 ? cache->partial[i] == 0 : number(cache->output[i]) == 0);
    for (int i = 0; i < BATCH * HEADS_Q; i++) assert_true(cache->lse[i] == -INFINITY);
  }
}

int main(int argc, char **argv) {
  const long only = argc > 1 ? strtol(argv[1], NULL, 10) : 0;
  if (!gpu_open()) return TEST_SKIPPED;
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_lengths_change_between_replays),
      cmocka_unit_test(test_the_batch_changes_no_bit),
      cmocka_unit_test(test_mixed_batch),
      cmocka_unit_test(test_queries_of_codes),
      cmocka_unit_test(test_chunks),
      cmocka_unit_test(test_small_chunks),
      cmocka_unit_test(test_unpacked),
      cmocka_unit_test(test_lone_blocks),
      cmocka_unit_test(test_combine),
  };
  size_t passed = 0;
  for (head_dim = 64; head_dim <= MOST_DIM; head_dim *= 2) {
    if (only && only != head_dim) continue;
    row_k = HEADS_K * head_dim;
    row_q = HEADS_Q * head_dim;
    const int result = cmocka_run_group_tests(tests, open_cache, close_cache);
    if (result != 0) return result;
    passed += sizeof tests / sizeof *tests;
  }
  printf("passed: %zu tests\n", passed);
  return passed == 0;
}
