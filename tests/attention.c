/* fa3_forward on random requests of every kind against the float64 reference, at the processor
 * level that FA3_CPU_LEVEL names. FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of it. */
#include "level.h"
#include "sanitized.h"
#include "test.h"
#include "trial.h"
#include "trials.h"

enum { TRIALS = 300 };

/* Products of a query and a key that one trial may compare. */
static const double pairs = SANITIZED ? 4000 : 40000;

static void run_spec(uint64_t number, struct spec (*draw)(struct rng *)) {
  struct rng rng = rng_for(number);
  struct spec spec = draw(&rng);
  spec_print(&spec, trials_begin(number), TRIALS_TEXT);
  struct trial trial = trial_new(&spec, &rng);
  trial_run(&trial, &rng);
  trials_end(spec.dtype, trial_check(&trial, &rng, pairs));
  trial_free(&trial);
}

static void run(uint64_t number) {
  run_spec(number, spec_random);
}

static void run_extreme(uint64_t number) {
  run_spec(number, spec_random_extreme);
}

static void test_random_trials(void **state) {
  (void)state;
  trials_run(run, 0, 1, TRIALS);
}

static void test_extreme_trials(void **state) {
  (void)state;
  trials_run(run_extreme, 0, 1, TRIALS);
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_random_trials, trials_print),
      cmocka_unit_test_teardown(test_extreme_trials, trials_print),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
