/* A call in slices, cut anywhere, gives what the whole call is to give, and writes no more. */
#include "slice.h"

#include <stdlib.h>

#include "attention.h"
#include "gradient_trial.h"
#include "library.h"
#include "test.h"
#include "trial.h"

/* Cuts are the subject, not long sequences or threads. */
enum { TRIALS = 100, MAX_SEQLEN = 80 };

struct workspace {
  void *data;
  size_t size;
};

static void run_slice(fa3_forward_args *args, struct workspace *workspace) {
  args->workspace = workspace->data;
  args->workspace_size = workspace->size;
  if (library_forward(args)) fail_msg("%s", fa3_last_error());
  workspace->data = args->workspace;
  workspace->size = args->workspace_size;
}

static void run_sequences(const fa3_forward_args *args, struct rng *rng,
                          struct workspace *workspace) {
  int64_t batch = slice_batch(args);
  size_t size = (size_t)(batch + 1) * sizeof(int32_t);
  int32_t *starts_q = malloc(size);
  int32_t *starts_k = malloc(size);
  assert_true(starts_q && starts_k);
  for (int64_t begin = 0, end; begin < batch; begin = end) {
    fa3_forward_args cut;
    end = rng_between(rng, begin + 1, batch);
    slice_sequences(args, begin, end, starts_q, starts_k, &cut);
    run_slice(&cut, workspace);
  }
  free(starts_q);
  free(starts_k);
}

static bool sliceable(const fa3_forward_args *args) {
  const int64_t limit = (int64_t)1 << 59;
  if (!args->diagonal.rank) return true;
  for (int64_t b = 0; b < slice_batch(args); b++) {
    int64_t diagonal = ((const int64_t *)args->diagonal.data)[b];
    if (diagonal > limit || diagonal < -limit) return false;
  }
  return true;
}

static void run_rows(const fa3_forward_args *args, struct rng *rng, struct workspace *workspace) {
  int64_t heads = args->key.shape[args->key.rank - 2];
  for (int64_t batch = 0; batch < slice_batch(args); batch++) {
    struct slice_sequence sequence = slice_sequence(args, batch);
    for (int64_t head = 0, next_head; head < heads; head = next_head) {
      next_head = rng_between(rng, head + 1, heads);
      for (int64_t row = 0, next_row; row < sequence.rows; row = next_row) {
        struct slice slice;
        next_row = rng_between(rng, row + 1, sequence.rows);
        slice_rows(args, &sequence, head, next_head, row, next_row, &slice);
        run_slice(&slice.args, workspace);
      }
    }
  }
}

static void run_trials(void (*run)(const fa3_forward_args *, struct rng *, struct workspace *)) {
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct workspace workspace = {0};
    struct rng rng = rng_for(number);
    struct spec spec = spec_random(&rng);
    if (spec.max_seqlen_q > MAX_SEQLEN) spec.max_seqlen_q = MAX_SEQLEN;
    if (spec.max_seqlen_k > MAX_SEQLEN) spec.max_seqlen_k = MAX_SEQLEN;
    spec.num_threads = 1;
    struct trial trial = trial_new(&spec, &rng);
    if (sliceable(&trial.args)) {
      run(&trial.args, &rng, &workspace);
      (void)trial_check(&trial, &rng, 1e5);
    }
    trial_free(&trial);
    free(workspace.data);
  }
}

static void test_sequences(void **state) {
  (void)state;
  run_trials(run_sequences);
}

static void test_rows(void **state) {
  (void)state;
  run_trials(run_rows);
}

static void test_heads(void **state) {
  (void)state;
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    struct spec forward = spec_random(&rng);
    if (forward.max_seqlen_q > MAX_SEQLEN) forward.max_seqlen_q = MAX_SEQLEN;
    if (forward.max_seqlen_k > MAX_SEQLEN) forward.max_seqlen_k = MAX_SEQLEN;
    forward.num_threads = 1;
    const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    const int64_t heads = trial.args.key.shape[trial.args.key.rank - 2];
    fa3_backward_args cut = trial.args;
    for (int64_t head = 0, next; head < heads; head = next) {
      const struct workspace workspace = {cut.workspace, cut.workspace_size};
      next = rng_between(&rng, head + 1, heads);
      slice_heads(&trial.args, head, next, &cut);
      cut.workspace = workspace.data;
      cut.workspace_size = workspace.size;
      if (library_backward(&cut)) fail_msg("%s", fa3_last_error());
    }
    (void)gradient_trial_check(&trial, &rng, 1e5);
    gradient_trial_free(&trial);
    free(cut.workspace);
  }
}

/* The sum over any cut is the whole, and that is the number of visible pairs. */
static void test_flops(void **state) {
  (void)state;
  fa3_forward_args args = {.query = fa3_dense(NULL, FA3_FLOAT32, 1, 5, 2, 8),
                           .key = fa3_dense(NULL, FA3_FLOAT32, 1, 7, 1, 8),
                           .value = fa3_dense(NULL, FA3_FLOAT32, 1, 7, 1, 16)};
  const double pair = 2 * (8 + 16);
  struct slice_sequence sequence = slice_sequence(&args, 0);
  assert_true(slice_flops(&args, &sequence, 0, 5) == 35 * pair);
  args.flags = FA3_CAUSAL; /* 3, 4, 5, 6 and 7 keys */
  assert_true(slice_flops(&args, &sequence, 0, 5) == 25 * pair);
  assert_true(slice_flops(&args, &sequence, 0, 2) == 7 * pair);
  args.flags = FA3_WINDOW; /* 1 + 2 + 1 keys, the last row has none to its right */
  args.window_left = 1;
  args.window_right = 1;
  assert_true(slice_flops(&args, &sequence, 4, 5) == 2 * pair);
  assert_true(slice_flops(&args, &sequence, 3, 4) == 3 * pair);
  args.window_left = -1;
  args.window_right = INT64_MAX;
  assert_true(slice_flops(&args, &sequence, 0, 5) == 35 * pair);
  assert_true(attention_flops(&args) == 70 * pair);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_sequences), cmocka_unit_test(test_rows),
                                     cmocka_unit_test(test_heads), cmocka_unit_test(test_flops)};
  return cmocka_run_group_tests_name("slice", tests, NULL, NULL);
}
