/* fa3_backward on random requests of every kind against the float64 reference, at the processor
 * level that FA3_CPU_LEVEL names. FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of it. */
#include "gradient_trial.h"
#include "level.h"
#include "sanitized.h"
#include "test.h"
#include "trials.h"

enum { TRIALS = 200 };

/* Products of a query and a key that one trial may compare. */
static const double pairs = SANITIZED ? 1000 : 10000;

static void run(uint64_t number) {
  struct rng rng = rng_for(number);
  const bool extreme = rng_chance(&rng, 0.2);
  const struct spec forward = extreme ? spec_random_extreme(&rng) : spec_random(&rng);
  const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
  gradient_spec_print(&spec, trials_begin(number), TRIALS_TEXT);
  struct gradient_trial trial = gradient_trial_new(&spec, &rng);
  gradient_trial_run(&trial, &rng);
  trials_end(forward.dtype, gradient_trial_check(&trial, &rng, pairs));
  gradient_trial_free(&trial);
}

static void test_random_trials(void **state) {
  (void)state;
  trials_run(run, 0, 1, TRIALS);
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_random_trials, trials_print),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
