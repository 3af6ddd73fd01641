#include "library.h"

#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "failure.h"

int library_exit_code(fa3_status status) {
  if (status == FA3_INVALID_ENVIRONMENT) return EXIT_USAGE;
  if (status == FA3_INVALID_DEVICE) return EXIT_UNSUPPORTED;
  if (status < 100) return EXIT_INPUT;
  return status < 200 ? EXIT_UNSUPPORTED : EXIT_FAILED;
}

const char *library_message(void) {
  static const struct {
    const char *theirs;
    const char *ours;
  } words[] = {
      {"1 (FA3_FLOAT32)", "fp32"},     {"2 (FA3_FLOAT16)", "fp16"}, {"3 (FA3_BFLOAT16)", "bf16"},
      {"4 (FA3_FLOAT8_E4M3)", "e4m3"}, {"FA3_FLOAT8_E4M3", "e4m3"}, {"FA3_FLOAT32", "fp32"},
      {"FA3_FLOAT16", "fp16"},         {"FA3_BFLOAT16", "bf16"},    {"32 (FA3_INT32)", "int32"},
      {"33 (FA3_INT64)", "int64"},     {"FA3_INT32", "int32"},      {"FA3_INT64", "int64"}};
  static char message[1024];
  size_t length = 0;
  for (const char *at = fa3_last_error(); *at && length + 16 < sizeof message;) {
    size_t word = 0;
    while (word < sizeof words / sizeof words[0] &&
           strncmp(at, words[word].theirs, strlen(words[word].theirs)) != 0)
      word++;
    if (word == sizeof words / sizeof words[0]) {
      message[length++] = *at++;
      continue;
    }
    memcpy(message + length, words[word].ours, strlen(words[word].ours));
    length += strlen(words[word].ours);
    at += strlen(words[word].theirs);
  }
  message[length] = '\0';
  return message;
}

/* All structs begin with the same fields. */
fa3_device call_device(const struct call *call) {
  return call->args.forward.device;
}

void call_set_device(struct call *call, fa3_device device, int32_t num_threads) {
  call->args.forward.device = device;
  if (call->phase == FA3_BACKWARD)
    call->args.backward.num_threads = num_threads;
  else if (call->phase == FA3_QUANTIZE)
    call->args.quantize.num_threads = num_threads;
  else
    call->args.forward.num_threads = num_threads;
}

/* It has no workspace to ask for. */
static fa3_status check_quantize(const fa3_quantize_args *args) {
  const fa3_capability capability = {.struct_size = sizeof capability,
                                     .device = args->device,
                                     .phase = FA3_QUANTIZE,
                                     .query_dtype = args->input.dtype,
                                     .output_dtype = args->codes.dtype,
                                     .head_dim = (int32_t)args->input.shape[args->input.rank - 1]};
  return fa3_supports(&capability);
}

fa3_status library_check(const struct call *call, size_t *bytes) {
  *bytes = 0;
  if (call->phase == FA3_QUANTIZE) return check_quantize(&call->args.quantize);
  return call->phase == FA3_BACKWARD ? fa3_backward_workspace(&call->args.backward, bytes)
                                     : fa3_forward_workspace(&call->args.forward, bytes);
}

static int check(fa3_status status) {
  return status ? fail(library_exit_code(status), "%s", library_message()) : 0;
}

static int grow(struct call *call, size_t bytes) {
  if (bytes <= call->workspace_size) return 0;
  library_free_workspace(call);
  if (call_device(call).type == FA3_CUDA) {
    TRY(cuda_allocate(bytes, "the workspace", &call->workspace));
  } else {
    call->workspace = malloc(bytes);
    if (!call->workspace) return fail(EXIT_FAILED, "no memory for the workspace: %zu bytes", bytes);
  }
  call->workspace_size = bytes;
  return 0;
}

int library_run(struct call *call) {
  size_t bytes = 0;
  TRY(check(library_check(call, &bytes)));
  TRY(grow(call, bytes));
  if (call->phase == FA3_QUANTIZE) return check(fa3_quantize(&call->args.quantize));
  if (call->phase == FA3_BACKWARD) {
    call->args.backward.workspace = call->workspace;
    call->args.backward.workspace_size = call->workspace_size;
    return check(fa3_backward(&call->args.backward));
  }
  call->args.forward.workspace = call->workspace;
  call->args.forward.workspace_size = call->workspace_size;
  return check(fa3_forward(&call->args.forward));
}

void library_free_workspace(struct call *call) {
  if (call_device(call).type == FA3_CUDA)
    cuda_free(call->workspace);
  else
    free(call->workspace);
  call->workspace = NULL;
  call->workspace_size = 0;
}
