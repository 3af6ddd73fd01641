/* A program that closes the library while its threads look out for the next call. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "fa3.h"

enum { SEQLEN = 512, HEAD_DIM = 64 };

static float query[SEQLEN * HEAD_DIM], output[SEQLEN * HEAD_DIM];

static fa3_tensor tensor(float *data) {
  return (fa3_tensor){.data = data,
                      .dtype = FA3_FLOAT32,
                      .rank = 4,
                      .shape = {1, SEQLEN, 1, HEAD_DIM},
                      .strides = {(int64_t)SEQLEN * HEAD_DIM, HEAD_DIM, HEAD_DIM, 1}};
}

int main(int count, char **arguments) {
  void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
  if (!library) {
    (void)fprintf(stderr, "%s\n", count == 2 ? dlerror() : "which library?");
    return 1;
  }
  fa3_status (*workspace)(const fa3_forward_args *, size_t *), (*forward)(const fa3_forward_args *);
  *(void **)&workspace = dlsym(library, "fa3_forward_workspace");
  *(void **)&forward = dlsym(library, "fa3_forward");
  fa3_forward_args args = {.struct_size = sizeof args,
                           .query = tensor(query),
                           .key = tensor(query),
                           .value = tensor(query),
                           .output = tensor(output),
                           .num_threads = 4};
  if (workspace(&args, &args.workspace_size)) return 1;
  args.workspace = malloc(args.workspace_size);
  const fa3_status status = forward(&args);
  free(args.workspace);
  if (status || dlclose(library)) return 1;
  (void)nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
  return 0;
}
