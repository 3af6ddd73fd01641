/* Of either pass: the workspace's size never falls when a dimension grows, and its contents on
 * entry do not matter. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "gradient_trial.h"
#include "test.h"

enum { TRIALS = 2000 };

/* Made from sizes alone: the workspace's functions need no data. */
static fa3_forward_args make_args(const struct spec *spec) {
  fa3_forward_args args = {.struct_size = sizeof args, .num_threads = spec->num_threads};
  int64_t heads_q = spec->heads_k * spec->group;
  args.query =
      fa3_dense(NULL, spec->dtype, spec->batch, spec->max_seqlen_q, heads_q, spec->head_dim);
  args.key =
      fa3_dense(NULL, spec->dtype, spec->batch, spec->max_seqlen_k, spec->heads_k, spec->head_dim);
  args.value = fa3_dense(NULL, spec->dtype, spec->batch, spec->max_seqlen_k, spec->heads_k,
                         spec->value_head_dim);
  args.output = fa3_dense(NULL, spec->output_dtype, spec->batch, spec->max_seqlen_q, heads_q,
                          spec->value_head_dim);
  args.flags = spec->flags;
  args.window_left = spec->window_left;
  args.window_right = spec->window_right;
  args.softmax_scale = spec->scale;
  args.softcap = spec->softcap;
  return args;
}

static size_t forward_size(const struct spec *spec) {
  const fa3_forward_args args = make_args(spec);
  size_t bytes = 0;
  if (fa3_forward_workspace(&args, &bytes)) fail_msg("%s", fa3_last_error());
  return bytes;
}

/* Gradients in 16 bits, which may need more room for their sums. */
static size_t backward_size(const struct spec *spec) {
  const fa3_forward_args forward = make_args(spec);
  const int64_t *shape = forward.query.shape;
  const fa3_backward_args args = {.struct_size = sizeof args,
                                  .query = forward.query,
                                  .key = forward.key,
                                  .value = forward.value,
                                  .output = forward.output,
                                  .lse = {.dtype = FA3_FLOAT32,
                                          .rank = 3,
                                          .shape = {shape[0], shape[2], shape[1]},
                                          .strides = {shape[2] * shape[1], shape[1], 1}},
                                  .grad_output = forward.output,
                                  .grad_query = forward.query,
                                  .grad_key = forward.key,
                                  .grad_value = forward.value,
                                  .flags = forward.flags,
                                  .softmax_scale = forward.softmax_scale,
                                  .softcap = forward.softcap,
                                  .num_threads = forward.num_threads,
                                  .window_left = forward.window_left,
                                  .window_right = forward.window_right};
  size_t bytes = 0;
  if (fa3_backward_workspace(&args, &bytes)) fail_msg("%s", fa3_last_error());
  return bytes;
}

static void check_size_never_falls(size_t (*workspace_size)(const struct spec *spec)) {
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    struct spec spec = spec_random(&rng);
    struct {
      int64_t *dimension;
      int64_t step;
      int64_t largest;
    } dimensions[] = {{&spec.batch, 1, 1000},
                      {&spec.max_seqlen_q, 1, 1 << 20},
                      {&spec.max_seqlen_k, 1, 1 << 20},
                      {&spec.heads_k, 1, 100},
                      {&spec.group, 1, 100},
                      {&spec.head_dim, 8, 256},
                      {&spec.value_head_dim, 8, 256}};
    enum { DIMENSIONS = sizeof dimensions / sizeof *dimensions };
    size_t before = workspace_size(&spec);
    for (int grown = 0; grown < 20; grown++) {
      int which = (int)rng_between(&rng, 0, DIMENSIONS - 1);
      int64_t *dimension = dimensions[which].dimension;
      *dimension += dimensions[which].step * RNG_PICK(&rng, 1, 1, 2, *dimension / 8 + 1);
      if (*dimension > dimensions[which].largest) *dimension = dimensions[which].largest;
      size_t after = workspace_size(&spec);
      if (after < before) {
        char text[512];
        spec_print(&spec, text, sizeof text);
        fail_msg("%zu bytes, less than %zu before dimension %d grew: %s", after, before, which,
                 text);
      }
      before = after;
    }
  }
}

static void test_size_never_falls(void **state) {
  (void)state;
  check_size_never_falls(forward_size);
  check_size_never_falls(backward_size);
}

/* The bytes that an earlier call, or nobody, left there. */
static void test_contents_do_not_matter(void **state) {
  (void)state;
  static const int contents[] = {0x00, 0x7f, 0xff};
  for (uint64_t number = 0; number < 20; number++) {
    struct rng rng = rng_for(5000 + number);
    struct spec spec = spec_random(&rng);
    struct trial trial = trial_new(&spec, &rng);
    trial_run(&trial, &rng);
    size_t size = trial.buffers[TENSOR_output].size;
    char *first = malloc(size + 1);
    assert_non_null(first);
    if (size) memcpy(first, trial.buffers[TENSOR_output].data, size);
    for (int i = 0; i < 3; i++) {
      memset(trial.args.workspace, contents[i], trial.args.workspace_size);
      assert_int_equal(fa3_forward(&trial.args), FA3_OK);
      if (size) assert_memory_equal(first, trial.buffers[TENSOR_output].data, size);
    }
    free(first);
    trial_free(&trial);
  }
}

static void test_contents_do_not_matter_backward(void **state) {
  (void)state;
  static const int contents[] = {0x00, 0x7f, 0xff};
  for (uint64_t number = 0; number < 20; number++) {
    struct rng rng = rng_for(6000 + number);
    const struct spec forward = spec_random(&rng);
    const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    gradient_trial_run(&trial, &rng);
    char *first = gradient_trial_copy(&trial);
    for (int i = 0; i < 3; i++) {
      gradient_trial_reset(&trial);
      memset(trial.args.workspace, contents[i], trial.args.workspace_size);
      assert_int_equal(fa3_backward(&trial.args), FA3_OK);
      assert_true(gradient_trial_equals(&trial, first));
    }
    free(first);
    gradient_trial_free(&trial);
  }
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_size_never_falls),
      cmocka_unit_test(test_contents_do_not_matter),
      cmocka_unit_test(test_contents_do_not_matter_backward),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
