/* What to compute, as options say it: tensors, masks, gradients, the same for every command that
 * works on files. */
#ifndef FA3_CLI_ATTENTION_OPTIONS_H
#define FA3_CLI_ATTENTION_OPTIONS_H

#include <argp.h>

#include "fa3.h"
#include "loaded_tensor.h"
#include "tensors.h"

struct attention_options {
  const char *sources[TENSORS]; /* of the inputs; null: not given */
  const char *files[TENSORS];   /* of outputs and gradients, to write or to verify; likewise */
  struct source_rules rules;
  uint32_t flags;
  int64_t window_left;
  int64_t window_right;
  float softmax_scale;
  float softcap;

  /* Gradients. */
  const char *all_gradients; /* the file of those that have none of their own, or null */
  fa3_dtype gradient_dtype;  /* 0: each tensor's own */
  bool deterministic;
  bool gradients_wanted; /* an option that is about gradients was given */
};

/* A child of a command's argp; its input is a struct attention_options. */
extern const struct argp attention_argp;

enum { INPUTS = 3, GRADIENTS = 4 };
extern const enum tensor inputs[INPUTS]; /* query, key, value */
extern const enum tensor input_gradients[GRADIENTS];

/* Whether one of the two calls writes it. */
bool is_output(enum tensor tensor);

/* Where an output goes or is; null: nowhere. And whether a gradient goes somewhere. */
const char *file_of(const struct attention_options *attention, enum tensor tensor);
bool has_gradient_files(const struct attention_options *attention);

/* Refuses what keeps gradients from being computed or verified: no gradient of the output, and
 * options that do not go with them. */
void gradient_options_check(const struct attention_options *attention, struct argp_state *state);

/* The option that names a tensor, with its dashes. */
const char *option_of(enum tensor tensor);

#endif
