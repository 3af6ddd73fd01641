/* A caller in plain C99 and, through header.cpp, in C++17: nothing but fa3.h. */
#include "fa3.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
  float query[8] = {1}, key[16] = {0}, value[16], output[8];
  int i;
  for (i = 0; i < 16; i++) value[i] = i < 8 ? 1.0f : 2.0f;

  fa3_forward_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.query = fa3_dense(query, FA3_FLOAT32, 1, 1, 1, 8);
  args.key = fa3_dense(key, FA3_FLOAT32, 1, 2, 1, 8);
  args.value = fa3_dense(value, FA3_FLOAT32, 1, 2, 1, 8);
  args.output = fa3_dense(output, FA3_FLOAT32, 1, 1, 1, 8);
  args.flags = FA3_CAUSAL;
  if (fa3_forward_workspace(&args, &args.workspace_size) != FA3_OK) {
    puts(fa3_last_error());
    return 1;
  }
  args.workspace = malloc(args.workspace_size);
  if (fa3_forward(&args) != FA3_OK) {
    puts(fa3_last_error());
    return 1;
  }
  free(args.workspace);
  /* Two keys with the same score: the mean of their values. */
  for (i = 0; i < 8; i++)
    if (!(output[i] > 1.4999f && output[i] < 1.5001f)) {
      printf("output[%d] is %g: expected 1.5\n", i, (double)output[i]);
      return 1;
    }
  return 0;
}
