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

/* What goes into a file. */
static size_t tensors_of(const struct outputs *outputs, int file,
                         struct saved_tensor tensors[OUTPUT_FILES]) {
  size_t count = 0;
  for (int i = 0; i < outputs->count; i++)
    if (outputs->file_of[i] == file)
      tensors[count++] = saved_tensor_of(outputs->list[i].name, outputs->list[i].tensor);
  return count;
}

int outputs_begin(const struct output *list, int count, struct outputs *outputs) {
  memcpy(outputs->list, list, (size_t)count * sizeof *list);
  outputs->count = count;
  outputs->file_count = 0;
  for (int i = 0; i < count; i++) TRY(begin(outputs, i));
  for (int i = 0; i < outputs->file_count; i++) {
    struct saved_tensor tensors[OUTPUT_FILES];
    TRY(saved_tensor_reserve(&outputs->files[i], tensors, tensors_of(outputs, i, tensors)));
  }
  return 0;
}

int outputs_write(struct outputs *outputs) {
  for (int i = 0; i < outputs->file_count; i++) {
    struct saved_tensor tensors[OUTPUT_FILES];
    TRY(saved_tensor_write(&outputs->files[i], tensors, tensors_of(outputs, i, tensors)));
  }
  for (int i = 0; i < outputs->file_count; i++) TRY(output_file_commit(&outputs->files[i]));
  return 0;
}

void outputs_discard(struct outputs *outputs) {
  for (int i = 0; i < outputs->file_count; i++) output_file_discard(&outputs->files[i]);
}
