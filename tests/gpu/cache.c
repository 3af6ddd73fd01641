/* A cache on a GPU: appends and combinations against the CPU's, lengths that change between the
 * replays of a graph, and results that do not depend on the batch. Everything is in page-locked
 * memory, which both engines take. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "gpu.h"
#include "rng.h"
#include "test.h"

enum {
  BATCH = 64,
  HEADS_Q = 8,
  HEADS_K = 2,
  HEAD_DIM = 64,
  PAGE_SIZE = 16,
  COLUMNS = 40,
  PAGES = 1200,
  ROWS = PAGES * PAGE_SIZE,
  LONGEST = PAGE_SIZE * COLUMNS,
  NEW = 5,
  ROW_K = HEADS_K * HEAD_DIM,
  ROW_Q = HEADS_Q * HEAD_DIM
};

static const fa3_device cuda = {FA3_CUDA, 0};

struct cache {
  uint16_t key[ROWS * ROW_K], value[ROWS * ROW_K];
  uint16_t other_key[ROWS * ROW_K], other_value[ROWS * ROW_K];
  uint16_t query[BATCH * ROW_Q], output[BATCH * ROW_Q], other_output[BATCH * ROW_Q];
  uint16_t new_key[BATCH * NEW * ROW_K], new_value[BATCH * NEW * ROW_K];
  float cos[LONGEST * HEAD_DIM / 2], sin[LONGEST * HEAD_DIM / 2];
  float partial[4 * BATCH * ROW_Q], partial_lse[4 * BATCH * HEADS_Q];
  float lse[BATCH * HEADS_Q], other_lse[BATCH * HEADS_Q];
  int32_t page_table[BATCH * COLUMNS];
  int32_t used[BATCH];
  char workspace[8 << 20];
};

static struct cache *cache;

static uint16_t bfloat(double x) {
  const float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static double number(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float f;
  memcpy(&f, &wide, sizeof f);
  return (double)f;
}

static void fill(uint16_t *x, size_t bytes, struct rng *rng) {
  for (size_t i = 0; i < bytes / sizeof *x; i++) x[i] = bfloat(rng_normal(rng));
}

/* Every sequence has pages of its own as long as there are, then shared ones. */
static void new_lengths(struct rng *rng) {
  for (int b = 0; b < BATCH; b++) {
    const bool edge = rng_chance(rng, 0.3);
    cache->used[b] = (int32_t)(edge ? PAGE_SIZE * rng_between(rng, 0, COLUMNS - 1)
                                    : rng_between(rng, 0, LONGEST - NEW));
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
  fill(cache->query, sizeof cache->query, &rng);
  fill(cache->new_key, sizeof cache->new_key, &rng);
  fill(cache->new_value, sizeof cache->new_value, &rng);
  for (int i = 0; i < LONGEST * HEAD_DIM / 2; i++) {
    const double angle = 10 * rng_normal(&rng);
    cache->cos[i] = (float)cos(angle);
    cache->sin[i] = (float)sin(angle);
  }
  new_lengths(&rng);
  return 0;
}

static int close_cache(void **state) {
  (void)state;
  GPU(cuMemFreeHost, cache);
  return 0;
}

static fa3_tensor table(int32_t *data, int64_t rows) {
  return (fa3_tensor){.data = data,
                      .dtype = FA3_INT32,
                      .rank = 2,
                      .shape = {rows, COLUMNS},
                      .strides = {COLUMNS, 1}};
}

/* One token of sequences `first` to `first + batch - 1`. */
static fa3_forward_args forward_of(int64_t first, int64_t batch, uint16_t *output) {
  fa3_forward_args args = {
      .struct_size = sizeof args,
      .device = cuda,
      .query = fa3_dense(cache->query + first * ROW_Q, FA3_BFLOAT16, batch, 1, HEADS_Q, HEAD_DIM),
      .key = fa3_dense(cache->key, FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM),
      .value = fa3_dense(cache->value, FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM),
      .output = fa3_dense(output + first * ROW_Q, FA3_BFLOAT16, batch, 1, HEADS_Q, HEAD_DIM),
      .page_table = table(cache->page_table + first * COLUMNS, batch),
      .seqused_k = fa3_vector(cache->used + first, FA3_INT32, batch),
      .workspace = cache->workspace,
      .workspace_size = sizeof cache->workspace};
  return args;
}

static void test_lengths_change_between_replays(void **state) {
  (void)state;
  const int replays = gpu_trials(1000);
  struct rng rng = rng_for(1);
  gpu_stream stream;
  gpu_graph graph;
  gpu_graph_exec exec;
  const fa3_forward_args direct = forward_of(0, BATCH, cache->other_output);
  fa3_forward_args captured = forward_of(0, BATCH, cache->output);
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
    if (memcmp(cache->output, cache->other_output, sizeof cache->output) != 0)
      fail_msg("replay %d differs from a call of its own", replay);
    for (int i = 0; i < BATCH * ROW_Q; i++)
      if (!(fabs(number(cache->output[i])) < 8)) fail_msg("element %d is not written", i);
  }
  GPU(cuGraphExecDestroy, exec);
  GPU(cuGraphDestroy, graph);
  GPU(cuStreamDestroy, stream);
}

static void test_the_batch_changes_no_bit(void **state) {
  (void)state;
  struct rng rng = rng_for(2);
  new_lengths(&rng);
  fa3_forward_args all = forward_of(0, BATCH, cache->other_output);
  all.split_keys = 128;
  if (fa3_forward(&all)) fail_msg("%s", fa3_last_error());
  for (int64_t batch = 1; batch < BATCH; batch = batch * 3 / 2 + 1) {
    const int64_t first = rng_between(&rng, 0, BATCH - batch);
    fa3_forward_args part = forward_of(first, batch, cache->output);
    part.split_keys = 128;
    if (fa3_forward(&part)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    if (memcmp(cache->output + first * ROW_Q, cache->other_output + first * ROW_Q,
               (size_t)(batch * ROW_Q) * sizeof *cache->output) != 0)
      fail_msg("%d sequences from %d on differ", (int)batch, (int)first);
  }
}

static void test_append(void **state) {
  (void)state;
  struct rng rng = rng_for(3);
  for (int form = 0; form < 4; form++) {
    new_lengths(&rng);
    /* A page that two sequences write has no one result. */
    for (int i = 0; i < BATCH * COLUMNS; i++) cache->page_table[i] = i % PAGES;
    const int64_t batch = PAGES / COLUMNS;
    memcpy(cache->other_key, cache->key, sizeof cache->key);
    memcpy(cache->other_value, cache->value, sizeof cache->value);
    fa3_append_args args = {
        .struct_size = sizeof args,
        .device = cuda,
        .new_key = fa3_dense(cache->new_key, FA3_BFLOAT16, batch, NEW, HEADS_K, HEAD_DIM),
        .new_value = fa3_dense(cache->new_value, FA3_BFLOAT16, batch, NEW, HEADS_K, HEAD_DIM),
        .key = fa3_dense(cache->key, FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM),
        .value = fa3_dense(cache->value, FA3_BFLOAT16, PAGES, PAGE_SIZE, HEADS_K, HEAD_DIM),
        .seqused_k = fa3_vector(cache->used, FA3_INT32, batch),
        .page_table = table(cache->page_table, batch),
        .flags = form & 1 ? FA3_ROTARY_INTERLEAVED : 0};
    args.rotary_cos = (fa3_tensor){.data = cache->cos,
                                   .dtype = FA3_FLOAT32,
                                   .rank = 2,
                                   .shape = {LONGEST, form & 2 ? HEAD_DIM / 2 : 12},
                                   .strides = {HEAD_DIM / 2, 1}};
    args.rotary_sin = args.rotary_cos;
    args.rotary_sin.data = cache->sin;
    if (fa3_append(&args)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    args.device = (fa3_device){FA3_CPU, 0};
    args.key.data = cache->other_key;
    args.value.data = cache->other_value;
    if (fa3_append(&args)) fail_msg("%s", fa3_last_error());
    assert_memory_equal(cache->value, cache->other_value, sizeof cache->value);
    for (int i = 0; i < ROWS * ROW_K; i++) {
      const double got = number(cache->key[i]), expected = number(cache->other_key[i]);
      /* Both round once; sums in float32 may differ in their last bits before that. */
      if (!(fabs(got - expected) <= 0x1p-7 * fabs(expected) + 0x1p-20))
        fail_msg("key %d is %g: expected %g", i, got, expected);
    }
  }
}

static void test_combine(void **state) {
  (void)state;
  struct rng rng = rng_for(4);
  enum { SETS = 4 };
  for (int i = 0; i < SETS * BATCH * ROW_Q; i++) cache->partial[i] = (float)rng_normal(&rng);
  for (int i = 0; i < SETS * BATCH * HEADS_Q; i++)
    cache->partial_lse[i] = rng_chance(&rng, 0.4) ? -INFINITY : (float)(3 * rng_normal(&rng));
  for (int i = 0; i < SETS * BATCH * ROW_Q; i++) /* what has seen no key is not read */
    if (cache->partial_lse[i / HEAD_DIM] == -INFINITY) cache->partial[i] = NAN;
  fa3_combine_args args = {
      .struct_size = sizeof args,
      .device = cuda,
      .partial_output =
          fa3_dense(cache->partial, FA3_FLOAT32, (int64_t)SETS * BATCH, 1, HEADS_Q, HEAD_DIM),
      .partial_lse = fa3_lse(cache->partial_lse, (int64_t)SETS * BATCH, HEADS_Q, 1),
      .output = fa3_dense(cache->output, FA3_BFLOAT16, BATCH, 1, HEADS_Q, HEAD_DIM),
      .lse = fa3_lse(cache->lse, BATCH, HEADS_Q, 1)};
  if (fa3_combine(&args)) fail_msg("%s", fa3_last_error());
  GPU(cuCtxSynchronize, );
  args.device = (fa3_device){FA3_CPU, 0};
  args.output.data = cache->other_output;
  args.lse.data = cache->other_lse;
  if (fa3_combine(&args)) fail_msg("%s", fa3_last_error());
  for (int i = 0; i < BATCH * ROW_Q; i++) {
    const double got = number(cache->output[i]), expected = number(cache->other_output[i]);
    if (!(fabs(got - expected) <= 0x1p-7 * fabs(expected) + 0x1p-16))
      fail_msg("output %d is %g: expected %g", i, got, expected);
  }
  for (int i = 0; i < BATCH * HEADS_Q; i++)
    if (cache->lse[i] != cache->other_lse[i] &&
        !(fabs((double)cache->lse[i] - (double)cache->other_lse[i]) <= 1e-5))
      fail_msg("lse %d is %g: expected %g", i, (double)cache->lse[i], (double)cache->other_lse[i]);
}

int main(void) {
  if (!gpu_open()) return 77;
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_lengths_change_between_replays),
      cmocka_unit_test(test_the_batch_changes_no_bit),
      cmocka_unit_test(test_append),
      cmocka_unit_test(test_combine),
  };
  const int result = cmocka_run_group_tests(tests, open_cache, close_cache);
  if (result == 0) printf("passed: %zu tests\n", sizeof tests / sizeof *tests);
  return result;
}
