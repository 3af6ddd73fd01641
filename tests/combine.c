/* fa3_combine: random calls against float64, and against attention to all keys at once.
 * FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL one trial of it. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "compare.h"
#include "expect.h"
#include "fa3.h"
#include "reference.h"
#include "tensor.h"
#include "test.h"
#include "trials.h"

enum { TRIALS = 200, MOST_SETS = 6, MOST_DIM = 256 };
enum { PARTIAL_OUTPUT, PARTIAL_LSE, OUTPUT, LSE, COMBINED };

static const double u = 0x1p-24;
static const double flushed = 0x1p-126; /* what float32 loses below its normal numbers */

struct combined {
  int64_t sets;
  int64_t batch;
  fa3_combine_args args;
  struct buffer buffers[COMBINED];
};

static int64_t element_of(const fa3_tensor *tensor, int64_t i, int64_t j, int64_t k) {
  return i * tensor->strides[0] + j * tensor->strides[1] + k * tensor->strides[2];
}

/* Partial outputs are NaN where their set has seen no key, unless elements share memory. */
static void fill(const struct combined *c, bool shared, double spread, double distance,
                 struct rng *rng) {
  const fa3_tensor *partial = &c->args.partial_output, *lse = &c->args.partial_lse;
  for (int64_t part = 0; part < partial->shape[0]; part++)
    for (int64_t head = 0; head < partial->shape[2]; head++)
      for (int64_t row = 0; row < partial->shape[1]; row++) {
        const bool unseen = rng_chance(rng, 0.2);
        const int64_t at = element_of(partial, part, row, head);
        tensor_store(lse, element_of(lse, part, head, row),
                     unseen ? -INFINITY : distance * rng_normal(rng));
        for (int64_t d = 0; d < partial->shape[3]; d++)
          tensor_store(partial, at + d, unseen && !shared ? NAN : spread * rng_normal(rng));
      }
}

static void make(struct combined *c, int which, fa3_tensor *tensor, int heads, enum layout layout,
                 struct rng *rng) {
  tensor_layout(tensor, heads, layout, which < OUTPUT, rng);
  tensor_allocate(&c->buffers[which], tensor, rng);
}

static struct combined combined_new(uint64_t number, struct rng *rng) {
  struct combined c = {.sets = rng_between(rng, 0, MOST_SETS), .batch = rng_between(rng, 0, 3)};
  const int64_t rows = rng_between(rng, 0, rng_chance(rng, 0.2) ? 70 : 6);
  const int64_t heads = rng_between(rng, 1, 4), dim = 8 * rng_between(rng, 1, MOST_DIM / 8);
  const fa3_dtype dtype = (fa3_dtype)RNG_PICK(rng, FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16);
  const enum layout layout = (enum layout)rng_between(rng, 0, LAYOUT_COUNT - 1);
  const double spread = dtype == FA3_FLOAT16 ? 1 : pow(10, (double)RNG_PICK(rng, -30, 0, 0, 30));
  const double distance = pow(10, (double)RNG_PICK(rng, -1, 0, 0, 1, 2, 4, 30));
  const int64_t parts = c.sets * c.batch;
  const bool lse = rng_chance(rng, 0.8);
  snprintf(trials_begin(number), TRIALS_TEXT,
           "sets %" PRId64 " batch %" PRId64 " rows %" PRId64 " heads %" PRId64 " dim %" PRId64
           " dtype %d layout %d spread %g distance %g lse %d",
           c.sets, c.batch, rows, heads, dim, dtype, (int)layout, spread, distance, lse);
  c.args = (fa3_combine_args){
      .struct_size = sizeof c.args,
      .partial_output = {.dtype = FA3_FLOAT32, .rank = 4, .shape = {parts, rows, heads, dim}},
      .partial_lse = {.dtype = FA3_FLOAT32, .rank = 3, .shape = {parts, heads, rows}},
      .output = {.dtype = dtype, .rank = 4, .shape = {c.batch, rows, heads, dim}},
      .num_threads = (int32_t)RNG_PICK(rng, 0, 1, 2, 7)};
  make(&c, PARTIAL_OUTPUT, &c.args.partial_output, 2, layout, rng);
  make(&c, PARTIAL_LSE, &c.args.partial_lse, -1, layout, rng);
  make(&c, OUTPUT, &c.args.output, 2, layout, rng);
  if (lse) {
    c.args.lse = (fa3_tensor){.dtype = FA3_FLOAT32, .rank = 3, .shape = {c.batch, heads, rows}};
    make(&c, LSE, &c.args.lse, -1, layout, rng);
  }
  fill(&c, layout == LAYOUT_EXPANDED, spread, distance, rng);
  return c;
}

/* What the sets count for in a row. A weight is exp(d), and d = lse_i - top is rounded once. */
struct weights {
  double top;
  double sum;
  double error; /* of the sum */
  double of_set[MOST_SETS];
  double errors[MOST_SETS];
};

static struct weights weights_of(const struct combined *c, int64_t batch, int64_t row,
                                 int64_t head) {
  const fa3_tensor *tensor = &c->args.partial_lse;
  struct weights weights = {.top = -INFINITY};
  double lse[MOST_SETS];
  for (int64_t set = 0; set < c->sets; set++) {
    lse[set] = reference_load(tensor, element_of(tensor, set * c->batch + batch, head, row));
    weights.top = fmax(weights.top, lse[set]);
  }
  for (int64_t set = 0; set < c->sets && weights.top > -INFINITY; set++) {
    if (lse[set] == -INFINITY) continue;
    const double distance = lse[set] - weights.top;
    weights.of_set[set] = exp(distance);
    weights.errors[set] =
        exp(distance * (1 - u)) * (1 + 8 * u) - weights.of_set[set] + (distance < 0 ? flushed : 0);
    weights.sum += weights.of_set[set];
    weights.error += weights.errors[set];
  }
  weights.error += (double)c->sets * u * (weights.sum + weights.error);
  return weights;
}

static void check_row(const struct combined *c, struct comparison *at) {
  const struct weights weights = weights_of(c, at->batch, at->row, at->head);
  const fa3_tensor *partial = &c->args.partial_output, *output = &c->args.output;
  const double terms = (double)c->sets;
  for (int64_t d = 0; d < output->shape[3]; d++) {
    double sum = 0, magnitude = 0, error = 0;
    for (int64_t set = 0; set < c->sets; set++) {
      if (weights.errors[set] == 0) continue;
      const int64_t from = element_of(partial, set * c->batch + at->batch, at->row, at->head);
      const double x = reference_load(partial, from + d);
      sum += weights.of_set[set] * x;
      magnitude += (weights.of_set[set] + weights.errors[set]) * fabs(x);
      error += weights.errors[set] * fabs(x);
    }
    const double expected = weights.sum > 0 ? sum / weights.sum : 0;
    double bound = 0;
    if (weights.sum > 0)
      bound =
          (error + (terms + 1) * u * magnitude + terms * flushed + fabs(expected) * weights.error) /
              (weights.sum - weights.error) +
          u * fabs(expected) + flushed;
    const int64_t index = element_of(output, at->batch, at->row, at->head) + d;
    compare(at, "output", d, reference_load(output, index), expected,
            reference_stored_bound(output->dtype, expected, bound));
  }
  if (!c->args.lse.dtype) return;
  const double logarithm = log(weights.sum), expected = weights.top + logarithm;
  const double relative = weights.error / (weights.sum - weights.error);
  const int64_t index = element_of(&c->args.lse, at->batch, at->head, at->row);
  compare(at, "lse", 0, reference_load(&c->args.lse, index), weights.sum > 0 ? expected : -INFINITY,
          relative + 4 * u * fabs(logarithm) + 2 * u * fabs(expected));
}

static double check(const struct combined *c) {
  static const char *const names[COMBINED] = {"partial_output", "partial_lse", "output", "lse"};
  struct comparison at = {0};
  const fa3_tensor *output = &c->args.output, *lse = &c->args.lse;
  bool *output_marks = tensor_marks(output), *lse_marks = tensor_marks(lse);
  for (int i = 0; i < COMBINED; i++) buffer_check(&c->buffers[i], names[i]);
  for (at.batch = 0; at.batch < c->batch; at.batch++)
    for (at.row = 0; at.row < output->shape[1]; at.row++)
      for (at.head = 0; at.head < output->shape[2]; at.head++) {
        memset(output_marks + element_of(output, at.batch, at.row, at.head), true,
               (size_t)output->shape[3]);
        if (lse->dtype) lse_marks[element_of(lse, at.batch, at.head, at.row)] = true;
        check_row(c, &at);
      }
  tensor_check_unmarked(output, output_marks, "output");
  tensor_check_unmarked(lse, lse_marks, "lse");
  return at.worst;
}

static void run(uint64_t number) {
  struct rng rng = rng_for(number);
  struct combined c = combined_new(number, &rng);
  for (int i = 0; i < OUTPUT; i++) buffer_make_read_only(&c.buffers[i]);
  if (fa3_combine(&c.args)) fail_msg("%s", fa3_last_error());
  trials_end(c.args.output.dtype, check(&c));
  for (int i = 0; i < COMBINED; i++) buffer_free(&c.buffers[i]);
}

static void test_random_trials(void **state) {
  (void)state;
  trials_run(run, 0, 1, TRIALS);
}

/* A sequence's keys in three sets, one of which some rows do not see. */
static void test_sets_of_keys(void **state) {
  (void)state;
  enum { SETS = 3, QUERIES = 20, KEYS = 90, DIM = 72, HEADS = 3, B = 2 };
  static float query[B * QUERIES * HEADS * DIM], key[B * KEYS * HEADS * DIM];
  static float value[B * KEYS * HEADS * DIM], output[B * QUERIES * HEADS * DIM];
  static float whole[B * QUERIES * HEADS * DIM], lse[B * HEADS * QUERIES];
  static float whole_lse[B * HEADS * QUERIES], workspace[1 << 21];
  static float partial[SETS * B * QUERIES * HEADS * DIM], partial_lse[SETS * B * HEADS * QUERIES];
  struct rng rng = rng_for(2);
  for (size_t i = 0; i < sizeof query / sizeof *query; i++) query[i] = (float)rng_normal(&rng);
  for (size_t i = 0; i < sizeof key / sizeof *key; i++) key[i] = (float)rng_normal(&rng);
  for (size_t i = 0; i < sizeof value / sizeof *value; i++) value[i] = (float)rng_normal(&rng);
  int64_t diagonal[B];
  fa3_forward_args args = {.struct_size = sizeof args,
                           .query = fa3_dense(query, FA3_FLOAT32, B, QUERIES, HEADS, DIM),
                           .key = fa3_dense(key, FA3_FLOAT32, B, KEYS, HEADS, DIM),
                           .value = fa3_dense(value, FA3_FLOAT32, B, KEYS, HEADS, DIM),
                           .output = fa3_dense(whole, FA3_FLOAT32, B, QUERIES, HEADS, DIM),
                           .lse = fa3_lse(whole_lse, B, HEADS, QUERIES),
                           .diagonal = fa3_vector(diagonal, FA3_INT64, B),
                           .flags = FA3_CAUSAL,
                           .num_threads = 1,
                           .workspace = workspace,
                           .workspace_size = sizeof workspace};
  diagonal[0] = diagonal[1] = 50;
  if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
  for (int set = 0; set < SETS; set++) {
    const int64_t first = (int64_t)set * KEYS / SETS;
    args.key.shape[1] = args.value.shape[1] = KEYS / SETS;
    args.key.data = key + first * HEADS * DIM;
    args.value.data = value + first * HEADS * DIM;
    args.output.data = partial + (size_t)set * B * QUERIES * HEADS * DIM;
    args.lse.data = partial_lse + (size_t)set * B * HEADS * QUERIES;
    diagonal[0] = diagonal[1] = 50 - first;
    if (fa3_forward(&args)) fail_msg("%s", fa3_last_error());
  }
  /* What has seen no key is not read. */
  for (int i = 0; i < SETS * B * QUERIES * HEADS * DIM; i++) {
    const int at = i / DIM, head = at % HEADS, row = at / HEADS % QUERIES, b = at / HEADS / QUERIES;
    if (partial_lse[(b * HEADS + head) * QUERIES + row] == -INFINITY) partial[i] = NAN;
  }
  memset(output, 0xff, sizeof output);
  memset(lse, 0xff, sizeof lse);
  const fa3_combine_args combine = {
      .struct_size = sizeof combine,
      .partial_output = fa3_dense(partial, FA3_FLOAT32, (int64_t)SETS * B, QUERIES, HEADS, DIM),
      .partial_lse = fa3_lse(partial_lse, (int64_t)SETS * B, HEADS, QUERIES),
      .output = fa3_dense(output, FA3_FLOAT32, B, QUERIES, HEADS, DIM),
      .lse = fa3_lse(lse, B, HEADS, QUERIES)};
  if (fa3_combine(&combine)) fail_msg("%s", fa3_last_error());
  /* Both ways sum fewer than 128 products of numbers below 8, in float32. */
  const double bound = 2 * 128 * 8 * 0x1p-24;
  for (int i = 0; i < B * QUERIES * HEADS * DIM; i++)
    if (!(fabs((double)output[i] - (double)whole[i]) <= bound))
      fail_msg("output %d is %g: expected %g", i, (double)output[i], (double)whole[i]);
  for (int i = 0; i < B * HEADS * QUERIES; i++)
    if (!(fabs((double)lse[i] - (double)whole_lse[i]) <= bound))
      fail_msg("lse %d is %g: expected %g", i, (double)lse[i], (double)whole_lse[i]);
  /* No set at all. */
  fa3_combine_args none = combine;
  none.partial_output.shape[0] = none.partial_lse.shape[0] = 0;
  if (fa3_combine(&none)) fail_msg("%s", fa3_last_error());
  assert_true(output[0] == 0 && lse[0] == -INFINITY);
  none.partial_output.shape[0] = none.partial_lse.shape[0] = 3;
  assert_int_equal(fa3_combine(&none), FA3_INVALID_SHAPE);
  fa3_combine_args codes = combine;
  codes.output.dtype = FA3_FLOAT8_E4M3;
  expect_refused(fa3_combine(&codes), FA3_INVALID_DTYPE, "output.dtype is 4 (FA3_FLOAT8_E4M3)");
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(test_random_trials, trials_print),
      cmocka_unit_test(test_sets_of_keys),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
