/* fa3_forward or fa3_backward on a GPU, on random requests of every kind, against the float64
 * reference; each call is made twice and must give the same bits.
 *   FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of it, FA3_GPU_TRIALS says how many. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu_trial.h"
#include "test.h"

enum { TRIALS = 3000, MAX_PROCESSES = 16 };

static const size_t arena_bytes = (size_t)512 << 20;
static const double pairs = 60000; /* products of a query and a key that one trial may compare */

static bool backward;
static double worst[FA3_BFLOAT16 + 1]; /* error as a fraction of its bound, by dtype */
static char under_way[800];            /* the trial; empty between trials */
static int trials = TRIALS;
static int process, processes = 1; /* the trials are shared out */
static int refused;
static struct gpu_arena arena;

static void run(uint64_t number) {
  static struct gpu_trial trial;
  struct rng rng = rng_for(number);
  const struct gradient_spec spec = gpu_spec_random(backward, &rng);
  int length = snprintf(under_way, sizeof under_way, "FA3_TEST_TRIAL=%" PRIu64 ": ", number);
  gradient_spec_print(&spec, under_way + length, sizeof under_way - (size_t)length);
  if (gpu_spec_supported(&spec, backward)) {
    if (!refused++) printf("refused: %s\n%s\n", fa3_last_error(), under_way);
    return;
  }
  gpu_trial_new(&trial, &spec, backward, &arena, NULL, &rng);
  mirror_upload(&trial.mirror);
  mirror_run(&trial.mirror);
  mirror_download(&trial.mirror);
  double ratio = gpu_trial_check(&trial, &rng, pairs);
  if (ratio > worst[spec.forward.dtype]) worst[spec.forward.dtype] = ratio;
  char *outputs = mirror_copy_outputs(&trial.mirror);
  mirror_repeat(&trial.mirror, outputs);
  free(outputs);
  gpu_trial_free(&trial);
}

static void test_random_trials(void **state) {
  (void)state;
  const char *only = getenv("FA3_TEST_TRIAL");
  arena = gpu_arena_new(arena_bytes);
  if (only)
    run(strtoull(only, NULL, 0));
  else
    for (int number = process; number < trials; number += processes) run((uint64_t)number);
  under_way[0] = 0;
  printf("largest error as a fraction of its bound: float16 %.3f, bfloat16 %.3f\n",
         worst[FA3_FLOAT16], worst[FA3_BFLOAT16]);
  if (refused) fail_msg("%d trials were refused", refused);
}

static int print_trial(void **state) {
  (void)state;
  if (under_way[0]) printf("%s\n", under_way);
  return 0;
}

static int run_share(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_random_trials, print_trial),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv) {
  if (argc != 2 || (strcmp(argv[1], "forward") != 0 && strcmp(argv[1], "backward") != 0)) {
    (void)fprintf(stderr, "usage: %s forward|backward\n", argv[0]);
    return 2;
  }
  backward = strcmp(argv[1], "backward") == 0;
  rng_run_seed();
  const char *count = getenv("FA3_GPU_TRIALS");
  if (count) trials = (int)strtol(count, NULL, 10);
  /* The reference takes most of the time: a process for each processor. CUDA starts after fork. */
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  processes = processors > MAX_PROCESSES ? MAX_PROCESSES : (int)processors;
  if (getenv("FA3_TEST_TRIAL") || trials < MAX_PROCESSES) processes = 1;
  (void)fflush(stdout);
  for (process = 1; process < processes; process++)
    if (fork() == 0) {
      int result = run_share();
      (void)fflush(stdout);
      _exit(result);
    }
  process = 0;
  int result = run_share(), status;
  while (wait(&status) > 0)
    if (!result) result = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  if (result == 0) printf("passed: %d trials\n", trials);
  return result;
}
