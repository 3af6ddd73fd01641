#include "reader.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "failure.h"
#include "loaded_tensor.h"

struct input_file memory_file(const void *data, size_t size) {
  static int descriptor = -1;
  if (descriptor < 0) descriptor = memfd_create("fuzz", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, 0) ||
      pwrite(descriptor, data, size, 0) != (ssize_t)size)
    abort();
  return (struct input_file){"input", descriptor, size};
}

void check_tensor(const struct input_file *file, const struct stored_tensor *tensor) {
  const struct source_rules rules = {.untyped_is_bfloat16 = true};
  struct loaded_tensor loaded = {.origin = "input"};
  if (tensor->offset > file->size || tensor->size > file->size - tensor->offset) abort();
  int code = loaded_tensor_read_data(file, tensor, &rules, floating_point_elements, &loaded);
  if (!code) {
    uint64_t size = (uint64_t)loaded_tensor_elements(&loaded) * fa3_dtype_size(loaded.dtype);
    if (size != tensor->size || !loaded.data != !size) abort();
  } else if (code != EXIT_INPUT || !*failure_text()) {
    abort();
  }
  loaded_tensor_free(&loaded);
}
