/* FA3_DETERMINISTIC on a GPU: a hundred runs of the same backward call give bitwise the same
 * gradients, whatever runs beside them and however many multiprocessors that leaves. And runs of
 * the same forward call give the same log-sum-exps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_trial.h"
#include "test.h"

enum { RUNS = 100, MOST_TILES = 132 };

static const size_t arena_bytes = (size_t)1 << 30;
static const size_t copied_bytes = (size_t)256 << 20;

/* Beside the call, on another stream: nothing, a copy, or forward calls of any number of tiles of
 * queries, each against many keys. */
struct load {
  gpu_stream stream;
  struct gpu_arena arena;
  fa3_forward_args args;
};

static struct load load_new(void) {
  enum { TILE = 128, KEYS = 16384, HEAD_DIM = 128 };
  struct load load = {.arena = gpu_arena_new(2 * copied_bytes)};
  GPU(cuStreamCreate, &load.stream, 1);
  GPU(cuMemsetD8Async, load.arena.base, 0, load.arena.size, load.stream);
  load.args = (fa3_forward_args){
      .struct_size = sizeof load.args, .device = {FA3_CUDA, 0}, .stream = load.stream};
  fa3_tensor *tensors[] = {&load.args.query, &load.args.key, &load.args.value, &load.args.output};
  for (int i = 0; i < 4; i++) {
    const int64_t rows = i == 1 || i == 2 ? KEYS : MOST_TILES * TILE;
    *tensors[i] = fa3_dense((void *)gpu_arena_take(&load.arena, (size_t)rows * HEAD_DIM * 2),
                            FA3_BFLOAT16, 1, rows, 1, HEAD_DIM);
  }
  if (fa3_forward_workspace(&load.args, &load.args.workspace_size))
    fail_msg("the load: %s", fa3_last_error());
  load.args.workspace = (void *)gpu_arena_take(&load.arena, load.args.workspace_size);
  return load;
}

static void load_start(struct load *load, struct rng *rng) {
  fa3_forward_args args = load->args;
  switch (rng_between(rng, 0, 3)) {
    case 0:
      return;
    case 1:
      GPU(cuMemcpyDtoDAsync, load->arena.base + copied_bytes, load->arena.base, copied_bytes,
          load->stream);
      return;
    default:
      for (int64_t calls = rng_between(rng, 1, 4); calls > 0; calls--) {
        args.query.shape[1] = args.output.shape[1] = rng_between(rng, 1, load->args.query.shape[1]);
        if (fa3_forward(&args)) fail_msg("the load: %s", fa3_last_error());
      }
  }
}

static void load_free(struct load *load) {
  GPU(cuStreamDestroy, load->stream);
  gpu_arena_free(&load->arena);
}

/* Long enough for many tiles of keys to add to each query's gradient. */
static struct gradient_spec make_spec(int64_t head_dim, int64_t group, uint32_t flags) {
  const int64_t value_head_dim = head_dim == 192 ? 128 : head_dim;
  return (struct gradient_spec){.forward = {.dtype = FA3_BFLOAT16,
                                            .output_dtype = FA3_BFLOAT16,
                                            .sink_dtype = FA3_FLOAT32,
                                            .batch = 2,
                                            .heads_k = 3,
                                            .group = group,
                                            .head_dim = head_dim,
                                            .value_head_dim = value_head_dim,
                                            .max_seqlen_q = 1100,
                                            .max_seqlen_k = 1300,
                                            .packed_q = group > 1,
                                            .packed_k = group > 1,
                                            .lse = true,
                                            .flags = flags,
                                            .num_threads = 0,
                                            .spread = 1,
                                            .sink = 3},
                                .grad_query_dtype = FA3_FLOAT32,
                                .grad_key_dtype = FA3_FLOAT32,
                                .grad_value_dtype = FA3_FLOAT32,
                                .grad_sink_dtype = FA3_FLOAT32,
                                .flags = FA3_DETERMINISTIC};
}

/* A stream of some of the GPU's multiprocessors; null where the driver has none. */
struct part {
  void *context;
  gpu_stream stream;
};

static struct part part_new(unsigned multiprocessors) {
  enum { SM = 1, DEFAULT_STREAM = 1, NON_BLOCKING = 1 };
  char all[512] = {0}, some[512] = {0}, rest[512] = {0};
  unsigned groups = 1;
  void *description;
  struct part part = {0};
  if (!gpu.cuGreenCtxStreamCreate) return part;
  GPU(cuDeviceGetDevResource, 0, all, SM);
  GPU(cuDevSmResourceSplitByCount, some, &groups, all, rest, 0, multiprocessors);
  GPU(cuDevResourceGenerateDesc, &description, some, 1);
  GPU(cuGreenCtxCreate, &part.context, description, 0, DEFAULT_STREAM);
  GPU(cuGreenCtxStreamCreate, &part.stream, part.context, NON_BLOCKING, 0);
  return part;
}

/* As run beside others, with fewer multiprocessors for itself. */
static void run_on_part(struct mirror *mirror, unsigned multiprocessors, const char *outputs) {
  struct part part = part_new(multiprocessors);
  gpu_stream stream = mirror->stream;
  if (!part.stream) return;
  mirror->stream = mirror->backward_args.stream = part.stream;
  mirror_repeat(mirror, outputs);
  mirror->stream = mirror->backward_args.stream = stream;
  GPU(cuStreamDestroy, part.stream);
  GPU(cuGreenCtxDestroy, part.context);
}

static void run(const struct gradient_spec *spec, uint64_t number) {
  static struct gpu_trial trial;
  struct rng rng = rng_for(number);
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  struct load load = load_new();
  gpu_stream stream;
  GPU(cuStreamCreate, &stream, 1);
  gpu_trial_new(&trial, spec, true, &arena, stream, &rng);
  mirror_upload(&trial.mirror);
  mirror_run(&trial.mirror);
  mirror_download(&trial.mirror);
  gpu_trial_check(&trial, &rng, 100000);
  char *outputs = mirror_copy_outputs(&trial.mirror);
  for (int i = 1; i < RUNS; i++) {
    mirror_reset(&trial.mirror);
    load_start(&load, &rng);
    mirror_run(&trial.mirror);
    mirror_expect(&trial.mirror, outputs);
    GPU(cuStreamSynchronize, load.stream);
  }
  GPU(cuCtxSynchronize, );
  run_on_part(&trial.mirror, 8, outputs);
  run_on_part(&trial.mirror, 64, outputs);
  free(outputs);
  gpu_trial_free(&trial);
  GPU(cuStreamDestroy, stream);
  load_free(&load);
  gpu_arena_free(&arena);
}

static int calls;

static void test_hundred_runs(void **state) {
  (void)state;
  static const int64_t head_dims[] = {64, 96, 128, 192, 256};
  for (int i = 0; i < 5; i++) {
    struct gradient_spec full = make_spec(head_dims[i], 1, 0);
    struct gradient_spec grouped = make_spec(head_dims[i], 4, FA3_CAUSAL);
    run(&full, (uint64_t)calls++);
    run(&grouped, (uint64_t)calls++);
  }
  /* Queries enough for the kernel that takes more of them at a time (kernels/variants.def). */
  struct gradient_spec longer = make_spec(128, 1, 0);
  longer.forward.max_seqlen_q = 2100;
  run(&longer, (uint64_t)calls++);
  /* So few tiles that half of them visit blocks upwards (backward_sums.c). */
  struct gradient_spec few = make_spec(128, 1, FA3_CAUSAL);
  few.forward.heads_k = 8;
  few.forward.max_seqlen_q = few.forward.max_seqlen_k = 1400;
  run(&few, (uint64_t)calls++);
  /* Tiles that each begin at a block of their own. */
  for (int64_t head_dim = 64; head_dim <= 128; head_dim += 32) {
    struct gradient_spec staggered = make_spec(head_dim, 1, 0);
    staggered.forward.heads_k = 8;
    staggered.forward.max_seqlen_q = 2100;
    staggered.forward.max_seqlen_k = 2000;
    staggered.forward.softcap = head_dim == 96 ? 30 : 0;
    run(&staggered, (uint64_t)calls++);
  }
  /* So many heads that all tiles of some visit blocks upwards. */
  struct gradient_spec many = make_spec(64, 1, FA3_CAUSAL);
  many.forward.batch = 5;
  many.forward.heads_k = 14;
  many.forward.max_seqlen_q = many.forward.max_seqlen_k = 1400;
  many.grad_query_dtype = many.grad_key_dtype = many.grad_value_dtype = FA3_BFLOAT16;
  run(&many, (uint64_t)calls++);
  /* A round of tiles that visit blocks upwards, of half of the chains. */
  for (int64_t head_dim = 64; head_dim <= 128; head_dim += 64) {
    struct gradient_spec half = make_spec(head_dim, 1, FA3_CAUSAL);
    half.forward.heads_k = 12;
    half.forward.max_seqlen_q = half.forward.max_seqlen_k = 1400;
    run(&half, (uint64_t)calls++);
  }
  /* A large group's parts, in several sections. */
  struct gradient_spec groups = make_spec(128, 8, FA3_CAUSAL);
  groups.forward.batch = 1;
  groups.forward.heads_k = 8;
  groups.forward.max_seqlen_q = 2200;
  groups.forward.max_seqlen_k = 2600;
  groups.forward.packed_q = groups.forward.packed_k = false;
  run(&groups, (uint64_t)calls++);
  /* Parts by blocks of queries, and several sums of dQ. */
  struct gradient_spec rows = make_spec(128, 1, FA3_CAUSAL);
  rows.forward.batch = rows.forward.heads_k = 1;
  rows.forward.max_seqlen_q = rows.forward.max_seqlen_k = 2800;
  run(&rows, (uint64_t)calls++);
  /* Tiles that go by head, one query head after the other (backward_deal.c). */
  struct gradient_spec window = make_spec(128, 4, FA3_CAUSAL | FA3_WINDOW);
  window.forward.batch = 1;
  window.forward.heads_k = 8;
  window.forward.max_seqlen_q = window.forward.max_seqlen_k = 2100;
  window.forward.packed_q = window.forward.packed_k = false;
  window.forward.window_left = 400;
  run(&window, (uint64_t)calls++);
  /* Sequences of one query or none, whose tiles pairs of blocks are done with at once; gradients
   * that leave element by element keep one block of a pair busy meanwhile. */
  for (int64_t head_dim = 192; head_dim <= 256; head_dim += 64) {
    struct gradient_spec empty = make_spec(head_dim, 2, FA3_CAUSAL);
    empty.forward.batch = 6;
    empty.forward.heads_k = 4;
    empty.forward.max_seqlen_q = 1;
    empty.forward.packed_q = empty.forward.packed_k = false;
    empty.forward.seqused_q = true;
    empty.forward.layout = LAYOUT_PADDED;
    run(&empty, (uint64_t)calls++);
  }
}

/* Blocks have several tiles each, so that a tile's queries are loaded while those of the one before
 * are still read. */
static void run_forward(int64_t head_dim, fa3_dtype dtype) {
  enum { FORWARD_RUNS = 400, ROWS = 2048, HEADS = 20 };
  const int64_t elements = head_dim * ROWS * HEADS;
  const size_t size = (size_t)elements * sizeof(uint16_t),
               lse_size = sizeof(uint32_t) * HEADS * ROWS;
  struct rng rng = rng_for((uint64_t)calls++);
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  fa3_forward_args args = {.struct_size = sizeof args, .device = {FA3_CUDA, 0}};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  uint16_t *numbers = malloc(size);
  uint32_t *first = malloc(lse_size), *lse = malloc(lse_size);
  if (!numbers || !first || !lse) abort();
  for (int i = 0; i < 4; i++) {
    const gpu_pointer to = gpu_arena_take(&arena, size);
    /* Between 0.5 and 2 in size, of either sign and either dtype. */
    for (int64_t j = 0; j < elements; j++)
      numbers[j] = (uint16_t)(rng_bits(&rng) & (dtype == FA3_BFLOAT16 ? 0x80ff : 0x87ff)) |
                   (dtype == FA3_BFLOAT16 ? 0x3f00 : 0x3800);
    GPU(cuMemcpyHtoDAsync, to, numbers, size, NULL);
    GPU(cuCtxSynchronize, );
    *tensors[i] = fa3_dense((void *)to, dtype, 1, ROWS, HEADS, head_dim);
  }
  const gpu_pointer at = gpu_arena_take(&arena, lse_size);
  args.lse = fa3_lse((void *)at, 1, HEADS, ROWS);
  if (fa3_forward_workspace(&args, &args.workspace_size)) fail_msg("%s", fa3_last_error());
  args.workspace = (void *)gpu_arena_take(&arena, args.workspace_size);
  for (int i = 0; i < FORWARD_RUNS; i++) {
    if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
    GPU(cuMemcpyDtoHAsync, i > 0 ? lse : first, at, lse_size, NULL);
    GPU(cuCtxSynchronize, );
    if (i > 0 && memcmp(lse, first, lse_size) != 0)
      fail_msg("head_dim %d: run %d is not like the first", (int)head_dim, i);
  }
  free(lse);
  free(first);
  free(numbers);
  gpu_arena_free(&arena);
}

static void test_forward_runs(void **state) {
  (void)state;
  static const int64_t head_dims[] = {64, 96, 128, 192, 256};
  for (int i = 0; i < 5; i++) run_forward(head_dims[i], i % 2 ? FA3_FLOAT16 : FA3_BFLOAT16);
  run_forward(128, FA3_FLOAT16);
}

int main(void) {
  rng_run_seed();
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_hundred_runs),
                                     cmocka_unit_test(test_forward_runs)};
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %d calls of %d runs or more\n", calls, RUNS);
  return result;
}
