/* The same call gives the same bits: twice, on any number of threads, and beside other calls. So
 * does a backward call, for which the number of threads is one of the arguments. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gradient_trial.h"
#include "test.h"

enum { TRIALS = 16, CALLERS = 4 };

/* Long enough for several tiles, blocks and threads. */
static struct spec make_spec(uint64_t number, struct rng *rng) {
  *rng = rng_for(number);
  struct spec spec = spec_random(rng);
  spec.batch = 2;
  spec.lse = true;
  if (spec.max_seqlen_q < 200) spec.max_seqlen_q += 200;
  if (spec.max_seqlen_k < 300) spec.max_seqlen_k += 300;
  if (spec.heads_k * spec.group > 8) spec.group = 2;
  if (number % 2) { /* the keys that a block of queries sees begin anywhere */
    spec.flags |= FA3_WINDOW;
    spec.window_left = rng_between(rng, 0, 150);
    spec.window_right = rng_between(rng, -1, 20);
  }
  return spec;
}

static struct trial make_trial(uint64_t number, struct rng *rng) {
  const struct spec spec = make_spec(number, rng);
  return trial_new(&spec, rng);
}

static void poison_outputs(struct trial *trial) {
  for (int i = TENSOR_output; i <= TENSOR_lse; i++)
    if (trial->buffers[i].size) memset(trial->buffers[i].data, 0xff, trial->buffers[i].size);
}

static bool same_outputs(const struct trial *a, const struct trial *b) {
  for (int i = TENSOR_output; i <= TENSOR_lse; i++) {
    if (a->buffers[i].size != b->buffers[i].size) return false;
    if (a->buffers[i].size &&
        memcmp(a->buffers[i].data, b->buffers[i].data, a->buffers[i].size) != 0)
      return false;
  }
  return true;
}

static void test_any_number_of_threads(void **state) {
  (void)state;
  static const int32_t threads[] = {1, 1, 2, 3, 8, 0};
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng;
    struct trial first = make_trial(number, &rng);
    first.args.num_threads = 1;
    trial_run(&first, &rng);
    struct trial again = make_trial(number, &rng);
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
      poison_outputs(&again);
      again.args.num_threads = threads[i];
      trial_run(&again, &rng);
      if (!same_outputs(&first, &again)) {
        char text[512];
        spec_print(&again.spec, text, sizeof text);
        fail_msg("%d threads differ from one: %s", threads[i], text);
      }
    }
    trial_free(&first);
    trial_free(&again);
  }
}

struct caller {
  struct trial trials[TRIALS];
  pthread_t thread;
  fa3_status status;
};

static void *call_all(void *argument) {
  struct caller *caller = argument;
  for (int number = 0; number < TRIALS && !caller->status; number++)
    caller->status = fa3_forward(&caller->trials[number].args);
  return NULL;
}

/* Each with its own outputs and workspace; cmocka's checks stay on this thread. */
static void test_calls_at_once(void **state) {
  (void)state;
  static struct caller callers[CALLERS];
  for (int c = 0; c < CALLERS; c++) {
    for (int number = 0; number < TRIALS; number++) {
      struct rng rng;
      callers[c].trials[number] = make_trial((uint64_t)number, &rng);
      trial_run(&callers[c].trials[number], &rng);
      if (c > 0) poison_outputs(&callers[c].trials[number]);
    }
  }
  for (int c = 1; c < CALLERS; c++)
    assert_int_equal(pthread_create(&callers[c].thread, NULL, call_all, &callers[c]), 0);
  for (int c = 1; c < CALLERS; c++) {
    pthread_join(callers[c].thread, NULL);
    assert_int_equal(callers[c].status, FA3_OK);
  }
  for (int number = 0; number < TRIALS; number++)
    for (int c = 1; c < CALLERS; c++)
      if (!same_outputs(&callers[0].trials[number], &callers[c].trials[number]))
        fail_msg("trial %d: a call beside others differs", number);
  for (int c = 0; c < CALLERS; c++)
    for (int number = 0; number < TRIALS; number++) trial_free(&callers[c].trials[number]);
}

/* Small enough to be run a hundred times. */
static struct gradient_trial make_gradient_trial(uint64_t number, struct rng *rng) {
  struct spec forward = make_spec(number, rng);
  forward.batch = 1;
  forward.group = forward.heads_k > 1 ? 1 : 2;
  if (forward.max_seqlen_q > 300) forward.max_seqlen_q = 300;
  if (forward.max_seqlen_k > 400) forward.max_seqlen_k = 400;
  struct gradient_spec spec = gradient_spec_random(&forward, rng);
  spec.flags = FA3_DETERMINISTIC;
  return gradient_trial_new(&spec, rng);
}

/* A hundred runs, on numbers of threads that are more and fewer than there are processors. */
static void test_deterministic_gradients(void **state) {
  (void)state;
  static const int32_t threads[] = {1, 2, 3, 8, 0};
  enum { THREADS = sizeof threads / sizeof *threads, RUNS = 100 };
  for (uint64_t number = 0; number < THREADS; number++) {
    struct rng rng;
    struct gradient_trial trial = make_gradient_trial(number, &rng);
    trial.args.num_threads = threads[number];
    gradient_trial_run(&trial, &rng);
    char *first = gradient_trial_copy(&trial);
    for (int i = 1; i < RUNS; i++) {
      gradient_trial_reset(&trial);
      assert_int_equal(fa3_backward(&trial.args), FA3_OK);
      if (gradient_trial_equals(&trial, first)) continue;
      char text[768];
      gradient_spec_print(&trial.spec, text, sizeof text);
      fail_msg("run %d on %d threads differs from the first: %s", i, threads[number], text);
    }
    free(first);
    gradient_trial_free(&trial);
  }
}

struct gradient_caller {
  struct gradient_trial trials[TRIALS];
  pthread_t thread;
  fa3_status status;
};

static void *call_all_gradients(void *argument) {
  struct gradient_caller *caller = argument;
  for (int number = 0; number < TRIALS && !caller->status; number++)
    caller->status = fa3_backward(&caller->trials[number].args);
  return NULL;
}

/* Each with its own gradients and workspace, while the first of them was alone. */
static void test_gradients_at_once(void **state) {
  (void)state;
  static struct gradient_caller callers[CALLERS];
  char *alone[TRIALS];
  for (int c = 0; c < CALLERS; c++)
    for (int number = 0; number < TRIALS; number++) {
      struct rng rng;
      struct gradient_trial *trial = &callers[c].trials[number];
      *trial = make_gradient_trial((uint64_t)number, &rng);
      gradient_trial_run(trial, &rng);
      if (c == 0) alone[number] = gradient_trial_copy(trial);
      gradient_trial_reset(trial);
    }
  for (int c = 0; c < CALLERS; c++)
    assert_int_equal(pthread_create(&callers[c].thread, NULL, call_all_gradients, &callers[c]), 0);
  for (int c = 0; c < CALLERS; c++) {
    pthread_join(callers[c].thread, NULL);
    assert_int_equal(callers[c].status, FA3_OK);
  }
  for (int number = 0; number < TRIALS; number++) {
    for (int c = 0; c < CALLERS; c++) {
      if (!gradient_trial_equals(&callers[c].trials[number], alone[number]))
        fail_msg("trial %d: a call beside others differs", number);
      gradient_trial_free(&callers[c].trials[number]);
    }
    free(alone[number]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_any_number_of_threads),
      cmocka_unit_test(test_calls_at_once),
      cmocka_unit_test(test_deterministic_gradients),
      cmocka_unit_test(test_gradients_at_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
