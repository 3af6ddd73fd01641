/* NumPy's .npy files (numpy.lib.format, versions 1.0 to 3.0): one dense little-endian array. */
#ifndef FA3_CLI_NPY_H
#define FA3_CLI_NPY_H

#include <stddef.h>

#include "input_file.h"
#include "stored_tensor.h"

/* Reads and checks the header, strictly: what follows it is the array and nothing else. Where it
 * fails because the library has no such elements, `other` and `dtype_name` are set. */
int npy_read(const struct input_file *file, struct stored_tensor *tensor);

/* The header of an array, in `buffer`; returns its size. bfloat16 is written as ml_dtypes does it:
 * as 2-byte elements without a type, '<V2'. */
enum { NPY_HEADER_SIZE = 256 };
size_t npy_header(fa3_dtype dtype, int rank, const int64_t *shape, char buffer[NPY_HEADER_SIZE]);

#endif
