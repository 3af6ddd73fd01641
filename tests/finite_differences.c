/* The float64 reference of the backward pass against that of the forward pass: its gradients are
 * the finite differences of sum(grad_output * output) + sum(grad_lse * lse). */
#include <math.h>
#include <stdio.h>

#include "compare.h"
#include "gradient_trial.h"
#include "reference.h"
#include "test.h"

enum { TRIALS = 60 };

/* Inputs are multiples of it, so that a step either way is exact in float32. */
static const double step = 0x1p-10;

/* A step's square times a fifth derivative, by the gradient's size: see difference(). */
static const double truncation = 1e-7;

static struct gradient_spec small_spec(struct rng *rng) {
  const struct spec any = spec_random(rng);
  struct gradient_spec spec = gradient_spec_random(&any, rng);
  struct spec *forward = &spec.forward;
  fa3_dtype *dtypes[] = {&forward->dtype, &forward->output_dtype, &spec.grad_query_dtype,
                         &spec.grad_key_dtype, &spec.grad_value_dtype};
  for (int i = 0; i < 5; i++) *dtypes[i] = FA3_FLOAT32;
  if (forward->sink_dtype) forward->sink_dtype = spec.grad_sink_dtype = FA3_FLOAT32;
  forward->batch = rng_between(rng, 1, 2);
  forward->heads_k = rng_between(rng, 1, 2);
  forward->group = rng_between(rng, 1, 2);
  forward->head_dim = 8;
  forward->value_head_dim = RNG_PICK(rng, 8, 16);
  forward->max_seqlen_q = rng_between(rng, 1, 5);
  forward->max_seqlen_k = rng_between(rng, 1, 7);
  forward->layout = LAYOUT_PADDED; /* an expanded input has one element for many gradients */
  forward->num_threads = 1;
  forward->spread = 1;
  return spec;
}

/* The loss that grad_output and grad_lse are the gradients of. A row that sees nothing counts for
 * its output alone. */
static double loss(const struct gradient_trial *trial) {
  const fa3_backward_args *args = &trial->args;
  const fa3_forward_args forward = reference_forward_args(args);
  const struct spec *spec = &trial->spec.forward;
  fa3_forward_args grad_output = forward, grad_lse = forward; /* to find elements */
  grad_output.output = args->grad_output;
  grad_lse.lse = args->grad_lse;
  double sum = 0;
  for (int64_t b = 0; b < spec->batch; b++)
    for (int64_t head = 0; head < spec->heads_k * spec->group; head++)
      for (int64_t row = 0; row < reference_seqlen_q(&forward, b); row++) {
        double output[16], lse;
        reference_row(&forward, b, head, row, output, &lse);
        int64_t index = reference_output_index(&grad_output, b, head, row);
        for (int64_t d = 0; d < spec->value_head_dim; d++)
          sum += output[d] * reference_load(&args->grad_output, index + d);
        if (args->grad_lse.data && lse > -INFINITY)
          sum +=
              lse * reference_load(&args->grad_lse, reference_lse_index(&grad_lse, b, head, row));
      }
  return sum;
}

/* The loss's derivative by an element: central differences of two steps, extrapolated to none
 * (Richardson), which leaves step^4 / 30 of the fifth derivative. */
static double difference(const struct gradient_trial *trial, const fa3_tensor *tensor,
                         int64_t index) {
  const double value = reference_load(tensor, index);
  double slopes[2];
  for (int i = 0; i < 2; i++) {
    const double h = step * (i + 1);
    tensor_store(tensor, index, value + h);
    slopes[i] = loss(trial);
    tensor_store(tensor, index, value - h);
    slopes[i] = (slopes[i] - loss(trial)) / (2 * h);
  }
  tensor_store(tensor, index, value);
  return (4 * slopes[0] - slopes[1]) / 3;
}

static void round_inputs(const struct gradient_trial *trial) {
  const fa3_tensor *tensors[] = {&trial->args.query, &trial->args.key, &trial->args.value,
                                 &trial->args.sink};
  for (int i = 0; i < TENSORS; i++) buffer_make_writable(&trial->forward.buffers[i]);
  for (int i = 0; i < 4; i++)
    for (int64_t e = 0; e < tensor_reach(tensors[i]); e++)
      tensor_store(tensors[i], e, round(reference_load(tensors[i], e) / step) * step);
}

/* The reference's own output and lse, rounded as an engine's are. */
static void attend(const struct gradient_trial *trial) {
  const fa3_forward_args forward = reference_forward_args(&trial->args);
  const struct spec *spec = &trial->spec.forward;
  for (int64_t b = 0; b < spec->batch; b++)
    for (int64_t head = 0; head < spec->heads_k * spec->group; head++)
      for (int64_t row = 0; row < reference_seqlen_q(&forward, b); row++) {
        double output[16], lse;
        reference_row(&forward, b, head, row, output, &lse);
        int64_t index = reference_output_index(&forward, b, head, row);
        for (int64_t d = 0; d < spec->value_head_dim; d++)
          tensor_store(&forward.output, index + d, output[d]);
        tensor_store(&forward.lse, reference_lse_index(&forward, b, head, row), lse);
      }
}

/* Output and lse are rounded to float32, for which the bound has room: it has a chain of
 * value_head_dim roundings where output enters, and 16 where lse does. */
static void check(const struct gradient_trial *trial, struct comparison *at, const char *name,
                  const fa3_tensor *tensor, int64_t index, int64_t count, const double *gradient,
                  const double *bound) {
  for (int64_t d = 0; d < count; d++) {
    const double measured = difference(trial, tensor, index + d);
    compare(at, name, d, gradient[d], measured, bound[d] + truncation * (1 + fabs(gradient[d])));
  }
}

static void check_keys(const struct gradient_trial *trial, struct comparison *at) {
  const fa3_backward_args *args = &trial->args;
  const struct spec *spec = &trial->spec.forward;
  fa3_backward_args places = *args; /* finds the inputs' elements */
  places.grad_key = args->key;
  places.grad_value = args->value;
  double key[16], value[16], key_bound[16], value_bound[16];
  reference_grad_key_value(args, at->batch, at->head, at->row, key, value, key_bound, value_bound);
  check(trial, at, "grad_key", &args->key,
        reference_grad_key_index(&places, at->batch, at->head, at->row), spec->head_dim, key,
        key_bound);
  check(trial, at, "grad_value", &args->value,
        reference_grad_value_index(&places, at->batch, at->head, at->row), spec->value_head_dim,
        value, value_bound);
}

static void check_queries(const struct gradient_trial *trial, struct comparison *at) {
  const fa3_backward_args *args = &trial->args;
  fa3_backward_args places = *args;
  places.grad_query = args->query;
  double gradient[16], bound[16];
  reference_grad_query(args, at->batch, at->head, at->row, gradient, bound);
  check(trial, at, "grad_query", &args->query,
        reference_grad_query_index(&places, at->batch, at->head, at->row),
        trial->spec.forward.head_dim, gradient, bound);
}

static double run(uint64_t number) {
  struct rng rng = rng_for(number);
  const struct gradient_spec spec = small_spec(&rng);
  struct gradient_trial trial = gradient_trial_new(&spec, &rng);
  struct comparison at = {0};
  round_inputs(&trial);
  attend(&trial);
  for (at.batch = 0; at.batch < spec.forward.batch; at.batch++) {
    for (at.head = 0; at.head < spec.forward.heads_k * spec.forward.group; at.head++)
      for (at.row = 0; at.row < trial_query_rows(&trial.forward, at.batch).count; at.row++)
        check_queries(&trial, &at);
    for (at.head = 0; at.head < spec.forward.heads_k; at.head++)
      for (at.row = 0; at.row < trial_key_rows(&trial.forward, at.batch).count; at.row++)
        check_keys(&trial, &at);
  }
  for (at.head = 0; trial.args.sink.data && at.head < trial.args.sink.shape[0]; at.head++) {
    double gradient, bound;
    if (reference_load(&trial.args.sink, at.head) == -INFINITY) continue;
    reference_grad_sink(&trial.args, at.head, &gradient, &bound);
    check(&trial, &at, "grad_sink", &trial.args.sink, at.head, 1, &gradient, &bound);
  }
  gradient_trial_free(&trial);
  return at.worst;
}

static void test_gradients(void **state) {
  (void)state;
  double worst = 0;
  for (uint64_t number = 0; number < TRIALS; number++) worst = fmax(worst, run(number));
  printf("largest difference as a fraction of what it may be: %.3f\n", worst);
}

int main(void) {
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_gradients)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
