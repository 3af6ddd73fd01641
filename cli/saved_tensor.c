#include "saved_tensor.h"

#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "npy.h"
#include "path.h"
#include "safetensors.h"

struct saved_tensor saved_tensor_of(const char *name, const struct loaded_tensor *tensor) {
  struct saved_tensor saved = {name, tensor->data, tensor->dtype, tensor->rank, {0}};
  memcpy(saved.shape, tensor->shape, sizeof saved.shape);
  return saved;
}

bool saved_tensor_knows(const char *path) {
  return path_has_suffix(path, ".npy") || path_has_suffix(path, ".safetensors");
}

static size_t data_size(const struct saved_tensor *tensor) {
  size_t size = fa3_dtype_size(tensor->dtype);
  for (int d = 0; d < tensor->rank; d++) size *= (size_t)tensor->shape[d];
  return size;
}

int saved_tensor_reserve(const struct output_file *file, const struct saved_tensor *tensors,
                         size_t count) {
  size_t size = 0;
  for (size_t i = 0; i < count; i++) size += data_size(&tensors[i]);
  return output_file_reserve(file, size);
}

static int write_safetensors_header(const struct output_file *file,
                                    const struct saved_tensor *tensors, size_t count) {
  struct safetensors_entry entries[SAVED_TENSORS];
  char *header;
  size_t size;
  if (count > sizeof entries / sizeof entries[0])
    return fail(EXIT_FAILED, "%s: too many tensors", file->path);
  for (size_t i = 0; i < count; i++)
    entries[i] = (struct safetensors_entry){tensors[i].name, tensors[i].dtype, tensors[i].rank,
                                            tensors[i].shape, data_size(&tensors[i])};
  TRY(safetensors_header(entries, count, &header, &size));
  int code = output_file_write(file, header, size);
  free(header);
  return code;
}

static int write_npy_header(const struct output_file *file, const struct saved_tensor *tensor) {
  char header[NPY_HEADER_SIZE];
  size_t size = npy_header(tensor->dtype, tensor->rank, tensor->shape, header);
  return output_file_write(file, header, size);
}

int saved_tensor_write(const struct output_file *file, const struct saved_tensor *tensors,
                       size_t count) {
  if (path_has_suffix(file->path, ".npy"))
    TRY(write_npy_header(file, &tensors[0]));
  else
    TRY(write_safetensors_header(file, tensors, count));
  for (size_t i = 0; i < count; i++)
    TRY(output_file_write(file, tensors[i].data, data_size(&tensors[i])));
  return 0;
}
