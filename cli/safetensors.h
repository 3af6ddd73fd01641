/* Files of named tensors in the safetensors format: 8 bytes of header length, a JSON header, data.
 */
#ifndef FA3_CLI_SAFETENSORS_H
#define FA3_CLI_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>

#include "input_file.h"
#include "stored_tensor.h"

/* Checks the whole header, strictly, as the format asks: the tensors fill the file without gaps or
 * overlaps. Then finds the first of `names` (ended by a null) that the file has; *name is it, or
 * null where `optional` and there is none. */
int safetensors_find(const struct input_file *file, const char *const *names, bool optional,
                     const char **name, struct stored_tensor *tensor);

/* The same check; then shows every tensor, in the order of their data. */
int safetensors_list(const struct input_file *file,
                     void (*show)(void *context, const char *name,
                                  const struct stored_tensor *tensor),
                     void *context);

/* One tensor to write. */
struct safetensors_entry {
  const char *name;
  fa3_dtype dtype;
  int rank;
  const int64_t *shape;
  uint64_t size;
};

/* The length and the header of a file of these tensors, in allocated memory; their data follows in
 * the same order. */
int safetensors_header(const struct safetensors_entry *entries, size_t count, char **header,
                       size_t *size);

#endif
