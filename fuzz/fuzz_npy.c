/* The .npy reader on any bytes; what it takes also survives being written and read again. */
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "npy.h"
#include "reader.h"
#include "target.h"

static void check_written(const struct stored_tensor *tensor) {
  char header[NPY_HEADER_SIZE];
  struct stored_tensor again;
  fa3_dtype dtype = tensor->untyped ? FA3_BFLOAT16 : tensor->dtype;
  size_t size = npy_header(dtype, tensor->rank, tensor->shape, header);
  struct input_file file = memory_file(header, size);
  file.size += tensor->size; /* only the header is read */
  if (size % 64 || npy_read(&file, &again)) abort();
  if (again.dtype != tensor->dtype || again.untyped != tensor->untyped ||
      again.rank != tensor->rank || again.size != tensor->size ||
      memcmp(again.shape, tensor->shape, sizeof again.shape) != 0)
    abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct input_file file = memory_file(data, size);
  struct stored_tensor tensor;
  int code = npy_read(&file, &tensor);
  if (code) {
    if (code != EXIT_INPUT || !*failure_text()) abort();
    return 0;
  }
  if (tensor.offset + tensor.size != size) abort();
  check_tensor(&file, &tensor);
  if (fa3_dtype_size(tensor.dtype) <= sizeof(float) && tensor.dtype != FA3_INT32)
    check_written(&tensor);
  return 0;
}
