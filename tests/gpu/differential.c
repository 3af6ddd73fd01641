/* fa3_forward or fa3_backward on a GPU, on random requests of every kind, against the float64
 * reference; each call is made twice and must give the same bits. Some are made with lengths that
 * are too large, too. FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of it, FA3_GPU_TRIALS
 * says how many. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu_trial.h"
#include "test.h"
#include "trials.h"

enum { TRIALS = 3000, MAX_PROCESSES = 16 };

static const size_t arena_bytes = (size_t)512 << 20;
static const double pairs = 60000; /* products of a query and a key that one trial may compare */

static bool backward;
static int trials;
static int process, processes = 1; /* the trials are shared out */
static int refused;
static struct gpu_arena arena;

static void run(uint64_t number) {
  static struct gpu_trial trial;
  struct rng rng = rng_for(number);
  const struct gradient_spec spec = gpu_spec_random(backward, &rng);
  gradient_spec_print(&spec, trials_begin(number), TRIALS_TEXT);
  if (gpu_spec_supported(&spec, backward)) {
    if (!refused++) {
      printf("refused: %s\n", fa3_last_error());
      trials_print(NULL);
    }
    return;
  }
  gpu_trial_new(&trial, &spec, backward, &arena, NULL, &rng);
  mirror_upload(&trial.mirror);
  mirror_run(&trial.mirror);
  mirror_download(&trial.mirror);
  double ratio = gpu_trial_check(&trial, &rng, pairs);
  char *outputs = mirror_copy_outputs(&trial.mirror);
  mirror_repeat(&trial.mirror, outputs);
  free(outputs);
  /* Lengths beyond the rows that dense tensors have: any result, but nothing else is written, and
   * it ends. */
  const struct spec *lengths = &spec.forward;
  const bool packed =
      (lengths->seqused_q && lengths->packed_q) || (lengths->seqused_k && lengths->packed_k);
  if ((lengths->seqused_q || lengths->seqused_k) && !packed && rng_chance(&rng, 0.3)) {
    mirror_set_lengths(&trial.mirror, rng_chance(&rng, 0.5) ? INT32_MAX : 5000);
    mirror_run(&trial.mirror);
    mirror_download(&trial.mirror);
  }
  gpu_trial_free(&trial);
  trials_end(spec.forward.dtype, ratio);
}

static void test_random_trials(void **state) {
  (void)state;
  arena = gpu_arena_new(arena_bytes);
  trials_run(run, process, processes, trials);
  if (refused) fail_msg("%d trials were refused", refused);
}

static int run_share(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_random_trials, trials_print),
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
  trials = gpu_trials(TRIALS);
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
