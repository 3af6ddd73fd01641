/* Calls of both passes from several threads, streams and contexts at once: each thread makes random
 * trials of its own, and they are compared with the reference.
 *   FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of each test that makes them one by one.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu_trial.h"
#include "test.h"
#include "trials.h"

enum { THREADS = 2, TRIALS = 40, FEW = 3, MANY = 200 };

static const size_t arena_bytes = (size_t)512 << 20;

/* CU_STREAM_PER_THREAD: the calling thread's own. */
#define PER_THREAD ((gpu_stream)(void *)2)

struct caller {
  int number;
  int calls; /* of a thread, queued before any is looked at */
  gpu_stream stream;
  struct gpu_arena arena;
  struct gpu_trial trial;
};

/* Every other one is a backward call. */
static void make_trial(struct caller *caller, int number) {
  const bool backward = number % 2;
  struct rng rng = rng_for(1000 * (uint64_t)caller->number + (uint64_t)number);
  struct gradient_spec spec = gpu_spec_random(backward, &rng);
  spec.flags &= ~(uint32_t)FA3_ACCUMULATE; /* calls are repeated */
  gpu_trial_new(&caller->trial, &spec, backward, &caller->arena, caller->stream, &rng);
}

/* Memory is taken beforehand, as a thread without a context can't take any. */
static void *call(void *argument) {
  const struct caller *caller = argument;
  if (caller->stream && gpu.cuCtxSetCurrent(NULL)) return NULL;
  for (int i = 0; i < caller->calls; i++)
    if (mirror_call(&caller->trial.mirror)) return NULL;
  return argument;
}

/* What is printed if it fails. */
static void begin_trial(const struct caller *caller, int number) {
  gradient_spec_print(&caller->trial.gradient.spec, trials_begin((uint64_t)number), TRIALS_TEXT);
}

static void check_trial(struct caller *caller, int number) {
  struct rng rng = rng_for((uint64_t)number);
  begin_trial(caller, number);
  mirror_download(&caller->trial.mirror);
  const double ratio = gpu_trial_check(&caller->trial, &rng, 30000);
  trials_end(caller->trial.gradient.spec.forward.dtype, ratio);
  gpu_trial_free(&caller->trial);
}

/* Each caller's trial on a thread and its stream; checked on this thread, whose context is the
 * primary one. */
static void run_together(struct caller callers[THREADS], int number) {
  pthread_t threads[THREADS];
  for (int t = 0; t < THREADS; t++) mirror_upload(&callers[t].trial.mirror);
  GPU(cuCtxSynchronize, );
  for (int t = 0; t < THREADS; t++)
    assert_int_equal(pthread_create(&threads[t], NULL, call, &callers[t]), 0);
  for (int t = 0; t < THREADS; t++) {
    void *result;
    pthread_join(threads[t], &result);
    assert_non_null(result);
  }
  GPU(cuCtxSynchronize, );
  for (int t = 0; t < THREADS; t++) check_trial(&callers[t], number);
}

static void test_threads(bool streams) {
  static struct caller callers[THREADS];
  for (int t = 0; t < THREADS; t++) {
    callers[t] =
        (struct caller){.number = t + 1, .calls = FEW, .arena = gpu_arena_new(arena_bytes)};
    if (streams) GPU(cuStreamCreate, &callers[t].stream, 1);
  }
  for (int number = 0; number < TRIALS; number++) {
    for (int t = 0; t < THREADS; t++) make_trial(&callers[t], number + t);
    run_together(callers, number);
  }
  for (int t = 0; t < THREADS; t++) {
    if (streams) GPU(cuStreamDestroy, callers[t].stream);
    gpu_arena_free(&callers[t].arena);
  }
}

static void test_two_streams(void **state) {
  (void)state;
  test_threads(true);
}

/* New threads have no current context: the default stream is then the primary context's. */
static void test_no_current_context(void **state) {
  (void)state;
  test_threads(false);
}

static struct caller alone;

/* The call once more, too: so that an error that moves is known from one that does not. */
static void run_alone(uint64_t number) {
  make_trial(&alone, (int)number);
  begin_trial(&alone, (int)number);
  mirror_upload(&alone.trial.mirror);
  mirror_run(&alone.trial.mirror);
  mirror_download(&alone.trial.mirror);
  char *outputs = mirror_copy_outputs(&alone.trial.mirror);
  mirror_repeat(&alone.trial.mirror, outputs);
  free(outputs);
  check_trial(&alone, (int)number);
}

static void run_trials(gpu_stream stream, int first) {
  alone = (struct caller){.number = first, .arena = gpu_arena_new(arena_bytes), .stream = stream};
  trials_run(run_alone, 0, 1, TRIALS);
  gpu_arena_free(&alone.arena);
}

/* More tiles of unequal length than there are multiprocessors. */
static const struct gradient_spec uneven = {.forward = {.dtype = FA3_BFLOAT16,
                                                        .output_dtype = FA3_BFLOAT16,
                                                        .sink_dtype = FA3_FLOAT32,
                                                        .batch = 1,
                                                        .heads_k = 70,
                                                        .group = 1,
                                                        .head_dim = 128,
                                                        .value_head_dim = 128,
                                                        .max_seqlen_q = 140,
                                                        .max_seqlen_k = 150,
                                                        .flags = FA3_CAUSAL,
                                                        .spread = 1,
                                                        .sink = 3}};

/* The same kernel from two threads, each busy with a stream: a created one, or the thread's own. */
static void test_busy_streams(void **state) {
  (void)state;
  static struct caller callers[THREADS];
  for (int created = 0; created < 2; created++) {
    for (int t = 0; t < THREADS; t++) {
      struct rng rng = rng_for((uint64_t)t + 20);
      struct caller *caller = &callers[t];
      *caller =
          (struct caller){.calls = MANY, .arena = gpu_arena_new(arena_bytes), .stream = PER_THREAD};
      if (created) GPU(cuStreamCreate, &caller->stream, 1);
      gpu_trial_new(&caller->trial, &uneven, false, &caller->arena, caller->stream, &rng);
    }
    run_together(callers, 0);
    for (int t = 0; t < THREADS; t++) {
      if (created) GPU(cuStreamDestroy, callers[t].stream);
      gpu_arena_free(&callers[t].arena);
    }
  }
}

/* More streams than the library keeps counters for: the first call of each stream and its second
 * give the same bits. */
static void test_many_streams(void **state) {
  (void)state;
  enum { STREAMS = 1200 };
  static struct gpu_trial trial;
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  struct rng rng = rng_for(9);
  gpu_trial_new(&trial, &uneven, false, &arena, NULL, &rng);
  mirror_upload(&trial.mirror);
  mirror_run(&trial.mirror);
  mirror_download(&trial.mirror);
  gpu_trial_check(&trial, &rng, 30000);
  char *outputs = mirror_copy_outputs(&trial.mirror);
  for (int i = 0; i < STREAMS; i++) {
    gpu_stream stream;
    GPU(cuStreamCreate, &stream, 1);
    trial.mirror.stream = trial.mirror.forward_args.stream = stream;
    mirror_repeat(&trial.mirror, outputs);
    mirror_repeat(&trial.mirror, outputs);
    GPU(cuStreamDestroy, stream);
  }
  free(outputs);
  gpu_trial_free(&trial);
  gpu_arena_free(&arena);
}

/* A context that is not the primary one; the call leaves it current. */
static void test_own_context(void **state) {
  (void)state;
  gpu_context own, current;
  gpu_stream stream;
  GPU(cuCtxCreate, &own, 0, 0);
  run_trials(NULL, 5);
  GPU(cuCtxGetCurrent, &current);
  assert_ptr_equal(current, own);
  GPU(cuStreamCreate, &stream, 1);
  run_trials(stream, 6);
  /* Called with another context current, the call runs in its stream's and changes nothing. */
  static struct caller caller;
  caller = (struct caller){.number = 8, .arena = gpu_arena_new(arena_bytes), .stream = stream};
  for (int number = 0; number < 2; number++) {
    make_trial(&caller, number);
    mirror_upload(&caller.trial.mirror);
    GPU(cuStreamSynchronize, stream);
    GPU(cuCtxSetCurrent, gpu_primary());
    mirror_run(&caller.trial.mirror);
    GPU(cuCtxGetCurrent, &current);
    assert_ptr_equal(current, gpu_primary());
    GPU(cuCtxSetCurrent, own);
    check_trial(&caller, number);
  }
  GPU(cuStreamDestroy, stream);
  gpu_arena_free(&caller.arena);
  GPU(cuCtxDestroy, own);
  GPU(cuCtxSetCurrent, gpu_primary());
}

/* A stream that has a part of the GPU's multiprocessors. */
static void test_green_context(void **state) {
  (void)state;
  enum { SM = 1, DEFAULT_STREAM = 1, NON_BLOCKING = 1 };
  char all[512] = {0}, part[512] = {0}, rest[512] = {0};
  unsigned groups = 1;
  void *description, *green;
  gpu_stream stream;
  if (!gpu.cuGreenCtxStreamCreate) skip();
  GPU(cuDeviceGetDevResource, 0, all, SM);
  GPU(cuDevSmResourceSplitByCount, part, &groups, all, rest, 0, 32);
  GPU(cuDevResourceGenerateDesc, &description, part, 1);
  GPU(cuGreenCtxCreate, &green, description, 0, DEFAULT_STREAM);
  GPU(cuGreenCtxStreamCreate, &stream, green, NON_BLOCKING, 0);
  run_trials(stream, 7);
  GPU(cuStreamDestroy, stream);
  GPU(cuGreenCtxDestroy, green);
}

int main(void) {
  rng_run_seed();
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_two_streams, trials_print),
      cmocka_unit_test_teardown(test_no_current_context, trials_print),
      cmocka_unit_test(test_busy_streams),
      cmocka_unit_test(test_many_streams),
      cmocka_unit_test_teardown(test_own_context, trials_print),
      cmocka_unit_test_teardown(test_green_context, trials_print),
  };
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %zu tests\n", sizeof tests / sizeof *tests);
  return result;
}
