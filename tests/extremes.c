/* The backward pass where numbers are large: rows that one enormous score decides, an lse far below
 * the scores, and the smallest softcap; at the processor level that FA3_CPU_LEVEL names. (The
 * forward pass at such scores is tests/attention.c's.) */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "level.h"
#include "reference.h"
#include "rng.h"
#include "tensor.h"
#include "test.h"

enum { SEQLEN = 50, HEAD_DIM = 64, ELEMENTS = SEQLEN * HEAD_DIM, WORKSPACE = 8 << 20 };
enum { QUERY, KEY, VALUE, OUTPUT, GRAD_OUTPUT, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, TENSORS };

struct attention {
  fa3_dtype dtype;
  fa3_dtype output_dtype; /* and grad_output's */
  char data[TENSORS][ELEMENTS * sizeof(float)];
  float lse[SEQLEN];
  char *workspace;
  fa3_backward_args args;
};

static fa3_dtype dtype_of(const struct attention *a, int which) {
  return which == OUTPUT || which == GRAD_OUTPUT ? a->output_dtype : a->dtype;
}

static fa3_tensor tensor_of(const struct attention *a, int which) {
  return fa3_dense(a->data[which], dtype_of(a, which), 1, SEQLEN, 1, HEAD_DIM);
}

static double element(const struct attention *a, int which, int64_t index) {
  const fa3_tensor tensor = tensor_of(a, which);
  return reference_load(&tensor, index);
}

static void set_element(const struct attention *a, int which, int64_t index, double value) {
  const fa3_tensor tensor = tensor_of(a, which);
  tensor_store(&tensor, index, value);
}

/* Query i is key `chosen(i)`'s direction, `size` long: its score is size^2, all others are 0. */
static int64_t chosen(int64_t i) {
  return i * 7 % SEQLEN;
}

static struct attention *attention_new(fa3_dtype dtype, fa3_dtype output_dtype, double size) {
  struct attention *a = calloc(1, sizeof *a);
  assert_non_null(a);
  struct rng rng = rng_for(1);
  a->dtype = dtype;
  a->output_dtype = output_dtype;
  for (int64_t i = 0; i < SEQLEN; i++) {
    set_element(a, QUERY, i * HEAD_DIM + chosen(i), size);
    set_element(a, KEY, i * HEAD_DIM + i, size);
  }
  for (int64_t e = 0; e < ELEMENTS; e++) {
    set_element(a, VALUE, e, rng_normal(&rng));
    set_element(a, GRAD_OUTPUT, e, rng_normal(&rng));
  }
  a->workspace = malloc(WORKSPACE);
  assert_non_null(a->workspace);
  a->args = (fa3_backward_args){.struct_size = sizeof a->args,
                                .lse = fa3_lse(a->lse, 1, 1, SEQLEN),
                                .flags = FA3_SCALE,
                                .softmax_scale = 1,
                                .num_threads = 1,
                                .workspace = a->workspace,
                                .workspace_size = WORKSPACE};
  fa3_tensor *const tensors[TENSORS] = {
      &a->args.query,       &a->args.key,        &a->args.value,    &a->args.output,
      &a->args.grad_output, &a->args.grad_query, &a->args.grad_key, &a->args.grad_value};
  for (int t = 0; t < TENSORS; t++) *tensors[t] = tensor_of(a, t);
  return a;
}

static void attention_free(struct attention *a) {
  free(a->workspace);
  free(a);
}

static void forward(const struct attention *a) {
  const fa3_forward_args args = {.struct_size = sizeof args,
                                 .query = a->args.query,
                                 .key = a->args.key,
                                 .value = a->args.value,
                                 .output = a->args.output,
                                 .lse = a->args.lse,
                                 .flags = a->args.flags,
                                 .softmax_scale = a->args.softmax_scale,
                                 .softcap = a->args.softcap,
                                 .num_threads = 1,
                                 .workspace = a->workspace,
                                 .workspace_size = WORKSPACE};
  if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
}

static void backward(struct attention *a) {
  memset(a->data[GRAD_QUERY], 0xff, (GRAD_VALUE + 1 - GRAD_QUERY) * sizeof a->data[0]);
  if (fa3_backward(&a->args)) fail_msg("%s", fa3_last_error());
}

static const fa3_dtype dtypes[] = {FA3_FLOAT32, FA3_BFLOAT16};
static const double sizes[] = {1e2, 1.1e4, 3.3e4, 1.3e7, 1.7e10, 1.3e15};

static void expect_finite(const struct attention *a, int which, const char *name) {
  for (int64_t e = 0; e < ELEMENTS; e++)
    if (!isfinite(element(a, which, e)))
      fail_msg("%s[%d] is %g", name, (int)e, element(a, which, e));
}

/* P is 1 for the chosen key and 0 for all others, so the output is its value, and grad_value the
 * sum of what chose it. */
static void test_rows_that_one_score_decides(void **state) {
  (void)state;
  for (size_t n = 0; n < 2 * sizeof sizes / sizeof *sizes; n++) {
    struct attention *a = attention_new(dtypes[n % 2], dtypes[n % 2], sizes[n / 2]);
    forward(a);
    backward(a);
    for (int64_t i = 0; i < SEQLEN; i++)
      for (int64_t d = 0; d < HEAD_DIM; d++) {
        const double output = element(a, OUTPUT, i * HEAD_DIM + d);
        const double value = element(a, VALUE, chosen(i) * HEAD_DIM + d);
        const double grad_output = element(a, GRAD_OUTPUT, i * HEAD_DIM + d);
        const double grad_value = element(a, GRAD_VALUE, chosen(i) * HEAD_DIM + d);
        if (!(output == value))
          fail_msg("scores of %g: output[%d, %d] is %g: expected %g", sizes[n / 2] * sizes[n / 2],
                   (int)i, (int)d, output, value);
        if (!(grad_value == grad_output))
          fail_msg("scores of %g: grad_value[%d, %d] is %g: expected %g",
                   sizes[n / 2] * sizes[n / 2], (int)chosen(i), (int)d, grad_value, grad_output);
      }
    expect_finite(a, GRAD_QUERY, "grad_query");
    expect_finite(a, GRAD_KEY, "grad_key");
    attention_free(a);
  }
}

/* Whether one score decides the row, however all are rounded: 66 roundings of a score's terms, and
 * as many of the other's, each twice what they can be; then 49 others below it by 24 are nothing in
 * a float32 sum. */
static bool is_decided(const struct attention *a, int64_t query) {
  const double scale = (double)a->args.softmax_scale;
  double largest = -INFINITY, second = -INFINITY, terms = 0;
  for (int64_t j = 0; j < SEQLEN; j++) {
    double score = 0, magnitude = 0;
    for (int64_t d = 0; d < HEAD_DIM; d++) {
      const double term =
          scale * element(a, QUERY, query * HEAD_DIM + d) * element(a, KEY, j * HEAD_DIM + d);
      score += term;
      magnitude += fabs(term);
    }
    second = fmax(second, fmin(score, largest));
    largest = fmax(largest, score);
    terms = fmax(terms, magnitude);
  }
  return largest - second > 24 + 4 * 66 * 0x1p-24 * terms;
}

/* Scores are not exact here, and the last digit of one is a number. P of a row's largest is still
 * exactly 1, and all others are 0: then grad_value, summed over the keys, is grad_output summed
 * over the queries. Each sum has up to SEQLEN roundings in float32, and bfloat16 takes half of its
 * last place. Of the few rows that two scores share, which may be equal once they are rounded, P
 * may have any sum up to 3. */
static void check_inexact_scores(fa3_dtype dtype, fa3_dtype output_dtype, int64_t queries,
                                 double size) {
  struct attention *a = attention_new(dtype, output_dtype, 1);
  struct rng rng = rng_for(2);
  for (int which = QUERY; which <= KEY; which++)
    for (int64_t e = 0; e < ELEMENTS; e++) set_element(a, which, e, rng_normal(&rng));
  a->args.softmax_scale = (float)(size * size);
  a->args.lse = fa3_lse(a->lse, 1, 1, queries);
  a->args.query.shape[1] = a->args.output.shape[1] = queries;
  a->args.grad_output.shape[1] = a->args.grad_query.shape[1] = queries;
  forward(a);
  backward(a);
  bool decided[SEQLEN];
  for (int64_t i = 0; i < queries; i++) decided[i] = is_decided(a, i);
  for (int64_t d = 0; d < HEAD_DIM; d++) {
    double value = 0, output = 0, magnitude = 0, shared = 0;
    for (int64_t j = 0; j < SEQLEN; j++) value += element(a, GRAD_VALUE, j * HEAD_DIM + d);
    for (int64_t i = 0; i < queries; i++) {
      const double grad_output = element(a, GRAD_OUTPUT, i * HEAD_DIM + d);
      output += grad_output;
      magnitude += fabs(grad_output);
      if (!decided[i]) shared += 2 * fabs(grad_output);
    }
    const double last_place = dtype == FA3_FLOAT32 ? 0 : 0x1p-8;
    if (!(fabs(value - output) <= (last_place + SEQLEN * 0x1p-24) * (magnitude + shared) + shared))
      fail_msg("scores of %g: grad_value's column %d has the sum %g: expected %g",
               (double)a->args.softmax_scale, (int)d, value, output);
  }
  for (int64_t e = 0; e < queries * HEAD_DIM; e++) assert_true(isfinite(element(a, GRAD_QUERY, e)));
  expect_finite(a, GRAD_KEY, "grad_key");
  attention_free(a);
}

/* Few queries go another way than many, by which scores are summed in another order; and gradients
 * of float32 outputs are computed in float32, whatever the inputs are. */
static void test_scores_that_are_not_exact(void **state) {
  (void)state;
  for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
    for (int64_t queries = 3; queries <= SEQLEN; queries += SEQLEN - 3) {
      check_inexact_scores(FA3_FLOAT32, FA3_FLOAT32, queries, sizes[n]);
      check_inexact_scores(FA3_BFLOAT16, FA3_BFLOAT16, queries, sizes[n]);
      check_inexact_scores(FA3_BFLOAT16, FA3_FLOAT32, queries, sizes[n]);
    }
}

/* P of the chosen key is exp(below), past the largest float from 88.73 on: then infinity. */
static void test_lse_below_the_scores(void **state) {
  (void)state;
  static const float belows[] = {10, 80, 88, 89, 100, 1000, 1e10f};
  for (size_t n = 0; n < 2 * sizeof belows / sizeof *belows; n++) {
    struct attention *a = attention_new(dtypes[n % 2], dtypes[n % 2], 4);
    const float below = belows[n / 2];
    forward(a);
    for (int64_t i = 0; i < SEQLEN; i++) a->lse[i] = 16 - below;
    backward(a);
    for (int64_t i = 0; i < SEQLEN; i++)
      for (int64_t d = 0; d < HEAD_DIM; d++) {
        const double got = element(a, GRAD_VALUE, chosen(i) * HEAD_DIM + d);
        double sum = 0, magnitude = 0; /* the other keys' scores are 0 */
        for (int64_t j = 0; j < SEQLEN; j++) {
          const double term = exp((j == i ? 16 : 0) - (16 - (double)below)) *
                              element(a, GRAD_OUTPUT, j * HEAD_DIM + d);
          sum += term;
          magnitude += fabs(term);
        }
        /* P or a term that is no float any more makes it infinite or NaN. */
        if (below > 87 && !isfinite(got)) continue;
        /* Of P the exponent of 2, up to 128, is rounded to 2^-18 twice (the product, log2(e)), the
         * power by 2^-23, and the sum has SEQLEN roundings: all together below 2^-16. bfloat16
         * rounds P and the sum by half of its last place. */
        const double rounding = 0x1p-16 + (a->dtype == FA3_FLOAT32 ? 0 : 0x1p-7);
        if (!(fabs(got - sum) <= magnitude * rounding))
          fail_msg("lse %g below: grad_value[%d, %d] is %g: expected %g", (double)below,
                   (int)chosen(i), (int)d, got, sum);
      }
    attention_free(a);
  }
}

static void test_smallest_softcap(void **state) {
  (void)state;
  for (int n = 0; n < 2; n++) {
    struct attention *a = attention_new(dtypes[n], dtypes[n], 4);
    a->args.softcap = FLT_MIN;
    forward(a);
    backward(a);
    expect_finite(a, OUTPUT, "output");
    for (int which = GRAD_QUERY; which <= GRAD_VALUE; which++)
      expect_finite(a, which, "a gradient");
    attention_free(a);
  }
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rows_that_one_score_decides),
      cmocka_unit_test(test_scores_that_are_not_exact),
      cmocka_unit_test(test_lse_below_the_scores),
      cmocka_unit_test(test_smallest_softcap),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
