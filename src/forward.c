/* The forward call: check, plan, run. */
#include <stddef.h>

#include "call.h"
#include "error.h"
#include "structs.h"

/* Everything that can be checked without reading the caller's memory, and the plan. */
static fa3_status plan_forward(const fa3_forward_args *theirs, fa3_forward_args *args,
                               struct problem *problem, const struct engine **engine,
                               struct plan *plan) {
  TRY(struct_read("args", theirs, args, sizeof *args, sizeof *args));
  TRY(problem_from_args(args, FA3_FORWARD, problem));
  return plan_call(problem, engine, plan);
}

fa3_status fa3_forward_workspace(const fa3_forward_args *theirs, size_t *bytes) {
  fa3_forward_args args;
  struct problem problem;
  const struct engine *engine;
  struct plan plan;
  if (!bytes) return set_error(FA3_INVALID_POINTER, "bytes is null");
  TRY(plan_forward(theirs, &args, &problem, &engine, &plan));
  *bytes = plan.workspace_size;
  return FA3_OK;
}

fa3_status fa3_forward(const fa3_forward_args *theirs) {
  fa3_forward_args args;
  struct problem problem;
  const struct engine *engine;
  struct plan plan;
  TRY(plan_forward(theirs, &args, &problem, &engine, &plan));
  TRY(problem_check_data(&args, &problem));
  TRY(check_workspace(&plan, args.workspace, args.workspace_size));
  return engine->forward(&problem, &plan, args.workspace);
}
