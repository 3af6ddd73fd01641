/* fa3_quantize on a GPU: bit for bit what the CPU gives, but where sums have another order, of a
 * mean that is taken off and of a rotation by tensor cores: there the definition in double
 * precision bounds it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "quantize_trial.h"
#include "test.h"

enum { GUARD = 4096, GUARD_BYTE = 0xa5, MOST_PLACES = 16 };

static struct gpu_arena arena;
static int compared; /* calls */

/* What the arena holds before a call, and where a call may write. */
static unsigned char *before, *after;
static struct place { size_t start, size; } outputs[MOST_PLACES];
static int output_count;

/* Between guards; `offset` bytes behind a multiple of 4096. */
static void *place(const void *data, size_t size, size_t offset, bool output) {
  const size_t start =
      (size_t)(gpu_arena_take(&arena, size + offset + (size_t)2 * GUARD) - arena.base) + GUARD +
      offset;
  memset(before + start - GUARD - offset, GUARD_BYTE, offset + GUARD);
  memcpy(before + start, data, size);
  memset(before + start + size, GUARD_BYTE, arena.used - start - size);
  if (output) outputs[output_count++] = (struct place){start, size};
  return (void *)(arena.base + start);
}

static void place_vector(fa3_tensor *vector) {
  if (vector->data)
    vector->data =
        place(vector->data, (size_t)vector->shape[0] * sizeof(int32_t), sizeof(int32_t), false);
}

/* The call with its tensors on the GPU; some of them where they can't be read 16 bytes at a time.
 */
static fa3_quantize_args make_call(const struct quantize_trial *t, struct rng *rng) {
  fa3_quantize_args args = t->args;
  const size_t element = fa3_dtype_size(args.input.dtype);
  arena.used = 0;
  output_count = 0;
  args.device = (fa3_device){FA3_CUDA, 0};
  args.num_threads = 0;
  args.input.data = place(t->input.data, t->input.size, rng_chance(rng, 0.2) ? element : 0, false);
  args.codes.data = place(t->codes.data, t->codes.size, rng_chance(rng, 0.2), true);
  args.codes_scale.data = place(t->scale.data, t->scale.size, sizeof(float), true);
  if (t->cos) {
    args.rotary_cos.data = place(t->cos_table.data, t->cos_table.size, 0, false);
    args.rotary_sin.data = place(t->sin_table.data, t->sin_table.size, 0, false);
  }
  if (t->positions) {
    const int64_t rows = t->packed ? t->rows : t->batch * t->rows;
    args.positions.data = place(t->positions, (size_t)rows * sizeof(int32_t), 0, false);
  }
  place_vector(&args.cu_seqlens_q);
  place_vector(&args.seqused_q);
  if (t->packed && !args.max_seqlen_q) {
    args.max_seqlen_q = 1;
    for (int64_t b = 0; b < t->batch; b++)
      if (t->starts[b + 1] - t->starts[b] > args.max_seqlen_q)
        args.max_seqlen_q = t->starts[b + 1] - t->starts[b];
  }
  return args;
}

/* Scales in memory of their own: the sanitizer sees what is read or written behind them. */
static gpu_pointer own_scale;

/* Calls, and finds its outputs in `after`; nothing else has changed. */
static void run(const fa3_quantize_args *args, uint64_t number) {
  fa3_quantize_args call = *args;
  const gpu_pointer scale = (gpu_pointer)args->codes_scale.data;
  GPU(cuMemcpyHtoDAsync, arena.base, before, arena.used, NULL);
  if (own_scale) {
    GPU(cuMemcpyDtoDAsync, own_scale, scale, outputs[1].size, NULL);
    call.codes_scale.data = (void *)own_scale;
  }
  if (fa3_quantize(&call)) fail_msg("call %d: %s", (int)number, fa3_last_error());
  if (own_scale) GPU(cuMemcpyDtoDAsync, scale, own_scale, outputs[1].size, NULL);
  GPU(cuMemcpyDtoHAsync, after, arena.base, arena.used, NULL);
  GPU(cuCtxSynchronize, );
  for (size_t i = 0, from = 0; i <= (size_t)output_count; i++) {
    const bool last = i == (size_t)output_count;
    const size_t to = last ? arena.used : outputs[i].start;
    if (memcmp(before + from, after + from, to - from) != 0)
      fail_msg("call %d wrote where no output is", (int)number);
    if (!last) from = to + outputs[i].size;
  }
}

/* Of codes: any NaN is another. */
static bool same_code(unsigned char a, unsigned char b) {
  return a == b || ((a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);
}

/* Codes of either sign in the order of their values. */
static int rank_of(unsigned char code) {
  return code & 0x80 ? -(code & 0x7f) : code;
}

/* A neighbour counts too, but for NaN. */
static bool is_near_code(unsigned char a, unsigned char b) {
  const bool nan = (a & 0x7f) == 0x7f || (b & 0x7f) == 0x7f;
  return same_code(a, b) || (!nan && abs(rank_of(a) - rank_of(b)) <= 1);
}

/* Of scales: infinities and NaN are the same, others nearly. */
static bool is_near_scale(float got, float expected) {
  if (!isfinite(expected)) return isnan(expected) ? isnan(got) : got == expected;
  return fabsf(got - expected) <= 0x1p-18F * fabsf(expected);
}

/* Whether tensor cores may rotate. */
static bool rotates_by_products(const struct quantize_trial *t) {
  return (t->args.flags & FA3_ROTATE) && t->args.input.dtype != FA3_FLOAT32 &&
         (t->dim == 64 || t->dim == 128 || t->dim == 256);
}

/* The CPU's codes and scales; nearly these where sums have another order, and numbers that are not
 * finite leave them no bound. */
static void expect_codes(const struct quantize_trial *t, uint64_t number, bool nearly) {
  const unsigned char *codes = after + outputs[0].start;
  const fa3_tensor *input = &t->args.input;
  for (size_t i = 0; i < t->codes.size; i++) {
    const unsigned char expected = (unsigned char)t->codes.data[i];
    if (!(nearly ? is_near_code : same_code)(codes[i], expected))
      fail_msg(
          "call %d, head dim %d, dtype %d, %d rows a scale, flags 0x%x%s%s: code %zu is 0x%02x: "
          "expected %s0x%02x",
          (int)number, (int)t->dim, input->dtype, (int)t->args.codes_scale_rows, t->args.flags,
          t->packed ? ", packed" : "", t->cos ? ", turned" : "", i, (unsigned)codes[i],
          nearly ? "about " : "", (unsigned)expected);
  }
  const unsigned char *scales = after + outputs[1].start;
  for (size_t i = 0; i < t->scale.size; i += sizeof(float)) {
    float got, expected;
    memcpy(&got, scales + i, sizeof got);
    memcpy(&expected, t->scale.data + i, sizeof expected);
    const bool same = memcmp(scales + i, t->scale.data + i, sizeof got) == 0;
    if (!same && !(nearly && is_near_scale(got, expected)))
      fail_msg("call %d: scale %zu is %a: expected %s%a", (int)number, i / sizeof got, (double)got,
               nearly ? "about " : "", (double)expected);
  }
}

/* Some numbers that are not finite, tiny or zero: sums of them have no bound. */
static void spoil(const struct quantize_trial *t, struct rng *rng) {
  const size_t element = fa3_dtype_size(t->args.input.dtype);
  static const float numbers[] = {INFINITY, -INFINITY, NAN, -0.0F, 0x1p-149f, 0x1p-20f};
  for (int i = 0; i < 30 && t->input.size; i++) {
    float x = numbers[rng_between(rng, 0, 5)];
    char bytes[sizeof x];
    memcpy(bytes, &x, sizeof x);
    /* The upper half of a float is a bfloat16; as a float16 it is some number. */
    const size_t at = (size_t)rng_between(rng, 0, (int64_t)(t->input.size / element) - 1);
    memcpy(t->input.data + at * element, bytes + sizeof x - element, element);
  }
}

static void compare(uint64_t number, int64_t longest) {
  struct rng rng = rng_for(number);
  struct quantize_trial trial;
  quantize_trial_make(&trial, &rng, longest);
  const bool mean = trial.args.flags & FA3_SUBTRACT_MEAN, products = rotates_by_products(&trial);
  const bool spoilt = !mean && rng_chance(&rng, 0.2);
  if (spoilt) spoil(&trial, &rng);
  const fa3_quantize_args args = make_call(&trial, &rng);
  if (trial.scale.size && rng_chance(&rng, 0.5)) GPU(cuMemAlloc, &own_scale, trial.scale.size);
  run(&args, number);
  if (mean || (products && !spoilt)) {
    memcpy(trial.codes.data, after + outputs[0].start, trial.codes.size);
    memcpy(trial.scale.data, after + outputs[1].start, trial.scale.size);
    quantize_trial_check(&trial);
    unsigned char *first = malloc(arena.used);
    assert_non_null(first);
    memcpy(first, after, arena.used);
    run(&args, number);
    if (memcmp(first, after, arena.used) != 0)
      fail_msg("call %d gave other bits when it was repeated", (int)number);
    free(first);
  } else {
    if (fa3_quantize(&trial.args)) fail_msg("call %d: %s", (int)number, fa3_last_error());
    expect_codes(&trial, number, products);
  }
  quantize_trial_free(&trial);
  if (own_scale) GPU(cuMemFree, own_scale);
  own_scale = 0;
  compared++;
}

static void test_random_calls(void **state) {
  (void)state;
  static const int64_t longest[] = {60, 400, QUANTIZE_MOST_ROWS};
  const uint64_t most = (uint64_t)gpu_trials(240);
  for (uint64_t number = 0; number < most; number++)
    compare(number, longest[number % 8 == 7 ? 2 : number % 8 > 3]);
}

/* A graph's calls read the lengths anew. */
static void test_lengths_change_between_replays(void **state) {
  (void)state;
  enum { BATCH = 5, ROWS = 300, HEADS = 3, DIM = 64, COUNT = BATCH * ROWS * HEADS * DIM };
  struct rng rng = rng_for(1 << 20);
  struct memory {
    float input[COUNT];
    unsigned char codes[COUNT], expected[COUNT];
    float scale[BATCH * HEADS], expected_scale[BATCH * HEADS];
    int32_t used[BATCH];
  } * memory; /* page-locked, which both engines take */
  gpu_stream stream;
  gpu_graph graph;
  gpu_graph_exec exec;
  void *locked;
  GPU(cuMemAllocHost, &locked, sizeof *memory);
  memory = locked;
  for (int i = 0; i < COUNT; i++) memory->input[i] = (float)rng_normal(&rng);
  fa3_quantize_args args = {
      .struct_size = sizeof args,
      .device = {FA3_CUDA, 0},
      .input = fa3_dense(memory->input, FA3_FLOAT32, BATCH, ROWS, HEADS, DIM),
      .codes = fa3_dense(memory->codes, FA3_FLOAT8_E4M3, BATCH, ROWS, HEADS, DIM),
      .codes_scale = {memory->scale, FA3_FLOAT32, 2, {BATCH, HEADS}, {HEADS, 1}, {0}},
      .seqused_q = fa3_vector(memory->used, FA3_INT32, BATCH),
      .flags = FA3_ROTATE};
  GPU(cuStreamCreate, &stream, 1);
  args.stream = stream;
  GPU(cuStreamBeginCapture, stream, 1);
  if (fa3_quantize(&args)) fail_msg("%s", fa3_last_error());
  GPU(cuStreamEndCapture, stream, &graph);
  GPU(cuGraphInstantiateWithFlags, &exec, graph, 0);
  args.device = (fa3_device){FA3_CPU, 0};
  args.stream = NULL;
  args.codes.data = memory->expected;
  args.codes_scale.data = memory->expected_scale;
  for (int replay = 0; replay < 20; replay++) {
    for (int b = 0; b < BATCH; b++)
      memory->used[b] = rng_chance(&rng, 0.3) ? 0 : (int32_t)rng_between(&rng, 0, ROWS);
    memset(memory->codes, QUANTIZE_POISON, sizeof memory->codes);
    memset(memory->expected, QUANTIZE_POISON, sizeof memory->expected);
    memset(memory->scale, QUANTIZE_POISON, sizeof memory->scale);
    memset(memory->expected_scale, QUANTIZE_POISON, sizeof memory->expected_scale);
    GPU(cuGraphLaunch, exec, stream);
    GPU(cuStreamSynchronize, stream);
    if (fa3_quantize(&args)) fail_msg("%s", fa3_last_error());
    assert_memory_equal(memory->codes, memory->expected, sizeof memory->codes);
    assert_memory_equal(memory->scale, memory->expected_scale, sizeof memory->scale);
  }
  GPU(cuGraphExecDestroy, exec);
  GPU(cuGraphDestroy, graph);
  GPU(cuStreamDestroy, stream);
  GPU(cuMemFreeHost, locked);
}

/* More rows than a cluster's blocks have in shared memory at a time, forth and back: a scale of
 * each sequence, and a mean with scales of rows. Sums may round otherwise, so few codes may. */
static void test_long_heads(void **state) {
  (void)state;
  enum { ROWS = 14000, HEADS = 9, DIM = 128, COUNT = ROWS * HEADS * DIM };
  enum { SCALE_ROWS = 128, BLOCKS = (ROWS + SCALE_ROWS - 1) / SCALE_ROWS };
  struct memory {
    uint16_t input[COUNT];
    unsigned char codes[COUNT], expected[COUNT];
    float scale[HEADS * BLOCKS], expected_scale[HEADS * BLOCKS];
  } * memory; /* page-locked, which both engines take */
  void *locked;
  struct rng rng = rng_for(1 << 21);
  GPU(cuMemAllocHost, &locked, sizeof *memory);
  memory = locked;
  for (int i = 0; i < COUNT; i++) {
    const float x = (float)rng_normal(&rng);
    memcpy(&memory->input[i], (const char *)&x + 2, sizeof memory->input[i]);
  }
  for (int mean = 0; mean < 2; mean++) {
    fa3_quantize_args args = {
        .struct_size = sizeof args,
        .device = {FA3_CUDA, 0},
        .input = fa3_dense(memory->input, FA3_BFLOAT16, 1, ROWS, HEADS, DIM),
        .codes = fa3_dense(memory->codes, FA3_FLOAT8_E4M3, 1, ROWS, HEADS, DIM),
        .codes_scale = {memory->scale, FA3_FLOAT32, 2, {1, HEADS}, {HEADS, 1}, {0}},
        .flags = FA3_ROTATE | (mean ? FA3_SUBTRACT_MEAN : 0)};
    if (mean) {
      args.codes_scale_rows = SCALE_ROWS;
      args.codes_scale = (fa3_tensor){memory->scale,
                                      FA3_FLOAT32,
                                      3,
                                      {1, HEADS, BLOCKS},
                                      {(int64_t)HEADS * BLOCKS, BLOCKS, 1},
                                      {0}};
    }
    if (fa3_quantize(&args)) fail_msg("%s", fa3_last_error());
    GPU(cuCtxSynchronize, );
    args.device = (fa3_device){FA3_CPU, 0};
    args.codes.data = memory->expected;
    args.codes_scale.data = memory->expected_scale;
    if (fa3_quantize(&args)) fail_msg("%s", fa3_last_error());
    int others = 0;
    for (int i = 0; i < COUNT; i++) others += memory->codes[i] != memory->expected[i];
    for (int i = 0; i < HEADS * (mean ? BLOCKS : 1); i++)
      if (!is_near_scale(memory->scale[i], memory->expected_scale[i]))
        fail_msg("scale %d is %a: expected about %a", i, (double)memory->scale[i],
                 (double)memory->expected_scale[i]);
    assert_in_range(others, 0, COUNT / 20000);
  }
  GPU(cuMemFreeHost, locked);
}

/* As fa3_append has it, where the CPU refuses: the device alone knows the positions. */
static void test_positions_that_are_not_there(void **state) {
  (void)state;
  enum { ROWS = 4, DIM = 32 };
  static const float numbers[ROWS * DIM] = {1}, table[2 * DIM / 2] = {1};
  static const int32_t positions[ROWS] = {0, 2, 1, -1};
  static unsigned char codes[ROWS * DIM];
  static float scale[ROWS];
  arena.used = 0;
  output_count = 0;
  const fa3_tensor turn = {
      place(table, sizeof table, 0, false), FA3_FLOAT32, 2, {2, DIM / 2}, {DIM / 2, 1}, {0}};
  fa3_quantize_args args = {
      .struct_size = sizeof args,
      .device = {FA3_CUDA, 0},
      .input = fa3_dense(place(numbers, sizeof numbers, 0, false), FA3_FLOAT32, 1, ROWS, 1, DIM),
      .codes = fa3_dense(place(codes, sizeof codes, 0, true), FA3_FLOAT8_E4M3, 1, ROWS, 1, DIM),
      .codes_scale =
          {place(scale, sizeof scale, 0, true), FA3_FLOAT32, 3, {1, 1, ROWS}, {ROWS, ROWS, 1}, {0}},
      .codes_scale_rows = 1,
      .rotary_cos = turn,
      .rotary_sin = turn,
      .positions = {
          place(positions, sizeof positions, 0, false), FA3_INT32, 2, {1, ROWS}, {ROWS, 1}, {0}}};
  for (int empty = 0; empty < 2; empty++) {
    if (empty) args.rotary_cos.shape[0] = args.rotary_sin.shape[0] = 0;
    run(&args, (uint64_t)empty);
    for (int i = 0; i < ROWS * DIM; i++) {
      const bool nan = (after[outputs[0].start + (size_t)i] & 0x7f) == 0x7f;
      assert_int_equal(nan, empty || i / DIM % 2 == 1);
    }
  }
}

int main(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  rng_run_seed();
  arena = gpu_arena_new((size_t)64 << 20);
  before = malloc(arena.size);
  after = malloc(arena.size);
  if (!before || !after) return 1;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_calls),
      cmocka_unit_test(test_lengths_change_between_replays),
      cmocka_unit_test(test_long_heads),
      cmocka_unit_test(test_positions_that_are_not_there),
  };
  const int result = cmocka_run_group_tests(tests, NULL, NULL);
  gpu_arena_free(&arena);
  free(before);
  free(after);
  if (result == 0) printf("passed: %d calls\n", compared);
  return result;
}
