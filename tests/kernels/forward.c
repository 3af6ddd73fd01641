/* The tile loop on one level's routines, against the float64 reference. The tests of the public
 * API go through every argument; here it is lengths around the tiles' edges. */
#include <math.h>
#include <stdlib.h>

#include "cpu/forward.h"
#include "kernels.h"
#include "call_shape.h"
#include "reference.h"
#include "sanitized.h"

struct call {
  const struct routines *routines;
  fa3_forward_args args;
  struct problem problem;
  struct cpu_plan plan;
  void *workspace;
};

static void *random_elements(struct run *run, int64_t count) {
  struct rows rows = {.dtype = run->dtype, .count = 1, .width = count};
  char *data = guarded_new((size_t)count * fa3_dtype_size(run->dtype));
  fill_rows(&run->rng, &rows, data);
  return data;
}

static struct call call_new(struct run *run, const struct call_shape *shape) {
  const int64_t batch = shape->batch, seqlen_q = shape->seqlen_q, seqlen_k = shape->seqlen_k;
  const int64_t heads_k = shape->heads_k, heads_q = heads_k * shape->group;
  const int64_t head_dim = shape->head_dim, value_head_dim = shape->value_head_dim;
  int64_t outputs = batch * seqlen_q * heads_q * value_head_dim;
  struct call c = {.routines = run->routines,
                   .args = {.struct_size = sizeof c.args,
                            .flags = shape->flags,
                            .window_left = shape->window_left,
                            .window_right = shape->window_right,
                            .softcap = shape->softcap}};
  c.args.query = fa3_dense(random_elements(run, batch * seqlen_q * heads_q * head_dim), run->dtype,
                           batch, seqlen_q, heads_q, head_dim);
  c.args.key = fa3_dense(random_elements(run, batch * seqlen_k * heads_k * head_dim), run->dtype,
                         batch, seqlen_k, heads_k, head_dim);
  c.args.value = fa3_dense(random_elements(run, batch * seqlen_k * heads_k * value_head_dim),
                           run->dtype, batch, seqlen_k, heads_k, value_head_dim);
  c.args.output = fa3_dense(guarded_new((size_t)outputs * fa3_dtype_size(run->dtype)), run->dtype,
                            batch, seqlen_q, heads_q, value_head_dim);
  c.args.lse = fa3_lse(guarded_new((size_t)(batch * heads_q * seqlen_q) * sizeof(float)), batch,
                       heads_q, seqlen_q);
  return c;
}

static void call_plan(struct call *c) {
  if (problem_from_args(FA3_FORWARD, &c->args, &c->problem)) abort();
  cpu_plan_forward(&c->problem, c->routines, c->routines, &c->plan);
  c->workspace = guarded_new(c->plan.workspace_size);
}

static void call_run(void *argument) {
  struct call *c = argument;
  cpu_forward(&c->problem, c->routines, c->routines, &c->plan, c->workspace);
}

static void call_free(struct call *c) {
  guarded_free(c->args.query.data);
  guarded_free(c->args.key.data);
  guarded_free(c->args.value.data);
  guarded_free(c->args.output.data);
  guarded_free(c->args.lse.data);
  guarded_free(c->workspace);
}

static bool check_row(const struct run *run, const fa3_forward_args *args, int64_t batch,
                      int64_t head, int64_t row) {
  double expected[256], bound[256], lse, lse_bound;
  reference_row(args, batch, head, row, expected, &lse);
  reference_bound(args, batch, head, row, expected, lse, bound, &lse_bound);
  int64_t at = reference_output_index(args, batch, head, row);
  for (int64_t d = 0; d < args->output.shape[3]; d++) {
    double value = reference_load(&args->output, at + d);
    if (!(value == expected[d] || fabs(value - expected[d]) <= bound[d]))
      return wrong(run, "batch %d, head %d, row %d, element %d is %g: expected %g within %.2g",
                   (int)batch, (int)head, (int)row, (int)d, value, expected[d], bound[d]);
  }
  double value = reference_load(&args->lse, reference_lse_index(args, batch, head, row));
  if (value == lse || fabs(value - lse) <= lse_bound) return true;
  return wrong(run, "the lse of batch %d, head %d, row %d is %g: expected %g within %.2g",
               (int)batch, (int)head, (int)row, value, lse, lse_bound);
}

static bool check(struct run *run) {
  struct rng *rng = &run->rng;
  const struct call_shape shape = random_call_shape(rng);
  struct call c = call_new(run, &shape);
  c.args.num_threads = (int32_t)rng_between(rng, 1, 3);
  call_plan(&c);
  call_run(&c);
  bool good = (guarded_intact(c.args.output.data) && guarded_intact(c.args.lse.data) &&
               guarded_intact(c.workspace)) ||
              wrong(run, "wrote outside");
  for (int i = 0; good && i < (SANITIZED ? 3 : 10); i++)
    good = check_row(run, &c.args, rng_between(rng, 0, shape.batch - 1),
                     rng_between(rng, 0, shape.heads_k * shape.group - 1),
                     rng_between(rng, 0, shape.seqlen_q - 1));
  call_free(&c);
  return good;
}

static void bench(struct run *run) {
  for (int64_t head_dim = 64; head_dim <= 128; head_dim *= 2) {
    const struct call_shape shape = timed_call_shape(head_dim);
    struct call c = call_new(run, &shape);
    call_plan(&c);
    report(run, head_dim == 64 ? "8x1024x64" : "8x1024x128", call_run, &c,
           4.0 * 8 * 1024 * 1024 * (double)head_dim, "flop");
    call_free(&c);
  }
}

const struct subject forward_subject = {"forward", true, check, bench};
