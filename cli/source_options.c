#include "source_options.h"

#include <string.h>

#include "loaded_tensor.h"
#include "path.h"

enum { KEY_IN = 0x700, KEY_LAYOUT, KEY_BF16 };

static const struct argp_option options[] = {
    {.name = "in",
     .key = KEY_IN,
     .arg = "FILE",
     .doc = "A .safetensors file with the tensors, or some of them",
     .group = 1},
    {.name = "layout",
     .key = KEY_LAYOUT,
     .arg = "bshd|bhsd",
     .doc = "Order of the axes in all files; bhsd has heads before seqlen"},
    {.name = "bf16",
     .key = KEY_BF16,
     .doc = "Take untyped 2-byte .npy elements ('<V2'), which is how ml_dtypes saves them, as "
            "bfloat16"},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct source_rules *rules = state->input;
  switch (key) {
    case KEY_IN:
      if (!path_has_suffix(arg, ".safetensors"))
        argp_error(state, "--in %s: expected a .safetensors file", arg);
      rules->container = arg;
      return 0;
    case KEY_LAYOUT:
      rules->heads_first = strcmp(arg, "bhsd") == 0;
      if (!rules->heads_first && strcmp(arg, "bshd") != 0)
        argp_error(state, "--layout %s: expected bshd or bhsd", arg);
      return 0;
    case KEY_BF16:
      rules->untyped_is_bfloat16 = true;
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

const struct argp source_argp = {.options = options, .parser = parse};
