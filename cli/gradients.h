/* The tensors of a backward call, beside those of the forward one. */
#ifndef FA3_CLI_GRADIENTS_H
#define FA3_CLI_GRADIENTS_H

#include "gradient_options.h"
#include "operands.h"

struct gradients {
  struct loaded_tensor grad_output;
  struct loaded_tensor grad_lse;
  struct loaded_tensor tensors[GRADIENTS];
  fa3_backward_args args; /* views of the above and of the operands */
};

/* Reads what the gradients start from, which gradient_options_check has found to be named, for
 * operands that have an output and an lse. */
int gradients_read(const struct gradient_options *chosen, const struct source_rules *rules,
                   const struct operands *operands, struct gradients *gradients);

/* Makes the gradients, all zero; the sink's if there is a sink. */
int gradients_make(const struct gradient_options *chosen, const struct operands *operands,
                   struct gradients *gradients);

/* Reads those that have files, and leaves out the rest. */
int gradients_load(const struct gradient_options *chosen, const struct source_rules *rules,
                   const struct operands *operands, struct gradients *gradients);

/* The device that takes both calls. */
int gradients_choose_device(struct operands *operands, struct gradients *gradients,
                            const struct device_options *chosen);

void gradients_free(struct gradients *gradients);

#endif
