/* NaN and infinity reach the rows that see them and no others; rows that see nothing, and batches
 * with nothing in them. */
#include <math.h>
#include <string.h>

#include "level.h"
#include "reference.h"
#include "test.h"
#include "trial.h"

static const double every_pair = INFINITY;

static const fa3_dtype dtypes[] = {FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16};

static struct spec usual_spec(fa3_dtype dtype) {
  return (struct spec){.dtype = dtype,
                       .output_dtype = dtype,
                       .batch = 2,
                       .heads_k = 2,
                       .group = 2,
                       .head_dim = 16,
                       .value_head_dim = 24,
                       .max_seqlen_q = 6,
                       .max_seqlen_k = 300,
                       .lse = true,
                       .spread = 1,
                       .sink = 3};
}

/* Index of (batch, row, head, d) of a dense tensor. */
static int64_t at(const fa3_tensor *tensor, int64_t batch, int64_t row, int64_t head, int64_t d) {
  const int64_t *stride = tensor->strides;
  return batch * stride[0] + row * stride[1] + head * stride[2] + d;
}

static int64_t count_non_finite(const fa3_tensor *tensor) {
  int64_t count = 0;
  int64_t elements = 1;
  for (int d = 0; d < tensor->rank; d++) elements *= tensor->shape[d];
  for (int64_t i = 0; i < elements; i++) count += !isfinite(reference_load(tensor, i));
  return count;
}

/* Runs the call with one element of one input replaced, compares every row with the reference,
 * and expects so many outputs that are not finite. */
static void run_with(const struct spec *spec, size_t tensor_offset, int64_t row, double planted,
                     int64_t non_finite_outputs, int64_t non_finite_lse) {
  struct rng rng = rng_for((uint64_t)row + 1000);
  struct trial trial = trial_new(spec, &rng);
  fa3_tensor *tensor = (fa3_tensor *)(void *)((char *)&trial.args + tensor_offset);
  tensor_store(tensor, at(tensor, 1, row, 1, 5), planted);
  trial_run(&trial, &rng);
  trial_check(&trial, &rng, every_pair);
  assert_int_equal(count_non_finite(&trial.args.output), non_finite_outputs);
  assert_int_equal(count_non_finite(&trial.args.lse), non_finite_lse);
  trial_free(&trial);
}

static void test_nan_query(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    struct spec spec = usual_spec(dtypes[i]);
    for (int64_t row = 0; row < spec.max_seqlen_q; row += 5)
      run_with(&spec, offsetof(fa3_forward_args, query), row, NAN, spec.value_head_dim, 1);
  }
}

/* All rows of the group's two heads see the key. */
static void test_nan_key(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    struct spec spec = usual_spec(dtypes[i]);
    int64_t rows = 2 * spec.max_seqlen_q;
    for (int64_t row = 0; row < spec.max_seqlen_k; row += 149)
      run_with(&spec, offsetof(fa3_forward_args, key), row, NAN, rows * spec.value_head_dim, rows);
  }
}

/* Query i is at key i + 294: those before a key never see it. */
static void test_nan_key_under_a_mask(void **state) {
  (void)state;
  static const int64_t keys[] = {0, 150, 294, 295, 297, 299};
  for (int i = 0; i < 3; i++) {
    struct spec spec = usual_spec(dtypes[i]);
    spec.flags = FA3_CAUSAL;
    for (int k = 0; k < 6; k++) {
      int64_t rows = 2 * (keys[k] <= 294 ? 6 : 300 - keys[k]);
      run_with(&spec, offsetof(fa3_forward_args, key), keys[k], NAN, rows * spec.value_head_dim,
               rows);
    }
  }
}

/* One column of the rows, and not their lse. */
static void test_non_finite_value(void **state) {
  (void)state;
  static const double planted[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < 3; i++) {
    struct spec spec = usual_spec(dtypes[i]);
    for (int p = 0; p < 3; p++)
      for (int64_t row = 0; row < spec.max_seqlen_k; row += 149)
        run_with(&spec, offsetof(fa3_forward_args, value), row, planted[p], 2 * spec.max_seqlen_q,
                 0);
  }
}

/* A key of infinity has a score of either infinity, by the query's sign: one makes the row NaN,
 * the other takes the key out of it. */
static void test_infinite_key(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) {
    struct spec spec = usual_spec(dtypes[i]);
    struct rng rng = rng_for(7);
    struct trial trial = trial_new(&spec, &rng);
    tensor_store(&trial.args.key, at(&trial.args.key, 1, 290, 1, 5), INFINITY);
    trial_run(&trial, &rng);
    trial_check(&trial, &rng, every_pair);
    assert_in_range(count_non_finite(&trial.args.lse), 1, 2 * spec.max_seqlen_q - 1);
    trial_free(&trial);
  }
}

/* What lies outside the sequences is NaN in every trial; here it is infinity. */
static void test_infinity_outside_sequences(void **state) {
  (void)state;
  static const int inputs[] = {TENSOR_query, TENSOR_key, TENSOR_value};
  for (uint64_t number = 0; number < 40; number++) {
    struct rng rng = rng_for(2000 + number);
    struct spec spec = spec_random(&rng);
    spec.seqused_k = true;
    struct trial trial = trial_new(&spec, &rng);
    const fa3_tensor *tensors[] = {&trial.args.query, &trial.args.key, &trial.args.value};
    for (int i = 0; i < 3; i++) {
      int64_t elements =
          (int64_t)(trial.buffers[inputs[i]].size / fa3_dtype_size(tensors[i]->dtype));
      for (int64_t n = 0; n < elements; n++)
        if (isnan(reference_load(tensors[i], n)))
          tensor_store(tensors[i], n, n % 2 ? INFINITY : -INFINITY);
    }
    trial_run(&trial, &rng);
    trial_check(&trial, &rng, 10000);
    trial_free(&trial);
  }
}

/* Three keys, six causal queries: the first three see none. */
static void test_rows_that_see_nothing(void **state) {
  (void)state;
  for (int i = 0; i < 6; i++) {
    bool sink = i >= 3;
    struct spec spec = usual_spec(dtypes[i % 3]);
    spec.max_seqlen_q = 6;
    spec.max_seqlen_k = 3;
    spec.flags = FA3_CAUSAL;
    spec.sink_dtype = sink ? FA3_FLOAT32 : 0;
    struct rng rng = rng_for(3000);
    struct trial trial = trial_new(&spec, &rng);
    trial_run(&trial, &rng);
    trial_check(&trial, &rng, every_pair);
    for (int64_t head = 0; head < 4; head++) {
      for (int64_t row = 0; row < 3; row++) {
        float lse = ((float *)trial.args.lse.data)[reference_lse_index(&trial.args, 1, head, row)];
        float expected = sink ? ((float *)trial.args.sink.data)[head] : -INFINITY;
        assert_true(isinf(expected) ? lse == expected : fabsf(lse - expected) < 1e-5f);
        int64_t first = reference_output_index(&trial.args, 1, head, row);
        for (int64_t d = 0; d < spec.value_head_dim; d++)
          assert_true(reference_load(&trial.args.output, first + d) == 0);
      }
    }
    trial_free(&trial);
  }
}

/* No batch, no queries, no keys: each alone and together, dense and packed. */
static void test_empty(void **state) {
  (void)state;
  for (unsigned mask = 0; mask < 128; mask++) {
    struct spec spec = usual_spec(FA3_BFLOAT16);
    spec.batch = mask & 1 ? 0 : 2;
    spec.max_seqlen_q = mask & 2 ? 0 : 3;
    spec.max_seqlen_k = mask & 4 ? 0 : 5;
    spec.packed_q = mask & 8;
    spec.packed_k = mask & 16;
    spec.flags = mask & 32 ? FA3_CAUSAL : 0;
    spec.seqused_k = spec.seqused_q = mask & 64;
    struct rng rng = rng_for(4000 + mask);
    struct trial trial = trial_new(&spec, &rng);
    trial_run(&trial, &rng);
    trial_check(&trial, &rng, every_pair);
    trial_free(&trial);
  }
}

int main(void) {
  level_require();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_nan_query),
      cmocka_unit_test(test_nan_key),
      cmocka_unit_test(test_nan_key_under_a_mask),
      cmocka_unit_test(test_non_finite_value),
      cmocka_unit_test(test_infinite_key),
      cmocka_unit_test(test_infinity_outside_sequences),
      cmocka_unit_test(test_rows_that_see_nothing),
      cmocka_unit_test(test_empty),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
