#include "outputs.h"

#include <string.h>

#include "failure.h"
#include "path.h"
#include "saved_tensor.h"

/* The file of an earlier tensor that goes to the same place, or -1. */
static int find_shared(const struct outputs *outputs, const struct output_file *file) {
  for (int i = 0; i < outputs->file_count; i++)
    if (strcmp(outputs->files[i].target, file->target) == 0) return i;
  return -1;
}

static int begin(struct outputs *outputs, int index) {
  const struct output *output = &outputs->list[index];
  struct output_file *file = &outputs->files[outputs->file_count];
  TRY(output_file_begin(output->path, file));
  int shared = find_shared(outputs, file);
  outputs->file_of[index] = shared < 0 ? outputs->file_count : shared;
  if (shared < 0) {
    outputs->file_count++;
    return 0;
  }
  output_file_discard(file);
  if (!path_has_suffix(output->path, ".npy")) return 0;
  int other = 0;
  while (outputs->file_of[other] != shared) other++;
  return fail(EXIT_USAGE, "%s: %s and %s are the same file: expected a .safetensors for both",
              output->path, outputs->list[other].option, output->option);
}

int outputs_begin(const struct output *list, int count, struct outputs *outputs) {
  memcpy(outputs->list, list, (size_t)count * sizeof *list);
  outputs->count = count;
  outputs->file_count = 0;
  for (int i = 0; i < count; i++) TRY(begin(outputs, i));
  size_t sizes[OUTPUT_FILES] = {0};
  for (int i = 0; i < count; i++)
    sizes[outputs->file_of[i]] +=
        (size_t)loaded_tensor_elements(list[i].tensor) * fa3_dtype_size(list[i].tensor->dtype);
  for (int i = 0; i < outputs->file_count; i++)
    TRY(output_file_reserve(&outputs->files[i], sizes[i]));
  return 0;
}

static int write_file(const struct outputs *outputs, int index) {
  struct saved_tensor tensors[OUTPUT_FILES];
  size_t count = 0;
  for (int i = 0; i < outputs->count; i++) {
    const struct output *output = &outputs->list[i];
    if (outputs->file_of[i] != index) continue;
    tensors[count] = (struct saved_tensor){.name = output->name,
                                           .data = output->tensor->data,
                                           .dtype = output->tensor->dtype,
                                           .rank = output->tensor->rank};
    memcpy(tensors[count].shape, output->tensor->shape, sizeof tensors[count].shape);
    count++;
  }
  return saved_tensor_write(&outputs->files[index], tensors, count);
}

int outputs_write(struct outputs *outputs) {
  for (int i = 0; i < outputs->file_count; i++) TRY(write_file(outputs, i));
  for (int i = 0; i < outputs->file_count; i++) TRY(output_file_commit(&outputs->files[i]));
  return 0;
}

void outputs_discard(struct outputs *outputs) {
  for (int i = 0; i < outputs->file_count; i++) output_file_discard(&outputs->files[i]);
}
