#include "call.h"

#include "error.h"

fa3_status plan_call(const struct problem *problem, const struct engine **engine,
                     struct plan *plan) {
  *engine = engine_for(problem->device.type);
  TRY((*engine)->prepare(problem->device.index));
  fa3_capability capability = problem_capability(problem);
  TRY((*engine)->supports(&capability));
  return problem->phase == FA3_FORWARD ? (*engine)->plan_forward(problem, plan)
                                       : (*engine)->plan_backward(problem, plan);
}

fa3_status check_workspace(const struct plan *plan, const void *workspace, size_t size) {
  if (plan->workspace_size && !workspace)
    return set_error(FA3_INVALID_WORKSPACE, "workspace is null: expected %zu bytes",
                     plan->workspace_size);
  if (size < plan->workspace_size)
    return set_error(FA3_INVALID_WORKSPACE, "workspace_size is %zu: expected at least %zu", size,
                     plan->workspace_size);
  return FA3_OK;
}
