/* The backward pass, as options ask for it: the same for every command that computes or reads
 * gradients. */
#ifndef FA3_CLI_GRADIENT_OPTIONS_H
#define FA3_CLI_GRADIENT_OPTIONS_H

#include <argp.h>
#include <stdbool.h>

#include "attention_options.h"

enum gradient { GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_SINK, GRADIENTS };

struct gradient_options {
  const char *grad_output; /* null: the container's */
  const char *grad_lse;    /* null: there is none */
  const char *all;         /* the file of all gradients that have none of their own, or null */
  const char *files[GRADIENTS];
  fa3_dtype dtype; /* 0: each tensor's own */
  bool deterministic;
  bool wanted; /* one of the above was given */
};

/* A child of a command's argp; its input is a struct gradient_options. */
extern const struct argp gradient_argp;

/* Refuses what keeps gradients from being computed or verified: no gradient of the output, and
 * options that do not go with them. */
void gradient_options_check(const struct gradient_options *chosen,
                            const struct attention_options *attention, struct argp_state *state);

/* Where a gradient goes or is; null: nowhere. */
const char *gradient_file(const struct gradient_options *chosen, enum gradient gradient);

/* "--grad-query" and so on, and the names in a .safetensors file, ended by a null. */
extern const char *const gradient_option_names[GRADIENTS];
extern const char *const gradient_tensor_names[GRADIENTS][4];

#endif
