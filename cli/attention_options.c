#include "attention_options.h"

#include <float.h>
#include <string.h>

#include "numbers.h"
#include "path.h"
#include "source_options.h"

/* Keys of the tensors that are read, and of those that are written or verified. */
enum { KEY_SOURCES = 0x100, KEY_FILES = 0x200 };
enum { KEY_CAUSAL = 0x300, KEY_WINDOW, KEY_SCALE, KEY_SOFTCAP };
enum { KEY_GRADIENTS = 0x380, KEY_GRADIENT_DTYPE, KEY_DETERMINISTIC };

const enum tensor inputs[INPUTS] = {TENSOR_query, TENSOR_key, TENSOR_value};
const enum tensor input_gradients[GRADIENTS] = {TENSOR_grad_query, TENSOR_grad_key,
                                                TENSOR_grad_value, TENSOR_grad_sink};

static const struct argp_option options[] = {
    {.doc = "Tensors:", .group = 1},
    {.doc = "Masks and scores:", .group = 3},
    {.doc = "Lengths (LIST: integers such as 0,5,9, or a TENSOR):", .group = 4},
#define OPTION(tensor, option, argument, its_group, help) \
  {.name = (option),                                      \
   .key = KEY_SOURCES + TENSOR_##tensor,                  \
   .arg = (argument),                                     \
   .doc = (help),                                         \
   .group = (its_group)},
#include "tensors.def"
    {.name = "causal",
     .key = KEY_CAUSAL,
     .doc = "Query i sees key j if j <= i + seqlen_k - seqlen_q: the last query sees the last key",
     .group = 3},
    {.name = "window",
     .key = KEY_WINDOW,
     .arg = "LEFT,RIGHT",
     .doc = "How many keys a query sees on either side of its own, which is counted as for "
            "--causal; -1: all"},
    {.name = "scale",
     .key = KEY_SCALE,
     .arg = "X",
     .doc = "Factor of the scores (default: 1/sqrt(head_dim))"},
    {.name = "softcap",
     .key = KEY_SOFTCAP,
     .arg = "X",
     .doc = "Cap scores smoothly: X * tanh(score / X)"},
    {.doc = "Gradients:", .group = 5},
    {.name = "grad",
     .key = KEY_GRADIENTS,
     .arg = "FILE",
     .doc = "The .safetensors file with the gradients of query, key, value and sink: fa3 run "
            "writes it, fa3 verify reads it"},
    {.name = "grad-query",
     .key = KEY_FILES + TENSOR_grad_query,
     .arg = "FILE",
     .doc = "The file with query's gradient alone; it may be a .npy"},
    {.name = "grad-key",
     .key = KEY_FILES + TENSOR_grad_key,
     .arg = "FILE",
     .doc = "The file with key's gradient alone"},
    {.name = "grad-value",
     .key = KEY_FILES + TENSOR_grad_value,
     .arg = "FILE",
     .doc = "The file with value's gradient alone"},
    {.name = "grad-sink",
     .key = KEY_FILES + TENSOR_grad_sink,
     .arg = "FILE",
     .doc = "The file with the sink's gradient alone"},
    {.name = "grad-output",
     .key = KEY_SOURCES + TENSOR_grad_output,
     .arg = "TENSOR",
     .doc = "The output's gradient, which all start from; of the output's shape and dtype"},
    {.name = "grad-lse",
     .key = KEY_SOURCES + TENSOR_grad_lse,
     .arg = "TENSOR",
     .doc = "The log-sum-exp's gradient, where the loss uses it too"},
    {.name = "grad-dtype",
     .key = KEY_GRADIENT_DTYPE,
     .arg = "same|fp32",
     .doc = "The gradients' elements: those of query, key, value and sink (the default), or "
            "float32"},
    {.name = "deterministic",
     .key = KEY_DETERMINISTIC,
     .doc = "Ask for gradients that are bitwise the same every time; they are without it too"},
    {0}};

const char *option_of(enum tensor tensor) {
  static const char *const names[TENSORS] = {
#define OPTION(tensor, option, ...) [TENSOR_##tensor] = "--" option,
#include "tensors.def"
      [TENSOR_output] = "--out",
      [TENSOR_lse] = "--lse",
      [TENSOR_grad_query] = "--grad-query",
      [TENSOR_grad_key] = "--grad-key",
      [TENSOR_grad_value] = "--grad-value",
      [TENSOR_grad_sink] = "--grad-sink",
      [TENSOR_grad_output] = "--grad-output",
      [TENSOR_grad_lse] = "--grad-lse"};
  return names[tensor];
}

static void parse_window(const char *text, struct attention_options *attention,
                         struct argp_state *state) {
  int64_t sides[2];
  size_t count;
  if (!parse_integers(text, -1, INT64_MAX, sides, 2, &count) || count != 2)
    argp_error(state, "--window %s: expected LEFT,RIGHT of -1 or more", text);
  attention->flags |= FA3_WINDOW;
  attention->window_left = sides[0];
  attention->window_right = sides[1];
}

static void check_sources(const struct attention_options *attention, struct argp_state *state) {
  for (int i = 0; i < INPUTS; i++)
    if (!attention->sources[inputs[i]] && !attention->rules.container)
      argp_error(state, "%s is missing, and there is no --in", option_of(inputs[i]));
  if (attention->sources[TENSOR_diagonal] && !(attention->flags & (FA3_CAUSAL | FA3_WINDOW)))
    argp_error(state, "--diagonal needs --causal or --window");
}

/* Those of the gradients. */
static error_t parse_gradient_option(int key, const char *arg, struct attention_options *attention,
                                     struct argp_state *state) {
  switch (key) {
    case KEY_GRADIENTS:
      if (!path_has_suffix(arg, ".safetensors"))
        argp_error(state, "--grad %s: expected a .safetensors file", arg);
      attention->all_gradients = arg;
      break;
    case KEY_GRADIENT_DTYPE:
      if (strcmp(arg, "fp32") == 0)
        attention->gradient_dtype = FA3_FLOAT32;
      else if (strcmp(arg, "same") != 0)
        argp_error(state, "--grad-dtype %s: expected same or fp32", arg);
      break;
    case KEY_DETERMINISTIC:
      attention->deterministic = true;
      break;
    default:
      return ARGP_ERR_UNKNOWN;
  }
  attention->gradients_wanted = true;
  return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct attention_options *attention = state->input;
  if (key >= KEY_SOURCES && key < KEY_SOURCES + TENSORS) {
    const enum tensor tensor = (enum tensor)(key - KEY_SOURCES);
    attention->sources[tensor] = arg;
    if (!find_argument(FA3_FORWARD, tensor)) attention->gradients_wanted = true;
    return 0;
  }
  if (key >= KEY_FILES && key < KEY_FILES + TENSORS) {
    attention->files[key - KEY_FILES] = arg;
    attention->gradients_wanted = true;
    return 0;
  }
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &attention->rules;
      return 0;
    case KEY_CAUSAL:
      attention->flags |= FA3_CAUSAL;
      return 0;
    case KEY_WINDOW:
      parse_window(arg, attention, state);
      return 0;
    case KEY_SCALE:
      attention->flags |= FA3_SCALE;
      if (!parse_real(arg, -FLT_MAX, &attention->softmax_scale))
        argp_error(state, "--scale %s: expected a finite number that float32 can hold", arg);
      return 0;
    case KEY_SOFTCAP:
      if (!parse_real(arg, 0, &attention->softcap) ||
          (attention->softcap > 0 && attention->softcap < FLT_MIN))
        argp_error(state, "--softcap %s: expected 0 or a finite number from %g on", arg,
                   (double)FLT_MIN);
      return 0;
    case ARGP_KEY_END:
      check_sources(attention, state);
      return 0;
    default:
      return parse_gradient_option(key, arg, attention, state);
  }
}

static const struct argp_child children[] = {{&source_argp, 0, NULL, 0}, {0}};
const struct argp attention_argp = {.options = options, .parser = parse, .children = children};

bool is_output(enum tensor tensor) {
  const struct argument *forward = find_argument(FA3_FORWARD, tensor);
  const struct argument *backward = find_argument(FA3_BACKWARD, tensor);
  return (forward && forward->output) || (backward && backward->output);
}

const char *file_of(const struct attention_options *attention, enum tensor tensor) {
  const bool gradient = is_output(tensor) && !find_argument(FA3_FORWARD, tensor);
  return attention->files[tensor] || !gradient ? attention->files[tensor]
                                               : attention->all_gradients;
}

bool has_gradient_files(const struct attention_options *attention) {
  for (int i = 0; i < GRADIENTS; i++)
    if (file_of(attention, input_gradients[i])) return true;
  return false;
}

void gradient_options_check(const struct attention_options *attention, struct argp_state *state) {
  for (enum tensor i = 0; i < TENSORS; i++)
    if (attention->sources[i] && !find_argument(FA3_BACKWARD, i))
      argp_error(state, "%s: gradients do not go with it", option_of(i));
  if (attention->files[TENSOR_grad_sink] && !attention->sources[TENSOR_sink])
    argp_error(state, "--grad-sink: there is no --sink");
  if (!attention->sources[TENSOR_grad_output] && !attention->rules.container)
    argp_error(state, "--grad-output is missing, and there is no --in");
}
