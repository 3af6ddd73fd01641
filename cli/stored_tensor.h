/* A tensor as a file describes it. */
#ifndef FA3_CLI_STORED_TENSOR_H
#define FA3_CLI_STORED_TENSOR_H

#include <stdbool.h>
#include <stdint.h>

#include "fa3.h"

enum { STORED_MAX_RANK = 4 };

struct stored_tensor {
  char dtype_name[48]; /* as the file spells it */
  fa3_dtype dtype;     /* 0 if the library has none like it */
  bool other;          /* .npy elements that the library has none like: read no further */
  bool untyped;        /* 2-byte elements that .npy has no type for: bfloat16, if anyone says so */
  int rank;            /* may pass STORED_MAX_RANK; shape then holds the first ones */
  int64_t shape[STORED_MAX_RANK];
  uint64_t offset; /* of the data, in bytes from the file's start */
  uint64_t size;   /* of the data, in bytes; it is all there */
};

#endif
