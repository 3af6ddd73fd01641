/* Gradients at the edges: NaN reaches those that depend on it and no others; rows that see nothing
 * and keys that nothing sees have none; batches with nothing in them. */
#include <math.h>
#include <string.h>

#include "gradient_trial.h"
#include "level.h"
#include "reference.h"
#include "test.h"

static const double every_pair = INFINITY;

static const fa3_dtype dtypes[] = {FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16};
enum { DTYPES = 3, HEADS = 4, QUERIES = 6, KEYS = 300, HEAD_DIM = 16, VALUE_HEAD_DIM = 24 };

/* Two query heads for each of two key heads. */
static struct gradient_spec usual_spec(fa3_dtype dtype) {
  return (struct gradient_spec){.forward = {.dtype = dtype,
                                            .output_dtype = dtype,
                                            .batch = 2,
                                            .heads_k = 2,
                                            .group = 2,
                                            .head_dim = HEAD_DIM,
                                            .value_head_dim = VALUE_HEAD_DIM,
                                            .max_seqlen_q = QUERIES,
                                            .max_seqlen_k = KEYS,
                                            .lse = true,
                                            .spread = 1,
                                            .sink = 3},
                                .grad_query_dtype = dtype,
                                .grad_key_dtype = dtype,
                                .grad_value_dtype = dtype,
                                .grad_lse = true};
}

static int64_t count(const fa3_tensor *tensor, bool (*wanted)(double)) {
  int64_t found = 0;
  for (int64_t i = 0; i < tensor_reach(tensor); i++) found += wanted(reference_load(tensor, i));
  return found;
}

static bool is_nan(double value) {
  return isnan(value);
}

static bool is_zero(double value) {
  return value == 0;
}

/* One number of what goes in, in batch 1 and head 1, and how many of each gradient it spoils. */
struct spoilt {
  const char *name;
  size_t tensor;
  int buffer; /* of the forward trial, or behind TENSORS of the backward one */
  int query;
  int key;
  int value;
};

#define SPOILT(name, buffer) #name, offsetof(fa3_backward_args, name), buffer

static const struct spoilt inputs[] = {
    /* All of P's row, and with it dS's. */
    {SPOILT(query, TENSOR_query), HEAD_DIM, KEYS *HEAD_DIM, KEYS *VALUE_HEAD_DIM},
    {SPOILT(lse, TENSOR_lse), HEAD_DIM, KEYS *HEAD_DIM, KEYS *VALUE_HEAD_DIM},
    /* A column of both, for two query heads. */
    {SPOILT(key, TENSOR_key), 2 * QUERIES *HEAD_DIM, HEAD_DIM, VALUE_HEAD_DIM},
    {SPOILT(value, TENSOR_value), 2 * QUERIES *HEAD_DIM, HEAD_DIM, 0},
    /* A row of dS. */
    {SPOILT(output, TENSOR_output), HEAD_DIM, KEYS *HEAD_DIM, 0},
    {SPOILT(grad_lse, TENSORS + TENSOR_grad_lse), HEAD_DIM, KEYS *HEAD_DIM, 0},
    {SPOILT(grad_output, TENSORS + TENSOR_grad_output), HEAD_DIM, KEYS *HEAD_DIM, KEYS},
};

static void check_spoilt(fa3_dtype dtype, const struct spoilt *input, int64_t row) {
  struct rng rng = rng_for((uint64_t)row);
  const struct gradient_spec spec = usual_spec(dtype);
  struct gradient_trial trial = gradient_trial_new(&spec, &rng);
  fa3_tensor *tensor = (fa3_tensor *)(void *)((char *)&trial.args + input->tensor);
  const int64_t *stride = tensor->strides;
  if (input->buffer < TENSORS) buffer_make_writable(&trial.forward.buffers[input->buffer]);
  tensor_store(
      tensor,
      tensor->rank == 3 ? stride[0] + stride[1] + row : stride[0] + row * stride[1] + stride[2] + 5,
      NAN);
  gradient_trial_run(&trial, &rng);
  gradient_trial_check(&trial, &rng, every_pair);
  const int64_t found[] = {count(&trial.args.grad_query, is_nan),
                           count(&trial.args.grad_key, is_nan),
                           count(&trial.args.grad_value, is_nan)};
  if (found[0] != input->query || found[1] != input->key || found[2] != input->value)
    fail_msg("NaN in %s: %d of grad_query, %d of grad_key and %d of grad_value are NaN",
             input->name, (int)found[0], (int)found[1], (int)found[2]);
  gradient_trial_free(&trial);
}

static void test_nan(void **state) {
  (void)state;
  for (int i = 0; i < DTYPES; i++)
    for (size_t input = 0; input < sizeof inputs / sizeof *inputs; input++)
      for (int64_t row = 0; row < QUERIES; row += QUERIES - 1)
        check_spoilt(dtypes[i], &inputs[input], row);
}

static void poison_unused(const fa3_tensor *tensor) {
  for (int64_t n = 0; n < tensor_reach(tensor); n++)
    if (isnan(reference_load(tensor, n))) tensor_store(tensor, n, n % 2 ? INFINITY : -INFINITY);
}

/* What lies outside the sequences is NaN in every trial; here it is infinity. */
static void test_infinity_outside_sequences(void **state) {
  (void)state;
  for (uint64_t number = 0; number < 30; number++) {
    struct rng rng = rng_for(2000 + number);
    struct spec forward = spec_random(&rng);
    forward.seqused_q = forward.seqused_k = true;
    const struct gradient_spec spec = gradient_spec_random(&forward, &rng);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    for (int i = 0; i < TENSORS; i++) buffer_make_writable(&trial.forward.buffers[i]);
    const fa3_tensor *tensors[] = {&trial.args.query,   &trial.args.key, &trial.args.value,
                                   &trial.args.output,  &trial.args.lse, &trial.args.grad_output,
                                   &trial.args.grad_lse};
    for (int i = 0; i < 7; i++) poison_unused(tensors[i]);
    gradient_trial_run(&trial, &rng);
    gradient_trial_check(&trial, &rng, 6000);
    gradient_trial_free(&trial);
  }
}

/* Six causal queries and three keys: the first three queries see none. Added to nothing, their
 * gradient is 0; a sink's comes from them as well. */
static void test_rows_that_see_nothing(void **state) {
  (void)state;
  for (int i = 0; i < 2 * DTYPES; i++) {
    struct gradient_spec spec = usual_spec(dtypes[i % DTYPES]);
    spec.forward.max_seqlen_k = 3;
    spec.forward.flags = FA3_CAUSAL;
    spec.forward.sink_dtype = spec.grad_sink_dtype = i < DTYPES ? 0 : FA3_FLOAT32;
    struct rng rng = rng_for(3000);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    gradient_trial_run(&trial, &rng);
    gradient_trial_check(&trial, &rng, every_pair);
    for (int64_t batch = 0; batch < 2; batch++)
      for (int64_t head = 0; head < HEADS; head++)
        for (int64_t row = 0; row < 3; row++) {
          int64_t first = reference_grad_query_index(&trial.args, batch, head, row);
          for (int64_t d = 0; d < HEAD_DIM; d++)
            assert_true(reference_load(&trial.args.grad_query, first + d) == 0);
        }
    gradient_trial_free(&trial);
  }
}

/* The last queries see 3 keys back: 9 of 300 have a gradient. Where gradients are added, the others
 * stay what they were. */
static void test_keys_that_nothing_sees(void **state) {
  (void)state;
  enum { SEEN = QUERIES + 3 };
  for (int i = 0; i < 2 * DTYPES; i++) {
    const bool accumulate = i >= DTYPES;
    struct gradient_spec spec = usual_spec(dtypes[i % DTYPES]);
    spec.forward.flags = FA3_CAUSAL | FA3_WINDOW;
    spec.forward.window_left = 3;
    spec.flags = accumulate ? FA3_ACCUMULATE : 0;
    struct rng rng = rng_for(4000);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    gradient_trial_run(&trial, &rng);
    gradient_trial_check(&trial, &rng, every_pair);
    const fa3_tensor *tensors[] = {&trial.args.grad_key, &trial.args.grad_value};
    for (int t = 0; t < 2 && !accumulate; t++) {
      const int64_t unseen = tensors[t]->shape[3] * 2 * 2 * (KEYS - SEEN);
      assert_in_range(count(tensors[t], is_zero), unseen, unseen + 8);
    }
    gradient_trial_free(&trial);
  }
}

/* No batch, no queries, no keys: each alone and together, dense and packed. */
static void test_empty(void **state) {
  (void)state;
  for (unsigned mask = 0; mask < 256; mask++) {
    struct gradient_spec spec = usual_spec(FA3_BFLOAT16);
    struct spec *forward = &spec.forward;
    forward->batch = mask & 1 ? 0 : 2;
    forward->max_seqlen_q = mask & 2 ? 0 : 3;
    forward->max_seqlen_k = mask & 4 ? 0 : 5;
    forward->packed_q = mask & 8;
    forward->packed_k = mask & 16;
    forward->flags = mask & 32 ? FA3_CAUSAL : 0;
    forward->seqused_k = forward->seqused_q = mask & 64;
    if (mask & 128) forward->sink_dtype = spec.grad_sink_dtype = FA3_FLOAT32;
    spec.flags = mask & 4 && mask & 32 ? FA3_ACCUMULATE : 0;
    struct rng rng = rng_for(5000 + mask);
    struct gradient_trial trial = gradient_trial_new(&spec, &rng);
    gradient_trial_run(&trial, &rng);
    gradient_trial_check(&trial, &rng, every_pair);
    gradient_trial_free(&trial);
  }
}

int main(void) {
  level_require();
  rng_run_seed();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_nan),
      cmocka_unit_test(test_infinity_outside_sequences),
      cmocka_unit_test(test_rows_that_see_nothing),
      cmocka_unit_test(test_keys_that_nothing_sees),
      cmocka_unit_test(test_empty),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
