/* A text's attention, by the library's own call. The probabilities, which attention never stores,
 * are its output too: where the values are the unit vectors. */
#include <stdlib.h>

#include "fa3.h"
#include "toys.h"

/* One call: null, or what is wrong. */
static const char *run(fa3_forward_args *args) {
  if (fa3_forward_workspace(args, &args->workspace_size)) return fa3_last_error();
  args->workspace = malloc(args->workspace_size ? args->workspace_size : 1);
  if (!args->workspace) return "out of memory";
  const fa3_status status = fa3_forward(args);
  free(args->workspace);
  return status ? fa3_last_error() : NULL;
}

const char *toy_heads(int tokens, int heads, int heads_k, int head_dim, const float *query,
                      const float *key, const float *value, int causal, int left, float *weights,
                      float *output, float *lse) {
  const int width = (tokens + 7) / 8 * 8;
  fa3_forward_args args = {.struct_size = sizeof args};
  args.query = fa3_dense(query, FA3_FLOAT32, 1, tokens, heads, head_dim);
  args.key = fa3_dense(key, FA3_FLOAT32, 1, tokens, heads_k, head_dim);
  args.value = fa3_dense(value, FA3_FLOAT32, 1, tokens, heads_k, head_dim);
  args.output = fa3_dense(output, FA3_FLOAT32, 1, tokens, heads, head_dim);
  args.lse = fa3_lse(lse, 1, heads, tokens);
  args.flags = (causal ? FA3_CAUSAL : 0) | (left < 0 ? 0 : FA3_WINDOW);
  args.window_left = left < 0 ? 0 : left;
  args.window_right = left < 0 ? 0 : -1;
  args.num_threads = 1;
  const char *wrong = run(&args);
  if (wrong) return wrong;

  float *unit = calloc((size_t)tokens * (size_t)width, sizeof *unit);
  if (!unit) return "out of memory";
  for (int token = 0; token < tokens; token++)
    unit[(size_t)token * (size_t)width + (size_t)token] = 1.0f;
  args.value = fa3_dense(unit, FA3_FLOAT32, 1, tokens, heads_k, width);
  args.value.strides[1] = width; /* the same for every head */
  args.value.strides[2] = 0;
  args.output = fa3_dense(weights, FA3_FLOAT32, 1, tokens, heads, width);
  wrong = run(&args);
  free(unit);
  return wrong;
}
