/* The .safetensors reader on any bytes; what it takes also survives being written and read again.
 */
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "reader.h"
#include "safetensors.h"
#include "target.h"

static const char *const names[] = {"query", "q", NULL};

static void check_written(const struct stored_tensor *tensor) {
  const struct safetensors_entry entry = {names[0], tensor->dtype, tensor->rank, tensor->shape,
                                          tensor->size};
  struct stored_tensor again;
  const char *name;
  char *header;
  size_t size;
  if (safetensors_header(&entry, 1, &header, &size)) abort();
  struct input_file file = memory_file(header, size);
  file.size += tensor->size; /* only the header is read */
  if (size % 8 || safetensors_find(&file, names, false, &name, &again)) abort();
  if (name != names[0] || again.dtype != tensor->dtype || again.rank != tensor->rank ||
      again.size != tensor->size || again.offset != size ||
      memcmp(again.shape, tensor->shape, sizeof again.shape) != 0)
    abort();
  free(header);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct input_file file = memory_file(data, size);
  struct stored_tensor tensor;
  const char *name;
  int code = safetensors_find(&file, names, false, &name, &tensor);
  if (code) {
    if (code != EXIT_INPUT || !*failure_text()) abort();
    return 0;
  }
  check_tensor(&file, &tensor);
  if (tensor.dtype && tensor.rank <= STORED_MAX_RANK) check_written(&tensor);
  return 0;
}
