/* fa3_quantize on random calls, by its definition. */
#include "quantize_trial.h"
#include "test.h"

static void test_random_calls(void **state) {
  (void)state;
  for (uint64_t number = 0; number < 120; number++) {
    struct rng rng = rng_for(number);
    struct quantize_trial trial;
    quantize_trial_make(&trial, &rng, 60);
    if (fa3_quantize(&trial.args))
      fail_msg("call %llu: %s", (unsigned long long)number, fa3_last_error());
    quantize_trial_check(&trial);
    quantize_trial_free(&trial);
  }
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_calls)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
