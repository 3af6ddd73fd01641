#include "calls.h"

#include <stdlib.h>

#include "cpu/forward.h"
#include "reference.h"

/* query, key, value, output, lse, grad_output and the gradients, in the order of the struct. */
enum { CALL_TENSORS = 9 };

struct call_shape {
  int64_t batch, seqlen_q, seqlen_k, heads_k, group, head_dim, value_head_dim;
};

static fa3_tensor *tensor_of(const struct call *call, int index) {
  return (fa3_tensor *)&call->args.query + index;
}

size_t tensor_bytes(const fa3_tensor *tensor) {
  size_t bytes = fa3_dtype_size(tensor->dtype);
  for (int d = 0; d < tensor->rank; d++) bytes *= (size_t)tensor->shape[d];
  return bytes;
}

static void fill(struct run *run, const fa3_tensor *tensor) {
  struct rows rows = {.dtype = tensor->dtype, .count = 1};
  rows.width = (int64_t)(tensor_bytes(tensor) / fa3_dtype_size(tensor->dtype));
  fill_rows(&run->rng, &rows, tensor->data);
}

static struct call call_new(struct run *run, const struct call_shape *shape) {
  const int64_t batch = shape->batch, seqlen_q = shape->seqlen_q, seqlen_k = shape->seqlen_k;
  const int64_t heads_k = shape->heads_k, heads_q = heads_k * shape->group;
  const int64_t head_dim = shape->head_dim, value_head_dim = shape->value_head_dim;
  const fa3_dtype dtype = run->dtype;
  struct call c = {.args = {.struct_size = sizeof c.args}};
  c.args.query = fa3_dense(NULL, dtype, batch, seqlen_q, heads_q, head_dim);
  c.args.key = fa3_dense(NULL, dtype, batch, seqlen_k, heads_k, head_dim);
  c.args.value = fa3_dense(NULL, dtype, batch, seqlen_k, heads_k, value_head_dim);
  c.args.output = fa3_dense(NULL, dtype, batch, seqlen_q, heads_q, value_head_dim);
  c.args.lse = fa3_lse(NULL, batch, heads_q, seqlen_q);
  c.args.grad_output = c.args.output;
  c.args.grad_query = c.args.query;
  c.args.grad_key = c.args.key;
  c.args.grad_value = c.args.value;
  for (int i = 0; i < CALL_TENSORS; i++)
    tensor_of(&c, i)->data = guarded_new(tensor_bytes(tensor_of(&c, i)));
  fill(run, &c.args.query);
  fill(run, &c.args.key);
  fill(run, &c.args.value);
  fill(run, &c.args.grad_output);
  return c;
}

static int64_t random_length(struct rng *rng) {
  int64_t edge = RNG_PICK(rng, 1, 24, 32, 48, 96, 192, 256, 288, 384, 512);
  int64_t length = edge + rng_between(rng, -1, 1);
  return length > 0 ? length : 1;
}

struct call random_call(struct run *run) {
  struct rng *rng = &run->rng;
  struct call_shape shape = {.batch = 1,
                             .seqlen_q = random_length(rng),
                             .seqlen_k = random_length(rng),
                             .heads_k = 1,
                             .group = RNG_PICK(rng, 1, 1, 3, 4),
                             .head_dim = 8 * rng_between(rng, 1, 32),
                             .value_head_dim = 8 * rng_between(rng, 1, 32)};
  /* Several sequences and heads of keys go the same way whatever the lengths: of short ones alone,
   * as the references take most of the time. */
  if (shape.seqlen_q + shape.seqlen_k < 300) {
    shape.batch = rng_between(rng, 1, 2);
    shape.heads_k = rng_between(rng, 1, 2);
  }
  struct call c = call_new(run, &shape);
  if (rng_chance(rng, 0.5)) c.args.flags = FA3_CAUSAL;
  if (rng_chance(rng, 0.3)) {
    c.args.flags |= FA3_WINDOW;
    c.args.window_left = rng_between(rng, 0, 300);
    c.args.window_right = rng_between(rng, -1, 300);
  }
  if (rng_chance(rng, 0.2)) c.args.softcap = 20;
  return c;
}

void call_free(struct call *call) {
  for (int i = 0; i < CALL_TENSORS; i++) guarded_free(tensor_of(call, i)->data);
  guarded_free(call->workspace);
}

bool call_intact(const struct run *run, const struct call *call) {
  bool good = guarded_intact(call->workspace);
  for (int i = 0; i < CALL_TENSORS; i++) good &= guarded_intact(tensor_of(call, i)->data);
  return good || wrong(run, "wrote outside");
}

void call_make_workspace(struct call *call) {
  guarded_free(call->workspace);
  call->workspace = guarded_new(call->plan.workspace_size);
}

void prepare_forward(const struct run *run, struct call *call, int32_t threads) {
  fa3_forward_args args = reference_forward_args(&call->args);
  args.num_threads = threads;
  if (problem_from_args(FA3_FORWARD, &args, &call->problem)) abort();
  cpu_plan_forward(&call->problem, run->routines, run->routines, &call->plan);
  call_make_workspace(call);
}

void run_forward(const struct run *run, void *call) {
  struct call *c = call;
  cpu_forward(&c->problem, run->routines, run->routines, run->routines, &c->plan, c->workspace);
}

void time_call(struct run *run,
               void (*prepare)(const struct run *run, struct call *call, int32_t threads),
               void (*pass)(const struct run *run, void *call), double operations) {
  for (int64_t head_dim = 64; head_dim <= 128; head_dim *= 2) {
    struct call c = call_new(run, &(struct call_shape){1, 1024, 1024, 8, 1, head_dim, head_dim});
    prepare(run, &c, 0);
    report(run, head_dim == 64 ? "8x1024x64" : "8x1024x128", pass, &c,
           operations * 8 * 1024 * 1024 * (double)head_dim, "flop");
    call_free(&c);
  }
}
