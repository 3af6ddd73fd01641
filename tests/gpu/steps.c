/* Steps of generation on a GPU: fa3_append_forward on long caches in the GPU's memory, one call
 * right behind the other, queued or captured, gives the bits of fa3_append and fa3_forward one at a
 * time. Keys and values that are not there yet are NaN, and queries that are to be turned are the
 * step's before, so that what is read too early shows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "gpu.h"
#include "rng.h"
#include "test.h"

enum {
  STEPS = 6,
  TRIALS = 40,
  GLOBAL = 0, /* of captures */
  MOST_BATCH = 5,
  MOST_HEADS_K = 8,
  MOST_DIM = 128,
  MOST_ROWS = 3,
  MOST_KEYS = 20000,
  CACHE_BYTES = 16 << 20, /* of keys, and of values */
  POOL_BYTES = 4 << 20
};

struct trial {
  fa3_dtype dtype, cache_dtype;
  int64_t batch, heads_k, group, dim, rows;
  int64_t room;      /* rows of a sequence */
  int64_t page_size; /* 0: a dense cache */
  int64_t entries, entry_rows;
  int32_t used[MOST_BATCH]; /* before the first step */
  bool turned, scaled;
};

/* What the steps write, and their workspace. */
struct results {
  gpu_pointer key, value, key_scale, value_scale;
  gpu_pointer turned; /* queries, of all steps in turns */
  gpu_pointer output[STEPS];
  gpu_pointer workspace;
};

struct device {
  struct gpu_arena arena;
  gpu_stream stream;
  gpu_pointer pool; /* numbers of any kind */
  gpu_pointer page_table, cos, sin, used[STEPS + 1];
  gpu_pointer new_key[STEPS], new_value[STEPS], query[STEPS];
  struct results first, expected, found;
  size_t workspace_size;
};

static size_t row_bytes(const struct trial *t) {
  return (size_t)(t->heads_k * t->dim) * fa3_dtype_size(t->cache_dtype);
}

static size_t cache_bytes(const struct trial *t) {
  return (size_t)(t->entries * t->entry_rows) * row_bytes(t);
}

static size_t scale_bytes(const struct trial *t) {
  return t->scaled ? (size_t)(t->entries * t->entry_rows * t->heads_k) * sizeof(float) : 0;
}

static size_t query_bytes(const struct trial *t) {
  return (size_t)(t->batch * t->rows * t->heads_k * t->group * t->dim) * sizeof(uint16_t);
}

static struct trial make_trial(struct rng *rng) {
  struct trial t = {.dtype = (fa3_dtype)RNG_PICK(rng, FA3_BFLOAT16, FA3_FLOAT16),
                    .heads_k = RNG_PICK(rng, 1, 2, 8),
                    .group = RNG_PICK(rng, 1, 4, 8),
                    .dim = RNG_PICK(rng, 64, 128),
                    .rows = RNG_PICK(rng, 1, 1, 1, MOST_ROWS),
                    .page_size = RNG_PICK(rng, 0, 1, 16, 64),
                    .turned = rng_chance(rng, 0.7)};
  t.cache_dtype = rng_chance(rng, 0.4) ? FA3_FLOAT8_E4M3 : t.dtype;
  t.scaled = t.cache_dtype != t.dtype && rng_chance(rng, 0.7);
  t.batch = rng_between(rng, 1, MOST_BATCH);
  const int64_t most = CACHE_BYTES / (t.batch * (int64_t)row_bytes(&t)) - 64;
  t.room = rng_between(rng, 600, most < MOST_KEYS ? most : MOST_KEYS);
  t.entries = t.batch;
  t.entry_rows = t.room;
  if (t.page_size) {
    t.entry_rows = t.page_size;
    t.entries = t.batch * ((t.room + t.page_size - 1) / t.page_size);
  }
  for (int64_t b = 0; b < t.batch; b++) {
    const int64_t last = t.room - STEPS * t.rows;
    t.used[b] = (int32_t)(rng_chance(rng, 0.5) ? last : rng_between(rng, 0, last));
  }
  return t;
}

static void upload(struct device *d, gpu_pointer to, const void *from, size_t bytes) {
  GPU(cuMemcpyHtoDAsync, to, from, bytes, d->stream);
  GPU(cuStreamSynchronize, d->stream);
}

static gpu_pointer take_numbers(struct device *d, size_t bytes, struct rng *rng) {
  const gpu_pointer to = gpu_arena_take(&d->arena, bytes);
  for (size_t at = 0; at < bytes;) {
    const size_t start = (size_t)rng_between(rng, 0, POOL_BYTES / 2) / 64 * 64;
    const size_t piece = bytes - at < POOL_BYTES / 2 ? bytes - at : POOL_BYTES / 2;
    GPU(cuMemcpyDtoDAsync, to + at, d->pool + start, piece, d->stream);
    at += piece;
  }
  return to;
}

/* What is behind each sequence becomes NaN. Its pages are neighbours, from the last to the first.
 */
static void spoil(struct device *d, const struct trial *t, gpu_pointer cache, size_t bytes) {
  const int64_t each = t->entries / t->batch;
  for (int64_t b = 0; b < t->batch; b++) {
    const int64_t page = t->used[b] / t->entry_rows, row = t->used[b] % t->entry_rows;
    const gpu_pointer of_sequence = cache + (gpu_pointer)(b * each * t->entry_rows) * bytes;
    const int64_t behind = (each - 1 - page) * t->entry_rows; /* of later pages */
    GPU(cuMemsetD8Async, of_sequence, 0xff, (size_t)behind * bytes, d->stream);
    GPU(cuMemsetD8Async, of_sequence + (gpu_pointer)(behind + row) * bytes, 0xff,
        (size_t)(t->entry_rows - row) * bytes, d->stream);
  }
}

static struct results take_results(struct device *d, const struct trial *t) {
  struct results r = {.key = gpu_arena_take(&d->arena, cache_bytes(t)),
                      .value = gpu_arena_take(&d->arena, cache_bytes(t)),
                      .key_scale = gpu_arena_take(&d->arena, scale_bytes(t)),
                      .value_scale = gpu_arena_take(&d->arena, scale_bytes(t)),
                      .turned = gpu_arena_take(&d->arena, query_bytes(t))};
  for (int s = 0; s < STEPS; s++) r.output[s] = gpu_arena_take(&d->arena, query_bytes(t));
  return r;
}

/* The cache before the first step. */
static void restore(struct device *d, const struct trial *t, const struct results *to) {
  const struct results *from = &d->first;
  GPU(cuMemcpyDtoDAsync, to->key, from->key, cache_bytes(t), d->stream);
  GPU(cuMemcpyDtoDAsync, to->value, from->value, cache_bytes(t), d->stream);
  if (t->scaled) {
    GPU(cuMemcpyDtoDAsync, to->key_scale, from->key_scale, scale_bytes(t), d->stream);
    GPU(cuMemcpyDtoDAsync, to->value_scale, from->value_scale, scale_bytes(t), d->stream);
  }
  GPU(cuMemsetD8Async, to->turned, 0xff, query_bytes(t), d->stream);
  for (int s = 0; s < STEPS; s++)
    GPU(cuMemsetD8Async, to->output[s], 0xff, query_bytes(t), d->stream);
}

static void set_up(struct device *d, const struct trial *t, struct rng *rng) {
  static int32_t pages[MOST_BATCH * (MOST_KEYS + 64)];
  d->arena.used = POOL_BYTES;
  const int64_t each = t->entries / t->batch;
  for (int64_t b = 0; b < t->batch; b++)
    for (int64_t i = 0; i < each; i++) pages[b * each + i] = (int32_t)(b * each + (each - 1 - i));
  d->page_table = gpu_arena_take(&d->arena, (size_t)t->entries * sizeof *pages);
  upload(d, d->page_table, pages, (size_t)t->entries * sizeof *pages);
  d->cos = take_numbers(d, (size_t)(t->room * t->dim / 2) * sizeof(uint16_t), rng);
  d->sin = take_numbers(d, (size_t)(t->room * t->dim / 2) * sizeof(uint16_t), rng);
  for (int s = 0; s <= STEPS; s++) {
    int32_t used[MOST_BATCH];
    for (int64_t b = 0; b < t->batch; b++) used[b] = t->used[b] + (int32_t)(s * t->rows);
    d->used[s] = gpu_arena_take(&d->arena, sizeof used);
    upload(d, d->used[s], used, sizeof used);
  }
  const size_t new_bytes = query_bytes(t) / (size_t)t->group;
  for (int s = 0; s < STEPS; s++) {
    d->new_key[s] = take_numbers(d, new_bytes, rng);
    d->new_value[s] = take_numbers(d, new_bytes, rng);
    d->query[s] = take_numbers(d, query_bytes(t), rng);
  }
  d->first = (struct results){.key = take_numbers(d, cache_bytes(t), rng),
                              .value = take_numbers(d, cache_bytes(t), rng),
                              .key_scale = gpu_arena_take(&d->arena, scale_bytes(t)),
                              .value_scale = gpu_arena_take(&d->arena, scale_bytes(t))};
  GPU(cuMemsetD8Async, d->first.key_scale, 0x3e, scale_bytes(t), d->stream); /* about 0.19 */
  GPU(cuMemsetD8Async, d->first.value_scale, 0x3e, scale_bytes(t), d->stream);
  spoil(d, t, d->first.key, row_bytes(t));
  spoil(d, t, d->first.value, row_bytes(t));
  d->expected = take_results(d, t);
  d->found = take_results(d, t);
}

/* Of each row of each head. */
static fa3_tensor scales_of(const struct trial *t, gpu_pointer data) {
  fa3_tensor scale = {.data = (void *)data, .dtype = FA3_FLOAT32, .rank = 3};
  const int64_t shape[] = {t->entries, t->heads_k, t->entry_rows};
  for (int i = 0; i < 3; i++) scale.shape[i] = shape[i];
  scale.strides[0] = shape[1] * shape[2];
  scale.strides[1] = shape[2];
  scale.strides[2] = 1;
  return scale;
}

static fa3_append_args append_of(const struct device *d, const struct trial *t,
                                 const struct results *r, int s) {
  const int64_t heads_q = t->heads_k * t->group;
  fa3_append_args args = {
      .struct_size = sizeof args,
      .device = {FA3_CUDA, 0},
      .stream = d->stream,
      .new_key = fa3_dense((void *)d->new_key[s], t->dtype, t->batch, t->rows, t->heads_k, t->dim),
      .new_value =
          fa3_dense((void *)d->new_value[s], t->dtype, t->batch, t->rows, t->heads_k, t->dim),
      .key =
          fa3_dense((void *)r->key, t->cache_dtype, t->entries, t->entry_rows, t->heads_k, t->dim),
      .value = fa3_dense((void *)r->value, t->cache_dtype, t->entries, t->entry_rows, t->heads_k,
                         t->dim),
      .seqused_k = fa3_vector((void *)d->used[s], FA3_INT32, t->batch)};
  if (t->page_size) {
    args.page_table = fa3_vector((void *)d->page_table, FA3_INT32, t->entries / t->batch);
    args.page_table.rank = 2;
    args.page_table.shape[1] = args.page_table.strides[0] = args.page_table.shape[0];
    args.page_table.shape[0] = t->batch;
    args.page_table.strides[1] = 1;
  }
  if (t->turned) {
    args.query = fa3_dense((void *)d->query[s], t->dtype, t->batch, t->rows, heads_q, t->dim);
    args.rotated_query = args.query;
    args.rotated_query.data = (void *)r->turned;
    args.rotary_cos = fa3_vector((void *)d->cos, t->dtype, t->dim / 2);
    args.rotary_cos.rank = 2;
    args.rotary_cos.shape[0] = t->room;
    args.rotary_cos.shape[1] = args.rotary_cos.strides[0] = t->dim / 2;
    args.rotary_cos.strides[1] = 1;
    args.rotary_sin = args.rotary_cos;
    args.rotary_sin.data = (void *)d->sin;
  }
  if (t->scaled) {
    args.key_scale = scales_of(t, r->key_scale);
    args.value_scale = scales_of(t, r->value_scale);
    args.key_scale_rows = args.value_scale_rows = 1;
  }
  return args;
}

static fa3_forward_args attention_behind(struct device *d, const struct trial *t,
                                         const struct results *r, int s,
                                         const fa3_append_args *append) {
  fa3_forward_args args = {.struct_size = sizeof args,
                           .device = append->device,
                           .stream = append->stream,
                           .key = append->key,
                           .value = append->value,
                           .key_scale = append->key_scale,
                           .value_scale = append->value_scale,
                           .key_scale_rows = append->key_scale_rows,
                           .value_scale_rows = append->value_scale_rows,
                           .page_table = append->page_table,
                           .seqused_k = fa3_vector((void *)d->used[s + 1], FA3_INT32, t->batch),
                           .flags = FA3_CAUSAL,
                           .workspace = (void *)r->workspace,
                           .workspace_size = d->workspace_size};
  args.query = fa3_dense(t->turned ? (void *)r->turned : (void *)d->query[s], t->dtype, t->batch,
                         t->rows, t->heads_k * t->group, t->dim);
  args.output = args.query;
  args.output.data = (void *)r->output[s];
  return args;
}

/* All steps, queued. */
static void run_steps(struct device *d, const struct trial *t, struct results *r, bool in_one) {
  for (int s = 0; s < STEPS; s++) {
    const fa3_append_args append = append_of(d, t, r, s);
    fa3_forward_args forward = attention_behind(d, t, r, s, &append);
    if (!r->workspace) {
      if (fa3_forward_workspace(&forward, &d->workspace_size)) fail_msg("%s", fa3_last_error());
      r->workspace = gpu_arena_take(&d->arena, d->workspace_size + 1);
      forward = attention_behind(d, t, r, s, &append);
    }
    if (in_one) {
      if (fa3_append_forward(&append, &forward)) fail_msg("%s", fa3_last_error());
      continue;
    }
    if (fa3_append(&append)) fail_msg("fa3_append: %s", fa3_last_error());
    GPU(cuStreamSynchronize, d->stream);
    if (fa3_forward(&forward)) fail_msg("fa3_forward: %s", fa3_last_error());
    GPU(cuStreamSynchronize, d->stream);
  }
}

static void compare(struct device *d, int trial, const char *how, const char *what, gpu_pointer x,
                    gpu_pointer y, size_t bytes) {
  static char found[CACHE_BYTES + 4096], expected[CACHE_BYTES + 4096];
  if (bytes == 0) return;
  assert_true(bytes <= sizeof found);
  GPU(cuMemcpyDtoHAsync, found, x, bytes, d->stream);
  GPU(cuMemcpyDtoHAsync, expected, y, bytes, d->stream);
  GPU(cuStreamSynchronize, d->stream);
  if (memcmp(found, expected, bytes) != 0) fail_msg("trial %d, %s: %s differs", trial, how, what);
}

static void compare_all(struct device *d, const struct trial *t, int trial, const char *how) {
  const struct results *x = &d->found, *y = &d->expected;
  for (int s = 0; s < STEPS; s++)
    compare(d, trial, how, "an output", x->output[s], y->output[s], query_bytes(t));
  compare(d, trial, how, "the last turned query", x->turned, y->turned, query_bytes(t));
  compare(d, trial, how, "key", x->key, y->key, cache_bytes(t));
  compare(d, trial, how, "value", x->value, y->value, cache_bytes(t));
  compare(d, trial, how, "key_scale", x->key_scale, y->key_scale, scale_bytes(t));
  compare(d, trial, how, "value_scale", x->value_scale, y->value_scale, scale_bytes(t));
}

static void assert_numbers(struct device *d, const struct trial *t, int trial) {
  static uint16_t output[MOST_BATCH * MOST_ROWS * MOST_HEADS_K * 8 * MOST_DIM];
  const uint16_t exponent = t->dtype == FA3_BFLOAT16 ? 0x7f80 : 0x7c00;
  for (int s = 0; s < STEPS; s++) {
    GPU(cuMemcpyDtoHAsync, output, d->expected.output[s], query_bytes(t), d->stream);
    GPU(cuStreamSynchronize, d->stream);
    for (size_t i = 0; i < query_bytes(t) / sizeof *output; i++)
      if ((output[i] & exponent) == exponent) fail_msg("trial %d: step %d is no number", trial, s);
  }
}

static void run_trial(struct device *d, int trial) {
  struct rng rng = rng_for((uint64_t)trial);
  const struct trial t = make_trial(&rng);
  set_up(d, &t, &rng);
  restore(d, &t, &d->expected);
  run_steps(d, &t, &d->expected, false);
  assert_numbers(d, &t, trial);

  restore(d, &t, &d->found);
  run_steps(d, &t, &d->found, true);
  compare_all(d, &t, trial, "queued");

  gpu_graph graph;
  gpu_graph_exec exec;
  GPU(cuStreamBeginCapture, d->stream, GLOBAL);
  run_steps(d, &t, &d->found, true);
  GPU(cuStreamEndCapture, d->stream, &graph);
  GPU(cuGraphInstantiateWithFlags, &exec, graph, 0);
  GPU(cuGraphDestroy, graph);
  for (int replay = 0; replay < 3; replay++) {
    restore(d, &t, &d->found);
    GPU(cuGraphLaunch, exec, d->stream);
    compare_all(d, &t, trial, "captured");
    if (replay == 1) { /* calls of the stream's own between */
      restore(d, &t, &d->found);
      run_steps(d, &t, &d->found, true);
      compare_all(d, &t, trial, "queued between");
    }
  }
  GPU(cuGraphExecDestroy, exec);
}

static int trials;

static void test_steps(void **state) {
  (void)state;
  static uint8_t pool[POOL_BYTES];
  struct rng rng = rng_for(0);
  /* As bfloat16, float16 and E4M3 alike: of magnitudes from 1/8 to 8. */
  for (size_t i = 0; i < sizeof pool; i++)
    pool[i] = (uint8_t)(0x3e + rng_between(&rng, 0, 2) + (rng_chance(&rng, 0.5) ? 0x80 : 0));
  struct device d = {.arena = gpu_arena_new((size_t)700 << 20)};
  GPU(cuStreamCreate, &d.stream, 1);
  d.pool = gpu_arena_take(&d.arena, POOL_BYTES);
  upload(&d, d.pool, pool, POOL_BYTES);
  trials = gpu_trials(TRIALS);
  for (int trial = 0; trial < trials; trial++) run_trial(&d, trial);
  GPU(cuStreamDestroy, d.stream);
  gpu_arena_free(&d.arena);
}

int main(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_steps)};
  const int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %d calls\n", trials * STEPS);
  return result;
}
