/* The backward pass on one level's routines, against the float64 reference, with what the forward
 * pass on the same routines gave. As in forward.c, lengths are around the tiles' edges; and the
 * gradients have to be bitwise the same for every number of threads. */
#include "cpu/backward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/forward.h"
#include "kernels.h"
#include "call_shape.h"
#include "reference.h"

/* query, key, value, output, lse, grad_output and the gradients, in the order of the struct. */
enum { CALL_TENSORS = 9 };

struct call {
  const struct routines *routines;
  fa3_backward_args args;
  struct problem problem;
  struct cpu_plan plan;
  void *workspace;
};

static fa3_tensor *tensor_of(fa3_backward_args *args, int index) {
  return &args->query + index;
}

static size_t bytes_of(const fa3_tensor *tensor) {
  size_t bytes = fa3_dtype_size(tensor->dtype);
  for (int d = 0; d < tensor->rank; d++) bytes *= (size_t)tensor->shape[d];
  return bytes;
}

static void fill(struct run *run, const fa3_tensor *tensor) {
  struct rows rows = {.dtype = tensor->dtype, .count = 1};
  rows.width = (int64_t)(bytes_of(tensor) / fa3_dtype_size(tensor->dtype));
  fill_rows(&run->rng, &rows, tensor->data);
}

static void run_forward(const struct call *c) {
  const fa3_forward_args args = reference_forward_args(&c->args);
  struct problem problem;
  struct cpu_plan plan;
  if (problem_from_args(FA3_FORWARD, &args, &problem)) abort();
  cpu_plan_forward(&problem, c->routines, c->routines, &plan);
  void *workspace = guarded_new(plan.workspace_size);
  cpu_forward(&problem, c->routines, c->routines, &plan, workspace);
  guarded_free(workspace);
}

static struct call call_new(struct run *run, const struct call_shape *shape) {
  const int64_t batch = shape->batch, seqlen_q = shape->seqlen_q, seqlen_k = shape->seqlen_k;
  const int64_t heads_k = shape->heads_k, heads_q = heads_k * shape->group;
  const int64_t head_dim = shape->head_dim, value_head_dim = shape->value_head_dim;
  const fa3_dtype dtype = run->dtype;
  struct call c = {.routines = run->routines,
                   .args = {.struct_size = sizeof c.args,
                            .flags = shape->flags,
                            .window_left = shape->window_left,
                            .window_right = shape->window_right,
                            .softcap = shape->softcap}};
  c.args.query = fa3_dense(NULL, dtype, batch, seqlen_q, heads_q, head_dim);
  c.args.key = fa3_dense(NULL, dtype, batch, seqlen_k, heads_k, head_dim);
  c.args.value = fa3_dense(NULL, dtype, batch, seqlen_k, heads_k, value_head_dim);
  c.args.output = fa3_dense(NULL, dtype, batch, seqlen_q, heads_q, value_head_dim);
  c.args.lse = fa3_lse(NULL, batch, heads_q, seqlen_q);
  c.args.grad_output = c.args.output;
  c.args.grad_query = c.args.query;
  c.args.grad_key = c.args.key;
  c.args.grad_value = c.args.value;
  for (int i = 0; i < CALL_TENSORS; i++) {
    fa3_tensor *tensor = tensor_of(&c.args, i);
    tensor->data = guarded_new(bytes_of(tensor));
  }
  fill(run, &c.args.query);
  fill(run, &c.args.key);
  fill(run, &c.args.value);
  fill(run, &c.args.grad_output);
  return c;
}

static void call_plan(struct call *c, int32_t threads) {
  c->args.num_threads = threads;
  if (problem_from_args(FA3_BACKWARD, &c->args, &c->problem) ||
      cpu_plan_backward(&c->problem, c->routines, &c->plan))
    abort();
  guarded_free(c->workspace);
  c->workspace = guarded_new(c->plan.workspace_size);
}

static void call_run(void *argument) {
  struct call *c = argument;
  cpu_backward(&c->problem, c->routines, &c->plan, c->workspace);
}

static void call_free(struct call *c) {
  for (int i = 0; i < CALL_TENSORS; i++) guarded_free(tensor_of(&c->args, i)->data);
  guarded_free(c->workspace);
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
    before[i] = malloc(bytes_of(gradient));
    if (!before[i]) exit(1);
    memcpy(before[i], gradient->data, bytes_of(gradient));
    memset(gradient->data, 0xff, bytes_of(gradient));
  }
  call_plan(c, (int32_t)rng_between(&run->rng, 1, 8));
  call_run(c);
  bool good = true;
  for (int i = 0; i < 3; i++) {
    const fa3_tensor *gradient = &c->args.grad_query + i;
    if (good && memcmp(before[i], gradient->data, bytes_of(gradient)) != 0)
      good = wrong(run, "gradient %d is another one on %d threads", i, (int)c->args.num_threads);
    free(before[i]);
  }
  return good;
}

static bool check(struct run *run) {
  struct rng *rng = &run->rng;
  const struct call_shape shape = random_call_shape(rng);
  struct call c = call_new(run, &shape);
  run_forward(&c);
  call_plan(&c, (int32_t)rng_between(rng, 1, 3));
  call_run(&c);
  bool good = true;
  for (int i = 0; i < 4; i++)
    good = good && (guarded_intact(i < 3 ? (&c.args.grad_query + i)->data : c.workspace) ||
                    wrong(run, "wrote outside"));
  for (int i = 0; good && i < 3; i++) good = check_rows(run, &c.args);
  if (good && rng_chance(rng, 0.3)) good = check_threads(run, &c);
  call_free(&c);
  return good;
}

static void bench(struct run *run) {
  for (int64_t head_dim = 64; head_dim <= 128; head_dim *= 2) {
    const struct call_shape shape = timed_call_shape(head_dim);
    struct call c = call_new(run, &shape);
    run_forward(&c);
    call_plan(&c, 0);
    report(run, head_dim == 64 ? "8x1024x64" : "8x1024x128", call_run, &c,
           10.0 * 8 * 1024 * 1024 * (double)head_dim, "flop");
    call_free(&c);
  }
}

const struct subject backward_subject = {"backward", true, check, bench};
