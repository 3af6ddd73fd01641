/* Causal attention of 8 query heads over 2 key heads, with nothing but libfa3 and libc. */
#include <fa3.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { batch = 1, seqlen = 1000, heads = 8, heads_k = 2, head_dim = 64 };

static float *random_numbers(size_t count) {
  float *numbers = malloc(count * sizeof *numbers);
  for (size_t i = 0; numbers && i < count; i++) numbers[i] = (float)rand() / (float)RAND_MAX;
  return numbers;
}

int main(void) {
  const size_t query_size = (size_t)batch * seqlen * heads * head_dim;
  const size_t key_size = (size_t)batch * seqlen * heads_k * head_dim;
  float *query = random_numbers(query_size);
  float *key = random_numbers(key_size);
  float *value = random_numbers(key_size);
  float *output = malloc(query_size * sizeof *output);

  fa3_forward_args args = {.struct_size = sizeof args};
  args.query = fa3_dense(query, FA3_FLOAT32, batch, seqlen, heads, head_dim);
  args.key = fa3_dense(key, FA3_FLOAT32, batch, seqlen, heads_k, head_dim);
  args.value = fa3_dense(value, FA3_FLOAT32, batch, seqlen, heads_k, head_dim);
  args.output = fa3_dense(output, FA3_FLOAT32, batch, seqlen, heads, head_dim);
  args.flags = FA3_CAUSAL;

  fa3_status status = fa3_forward_workspace(&args, &args.workspace_size);
  if (!status) {
    args.workspace = malloc(args.workspace_size);
    status = fa3_forward(&args);
  }
  if (status) {
    fprintf(stderr, "%s: %s\n", fa3_status_name(status), fa3_last_error());
  } else {
    /* The first query sees only the first key, so its output is the first value. */
    printf("libfa3 %s: output[0] is %.6f, value[0] is %.6f\n", fa3_version(), output[0], value[0]);
    if (!(fabsf(output[0] - value[0]) <= 1e-6F)) status = FA3_INTERNAL_ERROR;
  }

  free(query);
  free(key);
  free(value);
  free(output);
  free(args.workspace);
  return status ? EXIT_FAILURE : EXIT_SUCCESS;
}
