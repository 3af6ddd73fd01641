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
  } words[] = {{"1 (FA3_FLOAT32)", "fp32"},  {"2 (FA3_FLOAT16)", "fp16"},
               {"3 (FA3_BFLOAT16)", "bf16"}, {"FA3_FLOAT32", "fp32"},
               {"FA3_FLOAT16", "fp16"},      {"FA3_BFLOAT16", "bf16"}};
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

static int check(fa3_status status) {
  return status ? fail(library_exit_code(status), "%s", library_message()) : 0;
}

static int grow(fa3_device device, size_t bytes, void **workspace, size_t *size) {
  if (bytes <= *size) return 0;
  library_free_workspace(device, *workspace);
  *workspace = NULL;
  *size = 0;
  if (device.type == FA3_CUDA) {
    TRY(cuda_allocate(bytes, "the workspace", workspace));
  } else {
    *workspace = malloc(bytes);
    if (!*workspace) return fail(EXIT_FAILED, "no memory for the workspace: %zu bytes", bytes);
  }
  *size = bytes;
  return 0;
}

int library_forward(fa3_forward_args *args) {
  size_t bytes = 0;
  TRY(check(fa3_forward_workspace(args, &bytes)));
  TRY(grow(args->device, bytes, &args->workspace, &args->workspace_size));
  return check(fa3_forward(args));
}

int library_backward(fa3_backward_args *args) {
  size_t bytes = 0;
  TRY(check(fa3_backward_workspace(args, &bytes)));
  TRY(grow(args->device, bytes, &args->workspace, &args->workspace_size));
  return check(fa3_backward(args));
}

void library_free_workspace(fa3_device device, void *workspace) {
  if (device.type == FA3_CUDA)
    cuda_free(workspace);
  else
    free(workspace);
}
