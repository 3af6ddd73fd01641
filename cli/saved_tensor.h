/* Tensors written to a file in the format that its name says. */
#ifndef FA3_CLI_SAVED_TENSOR_H
#define FA3_CLI_SAVED_TENSOR_H

#include <stdbool.h>

#include "fa3.h"
#include "loaded_tensor.h"
#include "output_file.h"

enum { SAVED_TENSORS = 9 }; /* in one file, at most */

struct saved_tensor {
  const char *name; /* in a .safetensors file */
  const void *data; /* contiguous */
  fa3_dtype dtype;
  int rank;
  int64_t shape[4];
};

struct saved_tensor saved_tensor_of(const char *name, const struct loaded_tensor *tensor);

/* Whether a file's name says how to write it. */
bool saved_tensor_knows(const char *path);

/* Room for their data, before they are computed. */
int saved_tensor_reserve(const struct output_file *file, const struct saved_tensor *tensors,
                         size_t count);

/* A .npy file takes one tensor. */
int saved_tensor_write(const struct output_file *file, const struct saved_tensor *tensors,
                       size_t count);

#endif
