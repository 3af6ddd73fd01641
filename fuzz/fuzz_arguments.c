/* fa3_forward and fa3_backward with any arguments: the first byte chooses the pass, then come the
 * struct and what the tensors hold. What the checks take is also run, if it is small, in memory of
 * exactly the size that the arguments describe. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/plan.h"
#include "target.h"

enum { LARGEST_EXTENT = 64, LARGEST_TENSOR = 1 << 12, LARGEST_MEMORY = 1 << 20 };

/* The arguments of either pass, in room for a struct of any size that the library reads. */
static union {
  fa3_forward_args forward;
  fa3_backward_args backward;
  char room[1 << 16];
} args;
static bool backward;

static int32_t *num_threads(void) {
  return backward ? &args.backward.num_threads : &args.forward.num_threads;
}

static fa3_status workspace_size(size_t *bytes) {
  return backward ? fa3_backward_workspace(&args.backward, bytes)
                  : fa3_forward_workspace(&args.forward, bytes);
}

static fa3_status run(void) {
  return backward ? fa3_backward(&args.backward) : fa3_forward(&args.forward);
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
  *num_threads() = 0;
  fa3_status status = problem_from_args(backward ? FA3_BACKWARD : FA3_FORWARD, &args, &problem);
  if (!status)
    status =
        backward ? plan_backward(&problem, &facts, &plan) : plan_forward(&problem, &facts, &plan);
  if (status) check_refusal(status);
}

static const struct argument_struct *arguments(void) {
  return arguments_of(backward ? FA3_BACKWARD : FA3_FORWARD);
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
    if (!is_small(argument_in(&args, &arguments()->arguments[i]))) return false;
  return true;
}

/* `contents`, over and over, is what the tensors hold. */
static void run_call(const uint8_t *contents, size_t size) {
  for (int i = 0; i < arguments()->count; i++) {
    fa3_tensor *tensor = argument_in(&args, &arguments()->arguments[i]);
    const size_t bytes = tensor->rank ? (size_t)bytes_of(tensor) : 0;
    uint8_t *memory = tensor->data = bytes ? malloc(bytes) : NULL;
    if (bytes && !memory) abort();
    for (size_t b = 0; b < bytes; b++) memory[b] = size ? contents[b % size] : 0;
  }
  void **workspace = backward ? &args.backward.workspace : &args.forward.workspace;
  size_t *bytes = backward ? &args.backward.workspace_size : &args.forward.workspace_size;
  *num_threads() = 1;
  if (workspace_size(bytes)) abort();
  *workspace = malloc(*bytes);
  fa3_status status = run();
  if (status) check_refusal(status);
  if (status && status != FA3_INVALID_LENGTHS) abort();
  free(*workspace);
  for (int i = 0; i < arguments()->count; i++)
    free(argument_in(&args, &arguments()->arguments[i])->data);
}

/* The library reads no more of a struct than struct_size says, and nor does what follows. */
static void forget_beyond_struct(void) {
  const size_t size = args.forward.struct_size;
  if (size < sizeof args.room) memset(args.room + size, 0, sizeof args.room - size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const size_t untouched = 0x5a5a5a5a;
  size_t bytes = untouched;
  if (size == 0) return 0;
  backward = *data++ & 1;
  size--;
  const size_t args_size = backward ? sizeof args.backward : sizeof args.forward;
  const size_t given = size < args_size ? size : args_size;
  memset(&args, 0, sizeof args);
  memcpy(&args, data, given);
  forget_beyond_struct();
  fa3_status status = workspace_size(&bytes);
  if (status) {
    check_refusal(status);
    if (bytes != untouched) abort();
  } else {
    if (all_small()) run_call(data + given, size - given);
    check_cuda_plan();
  }
  return 0;
}
