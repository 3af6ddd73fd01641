#include "fp8.h"

#include <string.h>

#include "failure.h"

enum { KEY_FP8 = 0x600, ROWS_OF_SCALE = 128 };

static const struct argp_option options[] = {
    {.name = "fp8",
     .key = KEY_FP8,
     .arg = "rotate",
     .flags = OPTION_ARG_OPTIONAL,
     .doc = "Make E4M3 codes of query, key and value first, as fa3 quantize does, with a scale for "
            "128 rows of a head; rotate: rotate query and key before that. fa3 verify says then "
            "how far the output is from that of the tensors before, too",
     .group = 3},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct fp8_options *fp8 = state->input;
  if (key != KEY_FP8) return ARGP_ERR_UNKNOWN;
  if (arg && strcmp(arg, "rotate") != 0)
    argp_error(state, "--fp8=%s: expected --fp8 or --fp8=rotate", arg);
  *fp8 = (struct fp8_options){true, {.rows = ROWS_OF_SCALE, .rotate = arg}};
  return 0;
}

const struct argp fp8_argp = {.options = options, .parser = parse};

int fp8_prepare(const struct coding *coding, struct operands *operands) {
  for (int i = 0; i < INPUTS; i++) {
    const struct loaded_tensor *loaded = &operands->loaded[inputs[i]];
    if (loaded->dtype == FA3_FLOAT8_E4M3)
      return fail(EXIT_INPUT, "%s: --fp8 makes codes of what is none: it is e4m3 already",
                  loaded->origin);
    TRY(coded_add(coding, inputs[i], operands));
  }
  return operands_check(operands, &operands->forward);
}
