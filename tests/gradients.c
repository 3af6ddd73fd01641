/* fa3_backward on random requests of every kind against the float64 reference, at the processor
 * level that FA3_CPU_LEVEL names. FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "gradient_trial.h"
#include "level.h"
#include "test.h"

enum { TRIALS = 200 };

/* Products of a query and a key that one trial may compare. */
static const double pairs = 10000;

static double worst[FA3_BFLOAT16 + 1]; /* error as a fraction of its bound, by dtype */
static char under_way[768];            /* the trial; empty between trials */

static void run(uint64_t number) {
  struct rng rng = rng_for(number);
  const struct spec forward = spec_random(&rng);
  const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
  int length = snprintf(under_way, sizeof under_way, "FA3_TEST_TRIAL=%" PRIu64 ": ", number);
  gradient_spec_print(&spec, under_way + length, sizeof under_way - (size_t)length);
  struct gradient_trial trial = gradient_trial_new(&spec, &rng);
  gradient_trial_run(&trial, &rng);
  double ratio = gradient_trial_check(&trial, &rng, pairs);
  if (ratio > worst[forward.dtype]) worst[forward.dtype] = ratio;
  gradient_trial_free(&trial);
  under_way[0] = 0;
}

static void test_random_trials(void **state) {
  (void)state;
  const char *only = getenv("FA3_TEST_TRIAL");
  if (only) {
    run(strtoull(only, NULL, 0));
    return;
  }
  for (uint64_t number = 0; number < TRIALS; number++) run(number);
  printf("largest error as a fraction of its bound: float32 %.3f, float16 %.3f, bfloat16 %.3f\n",
         worst[FA3_FLOAT32], worst[FA3_FLOAT16], worst[FA3_BFLOAT16]);
}

static int print_trial(void **state) {
  (void)state;
  if (under_way[0]) printf("%s\n", under_way);
  return 0;
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_random_trials, print_trial),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
