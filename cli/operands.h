/* The tensors of an attention call and of its gradients: read from files or made, and checked
 * against each other by the library. */
#ifndef FA3_CLI_OPERANDS_H
#define FA3_CLI_OPERANDS_H

#include "attention_options.h"
#include "device.h"
#include "library.h"
#include "loaded_tensor.h"

struct operands {
  struct loaded_tensor loaded[TENSORS];
  bool heads_first;
  struct call forward; /* views of the above; the gradients' call has none of its own yet */
  struct call backward;

  /* With --fp8: what makes codes of query, key and value, in this order, and of what. */
  struct call quantize[3];
  struct loaded_tensor originals[3];
  int quantize_count;
};

/* Reads and checks the inputs of the forward call, the contents of the lengths included. */
int operands_read(const struct attention_options *options, struct operands *operands);

/* Reads one more tensor; `source` may be null, as loaded_tensor_read has it. */
int operands_load(const struct attention_options *options, enum tensor tensor, const char *source,
                  struct operands *operands);

/* Makes a tensor of the shape that it has to have, all zero. 0: of the dtype of the tensor that it
 * follows. */
int operands_make(struct operands *operands, enum tensor tensor, fa3_dtype dtype);

/* Puts a tensor into the arguments of both passes. */
int operands_set_view(struct operands *operands, enum tensor tensor);

/* What the library says of a call on the CPU, which takes all that is valid. */
int operands_check(const struct operands *operands, const struct call *call);

/* What the gradients start from, for operands that have an output and an lse. */
int operands_read_gradients(const struct attention_options *options, struct operands *operands);

/* The gradients of the inputs that there are, all zero; then those that have files, from them. */
int operands_make_gradients(const struct attention_options *options, struct operands *operands);
int operands_load_gradients(const struct attention_options *options, struct operands *operands);

/* Puts query, key and value as they were before they became codes in the place of those that
 * `operands`, a copy, has: those of a .safetensors file, which have to have their shapes, or with a
 * null file those of --fp8.
 * Whatever comes of it, operands_free_originals frees them. */
int operands_read_originals(const struct attention_options *options, const char *file,
                            struct operands *operands);
void operands_free_originals(struct operands *operands);

/* The device that takes the call, what goes before it, and with `gradients` theirs too. */
int operands_choose_device(struct operands *operands, bool gradients,
                           const struct device_options *chosen);

/* The extents of a tensor with their axes' names, as its file has them, and its dtype. */
void operands_describe(const struct operands *operands, enum tensor tensor, char *text,
                       size_t size);

void operands_free(struct operands *operands);

#endif
