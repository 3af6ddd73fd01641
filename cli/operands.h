/* The tensors of one attention call, read from files and checked against each other. */
#ifndef FA3_CLI_OPERANDS_H
#define FA3_CLI_OPERANDS_H

#include "attention_options.h"
#include "device.h"
#include "loaded_tensor.h"

struct operands {
  struct loaded_tensor loaded[OPERANDS];
  struct loaded_tensor output;
  struct loaded_tensor lse;
  bool heads_first;
  fa3_forward_args args; /* views of the above */
};

/* Reads and checks all that the options name: ready but for output, lse and workspace. */
int operands_read(const struct attention_options *options, struct operands *operands);

/* Gives them an output and, if it is wanted, an lse, both zero. 0 as `dtype` is query's. */
int operands_make_output(struct operands *operands, fa3_dtype dtype, bool with_lse);

/* Checks an output, or an lse, that was read from a file into its place, and makes the view. */
int operands_check_output(struct operands *operands);
int operands_check_lse(struct operands *operands);

/* The device that takes the call; they have an output. */
int operands_choose_device(struct operands *operands, const struct device_options *options);

/* What an output and an lse are like, without data. */
struct loaded_tensor operands_output_shape(const struct operands *operands);
struct loaded_tensor operands_lse_shape(const struct operands *operands);

/* The library's view of a tensor like query, key or value as a file has it: heads first or not,
 * with a batch or without. And of one like lse. */
fa3_tensor operands_view(const struct operands *operands, const struct loaded_tensor *tensor,
                         bool packed);
fa3_tensor operands_lse_view(const struct operands *operands, const struct loaded_tensor *tensor);

void operands_free(struct operands *operands);

#endif
