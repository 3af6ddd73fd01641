/* A call in slices, cut anywhere, gives what the whole call is to give, and writes no more. */
#include "slice.h"

#include <stdlib.h>

#include "gradient_trial.h"
#include "test.h"

/* Cuts are the subject, not long sequences or threads. */
enum { TRIALS = 100, MAX_SEQLEN = 80 };

static struct spec short_spec(struct rng *rng) {
  struct spec spec = spec_random(rng);
  if (spec.max_seqlen_q > MAX_SEQLEN) spec.max_seqlen_q = MAX_SEQLEN;
  if (spec.max_seqlen_k > MAX_SEQLEN) spec.max_seqlen_k = MAX_SEQLEN;
  spec.num_threads = 1;
  spec.codes = false; /* a slice takes no scales */
  return spec;
}

/* Sequences and heads, each cut at random; whether there was more than one sequence to cut. */
static bool run_in_slices(const struct call *call, struct rng *rng) {
  const struct slice whole = slice_whole(call);
  struct call cut = {0};
  for (int64_t batch = 0, next; batch < whole.batch_end; batch = next) {
    next = rng_between(rng, batch + 1, whole.batch_end);
    for (int64_t head = 0, next_head; head < whole.head_end; head = next_head) {
      next_head = rng_between(rng, head + 1, whole.head_end);
      const struct slice slice = {batch, next, head, next_head};
      slice_call(call, &slice, &cut);
      if (library_run(&cut)) fail_msg("%s", fa3_last_error());
    }
  }
  library_free_workspace(&cut);
  return whole.batch_end > 1;
}

static void test_forward(void **state) {
  (void)state;
  int cut = 0;
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    const struct spec spec = short_spec(&rng);
    struct trial trial = trial_new(&spec, &rng);
    const struct call call = {.phase = FA3_FORWARD, .args.forward = trial.args};
    cut += run_in_slices(&call, &rng);
    (void)trial_check(&trial, &rng, 1e5);
    trial_free(&trial);
  }
  assert_in_range(cut, 1, TRIALS - 1);
}

static void test_backward(void **state) {
  (void)state;
  int cut = 0;
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    const struct spec forward = short_spec(&rng);
    const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    const struct call call = {.phase = FA3_BACKWARD, .args.backward = trial.args};
    cut += run_in_slices(&call, &rng);
    (void)gradient_trial_check(&trial, &rng, 1e5);
    gradient_trial_free(&trial);
  }
  assert_in_range(cut, 1, TRIALS - 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_forward),
                                     cmocka_unit_test(test_backward)};
  return cmocka_run_group_tests_name("slice", tests, NULL, NULL);
}
