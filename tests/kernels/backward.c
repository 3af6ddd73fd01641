/* The backward pass on one level's routines, against the float64 reference, with what the forward
 * pass on the same routines gave. As in forward.c, lengths are around the tiles' edges; and the
 * gradients have to be bitwise the same for every number of threads. */
#include "cpu/backward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "reference.h"

static void prepare(const struct run *run, struct call *call, int32_t threads) {
  call->args.num_threads = threads;
  if (problem_from_args(FA3_BACKWARD, &call->args, &call->problem) ||
      cpu_plan_backward(&call->problem, run->routines, &call->plan))
    abort();
  call_make_workspace(call);
}

static void run_backward(const struct run *run, void *call) {
  struct call *c = call;
  cpu_backward(&c->problem, run->routines, &c->plan, c->workspace);
}

/* With the forward pass that comes before. */
static void prepare_both(const struct run *run, struct call *call, int32_t threads) {
  prepare_forward(run, call, 0);
  run_forward(run, call);
  prepare(run, call, threads);
}

static bool check_row(const struct run *run, const fa3_tensor *tensor, const char *name,
                      int64_t index, const double *expected, const double *bound) {
  for (int64_t d = 0; d < tensor->shape[3]; d++) {
    const double value = reference_load(tensor, index + d);
    const double most = reference_stored_bound(tensor->dtype, expected[d], bound[d]);
    if (!(fabs(value - expected[d]) <= most))
      return wrong(run, "%s: element %d of the row at %d is %g: expected %g within %.2g", name,
                   (int)d, (int)index, value, expected[d], most);
  }
  return true;
}

static bool check_rows(struct run *run, const fa3_backward_args *args) {
  const int64_t batch = rng_between(&run->rng, 0, args->query.shape[0] - 1);
  const int64_t head = rng_between(&run->rng, 0, args->query.shape[2] - 1);
  const int64_t query = rng_between(&run->rng, 0, args->query.shape[1] - 1);
  const int64_t head_k = rng_between(&run->rng, 0, args->key.shape[2] - 1);
  const int64_t key = rng_between(&run->rng, 0, args->key.shape[1] - 1);
  double gradient[256], bound[256], value_gradient[256], value_bound[256];
  reference_grad_query(args, batch, head, query, gradient, bound);
  if (!check_row(run, &args->grad_query, "grad_query",
                 reference_grad_query_index(args, batch, head, query), gradient, bound))
    return false;
  reference_grad_key_value(args, batch, head_k, key, gradient, value_gradient, bound, value_bound);
  return check_row(run, &args->grad_key, "grad_key",
                   reference_grad_key_index(args, batch, head_k, key), gradient, bound) &&
         check_row(run, &args->grad_value, "grad_value",
                   reference_grad_value_index(args, batch, head_k, key), value_gradient,
                   value_bound);
}

/* Runs with other numbers of threads; the gradients stay the same. */
static bool check_threads(struct run *run, struct call *c) {
  void *before[3];
  for (int i = 0; i < 3; i++) {
    const fa3_tensor *gradient = &c->args.grad_query + i;
    before[i] = malloc(tensor_bytes(gradient));
    if (!before[i]) exit(1);
    memcpy(before[i], gradient->data, tensor_bytes(gradient));
    memset(gradient->data, 0xff, tensor_bytes(gradient));
  }
  prepare(run, c, (int32_t)rng_between(&run->rng, 1, 8));
  run_backward(run, c);
  bool good = true;
  for (int i = 0; i < 3; i++) {
    const fa3_tensor *gradient = &c->args.grad_query + i;
    if (good && memcmp(before[i], gradient->data, tensor_bytes(gradient)) != 0)
      good = wrong(run, "gradient %d is another one on %d threads", i, (int)c->args.num_threads);
    free(before[i]);
  }
  return good;
}

static bool check(struct run *run) {
  struct call c = random_call(run);
  prepare_both(run, &c, (int32_t)rng_between(&run->rng, 1, 3));
  run_backward(run, &c);
  bool good = call_intact(run, &c);
  for (int i = 0; good && i < 3; i++) good = check_rows(run, &c.args);
  if (good && rng_chance(&run->rng, 0.3)) good = check_threads(run, &c);
  call_free(&c);
  return good;
}

static void bench(struct run *run) {
  time_call(run, prepare_both, run_backward, 10);
}

const struct subject backward_subject = {"backward", true, check, bench};
