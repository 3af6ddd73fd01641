#include "loaded_tensor.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "npy.h"
#include "path.h"
#include "safetensors.h"

enum { ALIGNMENT = 64 /* a cache line: vector loads do not straddle two */ };

static const char container_separator[] = ".safetensors:";
const char floating_point_elements[] =
    "float32, float16 or bfloat16, or F8_E4M3 in a .safetensors file";

/* What numpy makes unless it is told otherwise. */
static bool is_double(const struct stored_tensor *stored) {
  return strstr(stored->dtype_name, "float64") || strstr(stored->dtype_name, "f8") ||
         strcmp(stored->dtype_name, "F64") == 0;
}

int loaded_tensor_read_data(const struct input_file *file, const struct stored_tensor *stored,
                            const struct source_rules *rules, const char *elements,
                            struct loaded_tensor *tensor) {
  const char *origin = tensor->origin;
  if (stored->untyped && !rules->untyped_is_bfloat16)
    return fail(EXIT_INPUT,
                "%s: its 2-byte elements have no type (%s): if they are bfloat16, as ml_dtypes "
                "saves them, say --bf16",
                origin, stored->dtype_name);
  tensor->dtype = stored->untyped ? FA3_BFLOAT16 : stored->dtype;
  if (!tensor->dtype)
    return fail(EXIT_INPUT, "%s: its elements are %s: expected %s%s", origin, stored->dtype_name,
                elements, is_double(stored) ? " (in NumPy: .astype(\"float32\"))" : "");
  if (stored->rank > STORED_MAX_RANK)
    return fail(EXIT_INPUT, "%s: has more than %d dimensions", origin, STORED_MAX_RANK);
  tensor->given = true;
  tensor->rank = stored->rank;
  memcpy(tensor->shape, stored->shape, sizeof tensor->shape);
  if (stored->size == 0) return 0;
  if (stored->size <= SIZE_MAX - ALIGNMENT)
    tensor->data =
        aligned_alloc(ALIGNMENT, (size_t)(stored->size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  if (!tensor->data)
    return fail(EXIT_FAILED, "%s: no memory for its data: %" PRIu64 " bytes", origin, stored->size);
  return input_file_read(file, stored->offset, tensor->data, (size_t)stored->size);
}

static int read_npy(const char *path, const struct source_rules *rules, const char *elements,
                    struct loaded_tensor *tensor) {
  struct input_file file;
  struct stored_tensor stored;
  TRY(input_file_open(path, &file));
  (void)snprintf(tensor->origin, sizeof tensor->origin, "%s", path);
  int code = npy_read(&file, &stored);
  /* Other elements it refuses too, and says what is expected here. */
  if (!code || stored.other)
    code = loaded_tensor_read_data(&file, &stored, rules, elements, tensor);
  input_file_close(&file);
  return code;
}

/* Reads the first of the names that the file has, or with `suffix` the tensor whose name is that
 * one and the suffix, if there is one. */
static int read_named(const struct input_file *file, const struct source_rules *rules,
                      const char *const *names, const char *suffix, const char *elements,
                      struct loaded_tensor *tensor) {
  struct stored_tensor stored = {0};
  const char *name = NULL;
  char beside[512];
  const char *const beside_names[] = {beside, NULL};
  if (!suffix || *suffix) TRY(safetensors_find(file, names, false, &name, &stored));
  if (suffix && *suffix) {
    (void)snprintf(beside, sizeof beside, "%s%s", name, suffix);
    names = beside_names;
  }
  if (suffix) TRY(safetensors_find(file, names, true, &name, &stored));
  if (!name) return 0;
  (void)snprintf(tensor->origin, sizeof tensor->origin, "%.400s: tensor '%.90s'", file->path, name);
  return loaded_tensor_read_data(file, &stored, rules, elements, tensor);
}

static int read_safetensors(const char *path, const struct source_rules *rules,
                            const char *const *names, const char *suffix, const char *elements,
                            struct loaded_tensor *tensor) {
  struct input_file file;
  TRY(input_file_open(path, &file));
  const int code = read_named(&file, rules, names, suffix, elements, tensor);
  input_file_close(&file);
  return code;
}

int loaded_tensor_read(const char *source, const struct source_rules *rules,
                       const char *const *names, const char *suffix, const char *elements,
                       struct loaded_tensor *tensor) {
  char path[PATH_MAX];
  memset(tensor, 0, sizeof *tensor);
  if (!source) return read_safetensors(rules->container, rules, names, suffix, elements, tensor);
  if (path_has_suffix(source, ".npy"))
    return suffix && *suffix ? 0 : read_npy(source, rules, elements, tensor);
  if (path_has_suffix(source, ".safetensors"))
    return read_safetensors(source, rules, names, suffix, elements, tensor);

  const char *separator = strstr(source, container_separator);
  const char *named[] = {source + 1, NULL};
  if (separator) {
    size_t length = (size_t)(separator - source) + sizeof container_separator - 2;
    if (length >= sizeof path) return fail(EXIT_INPUT, "%s: the name is too long", source);
    memcpy(path, source, length);
    path[length] = '\0';
    named[0] = source + length + 1;
    return read_safetensors(path, rules, named, suffix, elements, tensor);
  }
  if (source[0] != ':')
    return fail(EXIT_INPUT, "%s: its name ends neither in .npy nor in .safetensors", source);
  if (!rules->container)
    return fail(EXIT_USAGE, "%s: names a tensor of the --in file, but there is no --in", source);
  return read_safetensors(rules->container, rules, named, suffix, elements, tensor);
}

int loaded_tensor_make(struct loaded_tensor *tensor, const char *what) {
  size_t count = (size_t)loaded_tensor_elements(tensor);
  tensor->given = true;
  tensor->data = calloc(count + 1, fa3_dtype_size(tensor->dtype));
  if (tensor->data) return 0;
  return fail(EXIT_FAILED, "no memory for the %s: %zu bytes", what,
              count * fa3_dtype_size(tensor->dtype));
}

int64_t loaded_tensor_elements(const struct loaded_tensor *tensor) {
  int64_t count = 1;
  for (int d = 0; d < tensor->rank; d++) count *= tensor->shape[d];
  return count;
}

fa3_tensor loaded_tensor_view(const struct loaded_tensor *tensor) {
  static _Alignas(8) char nothing[8]; /* where there are no elements; null would be no pointer */
  fa3_tensor view = {
      .data = tensor->data ? tensor->data : nothing, .dtype = tensor->dtype, .rank = tensor->rank};
  uint64_t stride = 1; /* it may overflow where there are no elements; the library refuses it */
  for (int d = tensor->rank - 1; d >= 0; d--) {
    view.shape[d] = tensor->shape[d];
    view.strides[d] = (int64_t)stride;
    stride *= (uint64_t)tensor->shape[d];
  }
  return view;
}

void loaded_tensor_free(struct loaded_tensor *tensor) {
  free(tensor->data);
  memset(tensor, 0, sizeof *tensor);
}
