/* The way of every call: its arguments are copied, checked and made a problem; an engine plans it,
 * without touching the data; then what needs the data is checked, and the engine runs the plan. */
#include "engine.h"
#include "error.h"
#include "integer.h"
#include "structs.h"
#include "validate.h"

/* A struct of any phase. */
union args {
  fa3_forward_args forward;
  fa3_backward_args backward;
  fa3_append_args append;
  fa3_combine_args combine;
  fa3_quantize_args quantize;
};

struct call {
  struct problem problem;
  const struct engine *engine;
  struct plan plan;
};

/* Everything that can be checked without reading the caller's memory, and the plan. */
static fa3_status plan_call(fa3_phase phase, const void *theirs, struct call *call) {
  const struct argument_struct *type = arguments_of(phase);
  union args args;
  TRY(struct_read("args", theirs, &args, type->oldest, type->size));
  TRY(problem_from_args(phase, &args, &call->problem));
  call->engine = engine_for(call->problem.device.type);
  TRY(call->engine->prepare(call->problem.device.index));
  const fa3_capability capability = problem_capability(&call->problem);
  TRY(engine_supports(call->engine, &capability));
  return call->engine->plan(&call->problem, &call->plan);
}

static fa3_status check_workspace(const struct call *call) {
  const size_t given = call->problem.workspace_size, needed = call->plan.workspace_size;
  if (needed && !call->problem.workspace)
    return set_error(FA3_INVALID_WORKSPACE, "workspace is null: expected %zu bytes", needed);
  if (given < needed)
    return set_error(FA3_INVALID_WORKSPACE, "workspace_size is %zu: expected at least %zu", given,
                     needed);
  return FA3_OK;
}

static fa3_status find_workspace_size(fa3_phase phase, const void *args, size_t *bytes) {
  struct call call;
  if (!bytes) return set_error(FA3_INVALID_POINTER, "bytes is null");
  TRY(plan_call(phase, args, &call));
  *bytes = call.plan.workspace_size;
  return FA3_OK;
}

static fa3_status run(fa3_phase phase, const void *args) {
  struct call call;
  TRY(plan_call(phase, args, &call));
  TRY(problem_check_data(&call.problem));
  TRY(check_workspace(&call));
  return call.engine->run(&call.problem, &call.plan);
}

fa3_status fa3_forward_workspace(const fa3_forward_args *args, size_t *bytes) {
  return find_workspace_size(FA3_FORWARD, args, bytes);
}

fa3_status fa3_forward(const fa3_forward_args *args) {
  return run(FA3_FORWARD, args);
}

fa3_status fa3_backward_workspace(const fa3_backward_args *args, size_t *bytes) {
  return find_workspace_size(FA3_BACKWARD, args, bytes);
}

fa3_status fa3_backward(const fa3_backward_args *args) {
  return run(FA3_BACKWARD, args);
}

fa3_status fa3_append(const fa3_append_args *args) {
  return run(FA3_APPEND, args);
}

/* Keys of a sequence that the append writes, counted from its newest: its own new rows, or those of
 * all where several may share pages or an entry of the cache. All keys may be, if it is not said
 * how many there are. */
static int64_t appended_keys(const struct problem *append, const struct problem *forward) {
  int64_t rows = smaller(append->max_seqlen_q, append->rows_q);
  if (append->batch == 0 || rows == 0) return 0;
  if (problem_shares_new_rows(append) && __builtin_mul_overflow(rows, append->batch, &rows))
    rows = INT64_MAX;
  return forward->seqused_k ? rows : INT64_MAX;
}

fa3_status fa3_append_forward(const fa3_append_args *append, const fa3_forward_args *forward) {
  struct call first, second;
  TRY(plan_call(FA3_APPEND, append, &first));
  TRY(plan_call(FA3_FORWARD, forward, &second));
  const fa3_device *here = &first.problem.device, *there = &second.problem.device;
  if (here->type != there->type || here->index != there->index ||
      first.problem.stream != second.problem.stream)
    return set_error(FA3_INVALID_DEVICE, "forward's device or stream is not append's");
  TRY(problem_check_data(&first.problem));
  TRY(problem_check_data(&second.problem));
  TRY(check_workspace(&second));
  const struct engine *engine = second.engine;
  if (engine->takes_append && engine->takes_append(&second.problem, &second.plan, &first.problem)) {
    second.problem.append = &first.problem;
  } else {
    second.problem.appended = appended_keys(&first.problem, &second.problem);
    TRY(engine->run(&first.problem, &first.plan));
  }
  return engine->run(&second.problem, &second.plan);
}

fa3_status fa3_combine(const fa3_combine_args *args) {
  return run(FA3_COMBINE, args);
}

fa3_status fa3_quantize(const fa3_quantize_args *args) {
  return run(FA3_QUANTIZE, args);
}

fa3_status fa3_backward_init(const fa3_forward_args *theirs, fa3_backward_args *backward) {
  const struct argument_struct *from = arguments_of(FA3_FORWARD), *to = arguments_of(FA3_BACKWARD);
  fa3_forward_args forward;
  TRY(struct_read("forward", theirs, &forward, from->oldest, from->size));
  fa3_backward_args ours = {.device = forward.device,
                            .stream = forward.stream,
                            .max_seqlen_q = forward.max_seqlen_q,
                            .max_seqlen_k = forward.max_seqlen_k,
                            .flags = forward.flags,
                            .softmax_scale = forward.softmax_scale,
                            .softcap = forward.softcap,
                            .num_threads = forward.num_threads,
                            .window_left = forward.window_left,
                            .window_right = forward.window_right,
                            .reserved_multiprocessors = forward.reserved_multiprocessors};
  for (int i = 0; i < from->count; i++) {
    const fa3_tensor *tensor = argument_in(&forward, &from->arguments[i]);
    const struct argument *same = find_argument(FA3_BACKWARD, from->arguments[i].tensor);
    if (same)
      *argument_in(&ours, same) = *tensor;
    else if (!tensor_absent(tensor))
      return set_error(FA3_UNSUPPORTED, "forward has %s: the backward pass does not take it",
                       tensor_rows[from->arguments[i].tensor].name);
  }
  return struct_write("backward", backward, &ours, to->oldest, to->size);
}
