/* The backward call: check, plan, run. */
#include <stddef.h>

#include "call.h"
#include "error.h"
#include "structs.h"

/* Everything that can be checked without reading the caller's memory, and the plan. */
static fa3_status plan_backward(const fa3_backward_args *theirs, fa3_backward_args *args,
                                struct problem *problem, const struct engine **engine,
                                struct plan *plan) {
  TRY(struct_read("args", theirs, args, sizeof *args, sizeof *args));
  TRY(problem_from_backward_args(args, problem));
  return plan_call(problem, engine, plan);
}

fa3_status fa3_backward_workspace(const fa3_backward_args *theirs, size_t *bytes) {
  fa3_backward_args args;
  struct problem problem;
  const struct engine *engine;
  struct plan plan;
  if (!bytes) return set_error(FA3_INVALID_POINTER, "bytes is null");
  TRY(plan_backward(theirs, &args, &problem, &engine, &plan));
  *bytes = plan.workspace_size;
  return FA3_OK;
}

fa3_status fa3_backward(const fa3_backward_args *theirs) {
  fa3_backward_args args;
  struct problem problem;
  const struct engine *engine;
  struct plan plan;
  TRY(plan_backward(theirs, &args, &problem, &engine, &plan));
  TRY(problem_check_backward_data(&args, &problem));
  TRY(check_workspace(&plan, args.workspace, args.workspace_size));
  return engine->backward(&problem, &plan, args.workspace);
}
