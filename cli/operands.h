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

  /* What makes codes of query, key and value, in this order, and of what: coded.h. */
  struct call quantize[INPUTS];
  struct loaded_tensor originals[INPUTS];
  int quantize_count;
};

/* Reads and checks the inputs of the forward call, the contents of the lengths included. */
int operands_read(const struct attention_options *options, struct operands *operands);

/* Reads those of query, key and value that there are, and where packed sequences start. */
int operands_read_some(const struct attention_options *options, struct operands *operands);

/* Reads one more tensor; `source` may be null, as loaded_tensor_read has it. */
int operands_load(const struct attention_options *options, enum tensor tensor, const char *source,
                  struct operands *operands);

/* Makes a tensor of the shape that it has to have, all zero. 0: of the dtype of the tensor that it
 * follows. */
int operands_make(struct operands *operands, enum tensor tensor, fa3_dtype dtype);

/* The scale of query, key or value, and where the forward call has how many rows share one. */
enum tensor operands_scale_of(enum tensor codes);
int64_t *operands_scale_rows(struct operands *operands, enum tensor scale);

/* Puts a tensor into the arguments of both passes. */
int operands_set_view(struct operands *operands, enum tensor tensor);

/* What the library says of a call on the CPU, which takes all that is valid. */
int operands_check(const struct operands *operands, const struct call *call);

/* What the gradients start from, for operands that have an output and an lse. */
int operands_read_gradients(const struct attention_options *options, struct operands *operands);

/* The gradients of the inputs that there are, all zero; then those that have files, from them. */
int operands_make_gradients(const struct attention_options *options, struct operands *operands);
int operands_load_gradients(const struct attention_options *options, struct operands *operands);

/* The device that takes what makes codes, and of the two passes the first `passes`. */
int operands_choose_device(struct operands *operands, int passes,
                           const struct device_options *chosen);

/* The extents of a tensor with their axes' names, as its file has them, and its dtype. */
void operands_describe(const struct operands *operands, enum tensor tensor, char *text,
                       size_t size);

void operands_free(struct operands *operands);

#endif
