/* Every call with any arguments: the first byte chooses it, then come the struct and what the
 * tensors hold. What the checks take is also run, if it is small, in memory of exactly the size
 * that the arguments describe. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/plan.h"
#include "target.h"

enum { LARGEST_EXTENT = 64, LARGEST_TENSOR = 1 << 12, LARGEST_MEMORY = 1 << 20 };

/* The arguments of a call, in room for a struct of any size that the library reads. */
static union {
  fa3_forward_args forward;
  fa3_backward_args backward;
  fa3_append_args append;
  fa3_combine_args combine;
  fa3_quantize_args quantize;
  char room[1 << 16];
} args;

static fa3_status run_forward(void) {
  return fa3_forward(&args.forward);
}
static fa3_status run_backward(void) {
  return fa3_backward(&args.backward);
}
static fa3_status run_append(void) {
  return fa3_append(&args.append);
}
static fa3_status run_combine(void) {
  return fa3_combine(&args.combine);
}
static fa3_status run_quantize(void) {
  return fa3_quantize(&args.quantize);
}
static fa3_status forward_workspace(size_t *bytes) {
  return fa3_forward_workspace(&args.forward, bytes);
}
static fa3_status backward_workspace(size_t *bytes) {
  return fa3_backward_workspace(&args.backward, bytes);
}

struct target {
  fa3_phase phase;
  fa3_status (*run)(void);
  int32_t *num_threads;
  /* Of a call that has a workspace. */
  fa3_status (*find_workspace_size)(size_t *bytes);
  void **workspace;
  size_t *workspace_size;
  fa3_status (*plan_cuda)(const struct problem *, const struct cuda_facts *, struct cuda_plan *);
};
static const struct target targets[] = {
    {FA3_FORWARD, run_forward, &args.forward.num_threads, forward_workspace,
     &args.forward.workspace, &args.forward.workspace_size, plan_forward},
    {FA3_BACKWARD, run_backward, &args.backward.num_threads, backward_workspace,
     &args.backward.workspace, &args.backward.workspace_size, plan_backward},
    {.phase = FA3_APPEND, .run = run_append, .num_threads = &args.append.num_threads},
    {.phase = FA3_COMBINE, .run = run_combine, .num_threads = &args.combine.num_threads},
    {.phase = FA3_QUANTIZE, .run = run_quantize, .num_threads = &args.quantize.num_threads},
};
enum { TARGETS = sizeof targets / sizeof *targets };
static const struct target *target;

static const struct argument_struct *arguments(void) {
  return arguments_of(target->phase);
}

static fa3_tensor *tensor_at(int i) {
  return argument_in(&args, &arguments()->arguments[i]);
}

/* All that the library says of the arguments without their data. A call without a workspace has no
 * function for that, but goes no further without data. */
static fa3_status check_arguments(size_t *bytes) {
  if (target->find_workspace_size) return target->find_workspace_size(bytes);
  for (int i = 0; i < arguments()->count; i++) tensor_at(i)->data = NULL;
  const fa3_status status = target->run();
  return status == FA3_INVALID_POINTER && strstr(fa3_last_error(), ".data is null") ? FA3_OK
                                                                                    : status;
}

static void check_refusal(fa3_status status) {
  const char *message = fa3_last_error();
  if (status < 1 || status >= 200 || strcmp(fa3_status_name(status), "unknown status") == 0 ||
      !*message || strchr(message, '\n'))
    abort();
}

/* The CUDA engine's plan, which asks no device. */
static void check_cuda_plan(void) {
  static const struct cuda_facts facts = {.architecture = "sm_90a", .multiprocessors = 132};
  struct problem problem;
  struct cuda_plan plan;
  args.forward.device.type = FA3_CUDA;
  *target->num_threads = 0;
  fa3_status status = problem_from_args(target->phase, &args, &problem);
  if (!status && target->plan_cuda) status = target->plan_cuda(&problem, &facts, &plan);
  if (status) check_refusal(status);
}

/* From the first element to the last. */
static int64_t bytes_of(const fa3_tensor *tensor) {
  int64_t last = 0;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->shape[d] == 0) return 0;
    last += (tensor->shape[d] - 1) * tensor->strides[d];
  }
  return (last + 1) * (int64_t)fa3_dtype_size(tensor->dtype);
}

static bool is_small(const fa3_tensor *tensor) {
  int64_t elements = 1;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->shape[d] > LARGEST_EXTENT) return false;
    elements *= tensor->shape[d];
  }
  return elements <= LARGEST_TENSOR && bytes_of(tensor) <= LARGEST_MEMORY;
}

static bool all_small(void) {
  for (int i = 0; i < arguments()->count; i++)
    if (!is_small(tensor_at(i))) return false;
  return true;
}

/* `contents`, over and over, is what the tensors hold. */
static void run_call(const uint8_t *contents, size_t size) {
  for (int i = 0; i < arguments()->count; i++) {
    const size_t bytes = tensor_at(i)->rank ? (size_t)bytes_of(tensor_at(i)) : 0;
    uint8_t *memory = tensor_at(i)->data = bytes ? malloc(bytes) : NULL;
    if (bytes && !memory) abort();
    for (size_t b = 0; b < bytes; b++) memory[b] = size ? contents[b % size] : 0;
  }
  *target->num_threads = 1;
  void *workspace = NULL;
  if (target->workspace) {
    if (target->find_workspace_size(target->workspace_size)) abort();
    workspace = *target->workspace = malloc(*target->workspace_size);
  }
  fa3_status status = target->run();
  if (status) check_refusal(status);
  if (status && status != FA3_INVALID_LENGTHS) abort();
  free(workspace);
  for (int i = 0; i < arguments()->count; i++) free(tensor_at(i)->data);
}

/* What the library reads of the input: as many bytes as their struct_size says, so that inputs stay
 * what they are when a struct grows. */
static size_t take_struct(const uint8_t *data, size_t size) {
  memset(&args, 0, sizeof args);
  memcpy(&args, data, size < sizeof(size_t) ? size : sizeof(size_t));
  size_t given = args.forward.struct_size;
  if (given < sizeof(size_t)) given = sizeof(size_t);
  if (given > sizeof args) given = sizeof args;
  if (given > size) given = size;
  memcpy(&args, data, given);
  return given;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const size_t untouched = 0x5a5a5a5a;
  size_t bytes = untouched;
  if (size == 0) return 0;
  target = &targets[*data++ % TARGETS];
  size--;
  const size_t given = take_struct(data, size);
  fa3_status status = check_arguments(&bytes);
  if (status) {
    check_refusal(status);
    if (bytes != untouched) abort();
  } else {
    if (all_small()) run_call(data + given, size - given);
    check_cuda_plan();
  }
  return 0;
}
