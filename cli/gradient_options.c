#include "gradient_options.h"

#include <string.h>

#include "path.h"

enum { KEY_FILES = 0x600, KEY_ALL = 0x700, KEY_GRAD_OUTPUT, KEY_GRAD_LSE, KEY_DTYPE };
enum { KEY_DETERMINISTIC = 0x780 };

const char *const gradient_option_names[GRADIENTS] = {"--grad-query", "--grad-key", "--grad-value",
                                                      "--grad-sink"};
const char *const gradient_tensor_names[GRADIENTS][4] = {{"grad_query", "dquery", "dq", NULL},
                                                         {"grad_key", "dkey", "dk", NULL},
                                                         {"grad_value", "dvalue", "dv", NULL},
                                                         {"grad_sink", "dsink", NULL}};

static const struct argp_option options[] = {
    {.doc = "Gradients:", .group = 5},
    {.name = "grad",
     .key = KEY_ALL,
     .arg = "FILE",
     .doc = "The .safetensors file with the gradients of query, key, value and sink: fa3 run "
            "writes it, fa3 verify reads it"},
    {.name = "grad-query",
     .key = KEY_FILES + GRAD_QUERY,
     .arg = "FILE",
     .doc = "The file with query's gradient alone; it may be a .npy"},
    {.name = "grad-key",
     .key = KEY_FILES + GRAD_KEY,
     .arg = "FILE",
     .doc = "The file with key's gradient alone"},
    {.name = "grad-value",
     .key = KEY_FILES + GRAD_VALUE,
     .arg = "FILE",
     .doc = "The file with value's gradient alone"},
    {.name = "grad-sink",
     .key = KEY_FILES + GRAD_SINK,
     .arg = "FILE",
     .doc = "The file with the sink's gradient alone"},
    {.name = "grad-output",
     .key = KEY_GRAD_OUTPUT,
     .arg = "TENSOR",
     .doc = "The output's gradient, which all start from; of the output's shape and dtype"},
    {.name = "grad-lse",
     .key = KEY_GRAD_LSE,
     .arg = "TENSOR",
     .doc = "The log-sum-exp's gradient, where the loss uses it too"},
    {.name = "grad-dtype",
     .key = KEY_DTYPE,
     .arg = "same|fp32",
     .doc = "The gradients' elements: those of query, key, value and sink (the default), or "
            "float32"},
    {.name = "deterministic",
     .key = KEY_DETERMINISTIC,
     .doc = "Bitwise the same gradients every time"},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct gradient_options *chosen = state->input;
  if (key >= KEY_FILES && key < KEY_FILES + GRADIENTS) {
    chosen->files[key - KEY_FILES] = arg;
    chosen->wanted = true;
    return 0;
  }
  switch (key) {
    case KEY_ALL:
      if (!path_has_suffix(arg, ".safetensors"))
        argp_error(state, "--grad %s: expected a .safetensors file", arg);
      chosen->all = arg;
      break;
    case KEY_GRAD_OUTPUT:
      chosen->grad_output = arg;
      break;
    case KEY_GRAD_LSE:
      chosen->grad_lse = arg;
      break;
    case KEY_DTYPE:
      if (strcmp(arg, "fp32") == 0)
        chosen->dtype = FA3_FLOAT32;
      else if (strcmp(arg, "same") != 0)
        argp_error(state, "--grad-dtype %s: expected same or fp32", arg);
      break;
    case KEY_DETERMINISTIC:
      chosen->deterministic = true;
      break;
    default:
      return ARGP_ERR_UNKNOWN;
  }
  chosen->wanted = true;
  return 0;
}

const struct argp gradient_argp = {.options = options, .parser = parse};

void gradient_options_check(const struct gradient_options *chosen,
                            const struct attention_options *attention, struct argp_state *state) {
  if (attention->sources[CACHE_BATCH_INDEX])
    argp_error(state, "--cache-batch-index: gradients do not go with it");
  if (chosen->files[GRAD_SINK] && !attention->sources[SINK])
    argp_error(state, "--grad-sink: there is no --sink");
  if (!chosen->grad_output && !attention->rules.container)
    argp_error(state, "--grad-output is missing, and there is no --in");
}

const char *gradient_file(const struct gradient_options *chosen, enum gradient gradient) {
  return chosen->files[gradient] ? chosen->files[gradient] : chosen->all;
}
