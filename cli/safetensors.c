#include "safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yyjson.h>

#include "failure.h"

enum { LENGTH_SIZE = 8, MAX_HEADER = 100000000 /* the format's own limit */ };

static const struct {
  const char *name;
  unsigned bits;
  fa3_dtype dtype; /* 0: none of the library's */
} dtypes[] = {
    {"F32", 32, FA3_FLOAT32},
    {"F16", 16, FA3_FLOAT16},
    {"BF16", 16, FA3_BFLOAT16},
    {"I32", 32, FA3_INT32},
    {"I64", 64, FA3_INT64},
    {"F64", 64, 0},
    {"U64", 64, 0},
    {"C64", 64, 0},
    {"U32", 32, 0},
    {"I16", 16, 0},
    {"U16", 16, 0},
    {"BOOL", 8, 0},
    {"I8", 8, 0},
    {"U8", 8, 0},
    {"F8_E4M3", 8, FA3_FLOAT8_E4M3},
    {"F8_E5M2", 8, 0},
    {"F8_E4M3FNUZ", 8, 0},
    {"F8_E5M2FNUZ", 8, 0},
    {"F8_E8M0", 8, 0},
    {"F6_E2M3", 6, 0},
    {"F6_E3M2", 6, 0},
    {"F4", 4, 0},
};
enum { DTYPE_COUNT = sizeof dtypes / sizeof dtypes[0] };

struct entry {
  const char *name;
  struct stored_tensor tensor; /* its offset counts from the end of the header */
};

struct table {
  const char *path;
  struct entry *entries;
  size_t count;
};

static int malformed(const char *path, const char *name, const char *what) {
  return fail(EXIT_INPUT, "%s: tensor '%s': %s", path, name, what);
}

static int read_dtype(const char *path, const char *name, yyjson_val *value,
                      struct stored_tensor *tensor, unsigned *bits) {
  for (size_t i = 0; i < DTYPE_COUNT; i++) {
    if (!yyjson_equals_str(value, dtypes[i].name)) continue;
    (void)snprintf(tensor->dtype_name, sizeof tensor->dtype_name, "%s", dtypes[i].name);
    tensor->dtype = dtypes[i].dtype;
    *bits = dtypes[i].bits;
    return 0;
  }
  if (!yyjson_is_str(value)) return malformed(path, name, "its dtype is not a string");
  return fail(EXIT_INPUT, "%s: tensor '%s': unknown dtype '%s'", path, name, yyjson_get_str(value));
}

/* Also the size that dtype and shape ask for, in `size`. */
static int read_shape(const char *path, const char *name, yyjson_val *value, unsigned bits,
                      struct stored_tensor *tensor, uint64_t *size) {
  yyjson_arr_iter extents;
  yyjson_val *extent;
  if (!yyjson_arr_iter_init(value, &extents))
    return yyjson_is_arr(value) ? 0 : malformed(path, name, "its shape is not an array");
  while ((extent = yyjson_arr_iter_next(&extents))) {
    if (!yyjson_is_uint(extent) || yyjson_get_uint(extent) > INT64_MAX)
      return malformed(path, name, "an extent of its shape is not a number from 0 to 2^63-1");
    if (tensor->rank < STORED_MAX_RANK)
      tensor->shape[tensor->rank] = (int64_t)yyjson_get_uint(extent);
    if (tensor->rank < INT16_MAX) tensor->rank++;
    if (__builtin_mul_overflow(*size, yyjson_get_uint(extent), size))
      return malformed(path, name, "the size of its shape overflows");
  }
  if (__builtin_mul_overflow(*size, bits, size))
    return malformed(path, name, "the size of its shape overflows");
  if (*size % 8) return malformed(path, name, "its size is no whole number of bytes");
  *size /= 8;
  return 0;
}

static int read_offsets(const char *path, const char *name, yyjson_val *value, uint64_t size,
                        struct stored_tensor *tensor) {
  yyjson_val *begin = yyjson_arr_get(value, 0);
  yyjson_val *end = yyjson_arr_get(value, 1);
  if (yyjson_arr_size(value) != 2 || !yyjson_is_uint(begin) || !yyjson_is_uint(end))
    return malformed(path, name, "its data_offsets are not two numbers");
  tensor->offset = yyjson_get_uint(begin);
  if (yyjson_get_uint(end) < tensor->offset)
    return malformed(path, name, "its data_offsets end before they begin");
  tensor->size = yyjson_get_uint(end) - tensor->offset;
  if (tensor->size == size) return 0;
  return fail(EXIT_INPUT,
              "%s: tensor '%s': its data_offsets hold %" PRIu64 " bytes, its shape needs %" PRIu64,
              path, name, tensor->size, size);
}

static int read_tensor(const char *path, const char *name, yyjson_val *value,
                       struct stored_tensor *tensor) {
  unsigned bits = 0;
  uint64_t size = 1;
  if (!yyjson_is_obj(value)) return malformed(path, name, "is not an object");
  yyjson_val *dtype = yyjson_obj_get(value, "dtype");
  yyjson_val *shape = yyjson_obj_get(value, "shape");
  yyjson_val *offsets = yyjson_obj_get(value, "data_offsets");
  /* Three different names among three: none is there twice. */
  if (!dtype || !shape || !offsets || yyjson_obj_size(value) != 3)
    return malformed(path, name, "expected dtype, shape and data_offsets, each once");
  TRY(read_dtype(path, name, dtype, tensor, &bits));
  TRY(read_shape(path, name, shape, bits, tensor, &size));
  return read_offsets(path, name, offsets, size, tensor);
}

static int check_metadata(const char *path, yyjson_val *metadata) {
  yyjson_obj_iter fields;
  yyjson_val *name;
  if (!yyjson_is_obj(metadata)) return fail(EXIT_INPUT, "%s: __metadata__ is not an object", path);
  (void)yyjson_obj_iter_init(metadata, &fields);
  while ((name = yyjson_obj_iter_next(&fields))) {
    if (!yyjson_is_str(yyjson_obj_iter_get_val(name)))
      return fail(EXIT_INPUT, "%s: __metadata__ holds something else than strings", path);
  }
  return 0;
}

static int read_entries(yyjson_val *root, struct table *table) {
  yyjson_obj_iter fields;
  yyjson_val *key;
  bool metadata = false;
  (void)yyjson_obj_iter_init(root, &fields);
  while ((key = yyjson_obj_iter_next(&fields))) {
    const char *name = yyjson_get_str(key);
    yyjson_val *value = yyjson_obj_iter_get_val(key);
    if (strlen(name) != yyjson_get_len(key))
      return fail(EXIT_INPUT, "%s: a tensor's name holds a zero byte", table->path);
    if (strcmp(name, "__metadata__") == 0) {
      if (metadata) return fail(EXIT_INPUT, "%s: __metadata__ is there twice", table->path);
      metadata = true;
      TRY(check_metadata(table->path, value));
      continue;
    }
    struct entry *entry = &table->entries[table->count++];
    entry->name = name;
    TRY(read_tensor(table->path, name, value, &entry->tensor));
  }
  return 0;
}

static int by_name(const void *left, const void *right) {
  return strcmp(((const struct entry *)left)->name, ((const struct entry *)right)->name);
}

/* Empty tensors come before the one that begins where they are. */
static int by_offset(const void *left, const void *right) {
  const struct stored_tensor *a = &((const struct entry *)left)->tensor;
  const struct stored_tensor *b = &((const struct entry *)right)->tensor;
  if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
  return (a->size > b->size) - (a->size < b->size);
}

static int check_names(const struct table *table) {
  qsort(table->entries, table->count, sizeof table->entries[0], by_name);
  for (size_t i = 1; i < table->count; i++) {
    if (strcmp(table->entries[i - 1].name, table->entries[i].name) == 0)
      return malformed(table->path, table->entries[i].name, "is there twice");
  }
  return 0;
}

static int check_layout(const struct table *table, uint64_t data_size) {
  uint64_t end = 0;
  qsort(table->entries, table->count, sizeof table->entries[0], by_offset);
  for (size_t i = 0; i < table->count; i++) {
    const struct entry *entry = &table->entries[i];
    if (entry->tensor.offset < end)
      return malformed(table->path, entry->name, "its data overlaps another tensor's");
    if (entry->tensor.offset > end)
      return malformed(table->path, entry->name, "there is a gap before its data");
    end += entry->tensor.size;
    if (end > data_size)
      return fail(EXIT_INPUT,
                  "%s: cut short: tensor '%s' ends at byte %" PRIu64
                  " of the data, it has %" PRIu64,
                  table->path, entry->name, end, data_size);
  }
  if (end < data_size)
    return fail(EXIT_INPUT, "%s: holds %" PRIu64 " bytes of data, its tensors need only %" PRIu64,
                table->path, data_size, end);
  return 0;
}

/* How many characters have to be put in, left out or replaced (Levenshtein), of names' beginnings.
 */
static size_t distance(const char *a, const char *b) {
  enum { LONGEST = 63 };
  const size_t a_length = strnlen(a, LONGEST), b_length = strnlen(b, LONGEST);
  size_t row[LONGEST + 1];
  for (size_t j = 0; j <= b_length; j++) row[j] = j;
  for (size_t i = 1; i <= a_length; i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b_length; j++) {
      const size_t other = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
      if (other < row[j]) row[j] = other;
    }
  }
  return row[b_length];
}

/* Whether the name is the beginning of the other or, as in layer0.query, its last part. */
static bool is_part(const char *name, const char *other) {
  const size_t length = strlen(name), end = strlen(other);
  if (strncmp(name, other, length) == 0) return true;
  return end > length && other[end - length - 1] == '.' && strcmp(other + end - length, name) == 0;
}

/* What name in the file could have been meant, if there is one. */
static const char *nearest(const struct table *table, const char *name) {
  const char *best = NULL;
  size_t least = strlen(name) / 2 + 1;
  for (size_t i = 0; i < table->count; i++) {
    const char *other = table->entries[i].name;
    const size_t far = is_part(name, other) ? 0 : distance(name, other);
    if (far > least || (best && far == least)) continue;
    least = far;
    best = other;
  }
  return best;
}

/* What safetensors_find looks for, and finds. */
struct search {
  const char *const *names;
  bool optional;
  const char *found;
  struct stored_tensor *tensor;
};

static int find(const struct table *table, void *context) {
  struct search *search = context;
  const char *const *names = search->names;
  for (size_t n = 0; names[n]; n++) {
    for (size_t i = 0; i < table->count; i++) {
      if (strcmp(names[n], table->entries[i].name) != 0) continue;
      search->found = names[n];
      *search->tensor = table->entries[i].tensor;
      return 0;
    }
  }
  if (search->optional) return 0;
  const char *near = nearest(table, names[0]);
  return fail(EXIT_INPUT, "%s: has no tensor '%s'%s%s%s%s%s%s", table->path, names[0],
              names[1] ? " or '" : "", names[1] ? names[1] : "", names[1] ? "'" : "",
              near ? ": there is '" : "", near ? near : "", near ? "'" : "");
}

struct listing {
  void (*show)(void *context, const char *name, const struct stored_tensor *tensor);
  void *context;
};

static int list(const struct table *table, void *context) {
  const struct listing *listing = context;
  for (size_t i = 0; i < table->count; i++)
    listing->show(listing->context, table->entries[i].name, &table->entries[i].tensor);
  return 0;
}

static int read_table(const struct input_file *file, yyjson_val *root, uint64_t data_offset,
                      int (*act)(const struct table *, void *), void *context) {
  struct table table = {.path = file->path};
  if (!yyjson_is_obj(root))
    return fail(EXIT_INPUT, "%s: its header is not a JSON object", file->path);
  const size_t size = (yyjson_obj_size(root) + 1) * sizeof table.entries[0];
  table.entries = calloc(1, size);
  if (!table.entries)
    return fail(EXIT_FAILED, "%s: no memory for its header: %zu bytes", file->path, size);
  int code = read_entries(root, &table);
  if (!code) code = check_names(&table);
  if (!code) code = check_layout(&table, file->size - data_offset);
  for (size_t i = 0; i < table.count; i++) table.entries[i].tensor.offset += data_offset;
  if (!code) code = act(&table, context);
  free(table.entries);
  return code;
}

static int read_length(const struct input_file *file, uint64_t *length) {
  unsigned char bytes[LENGTH_SIZE];
  if (file->size < LENGTH_SIZE)
    return fail(EXIT_INPUT, "%s: not a .safetensors file: %" PRIu64 " bytes are too few",
                file->path, file->size);
  TRY(input_file_read(file, 0, bytes, sizeof bytes));
  *length = 0;
  for (int i = LENGTH_SIZE - 1; i >= 0; i--) *length = *length << 8 | bytes[i];
  if (*length > file->size - LENGTH_SIZE)
    return fail(EXIT_INPUT,
                "%s: cut short, or not a .safetensors file: its header would be %" PRIu64
                " bytes of the file's %" PRIu64,
                file->path, *length, file->size);
  if (*length > MAX_HEADER)
    return fail(EXIT_INPUT, "%s: its header is %" PRIu64 " bytes: expected at most %d", file->path,
                *length, MAX_HEADER);
  return 0;
}

/* Checks the whole header, then acts on the table of its tensors, in their order in the file. */
static int with_table(const struct input_file *file, int (*act)(const struct table *, void *),
                      void *context) {
  uint64_t length = 0;
  yyjson_read_err error;
  TRY(read_length(file, &length));
  char *header = malloc((size_t)length + 1);
  if (!header)
    return fail(EXIT_FAILED, "%s: no memory for its header: %" PRIu64 " bytes", file->path, length);
  int code = input_file_read(file, LENGTH_SIZE, header, (size_t)length);
  if (!code && (length == 0 || header[0] != '{'))
    code = fail(EXIT_INPUT, "%s: not a .safetensors file: its header does not begin with '{'",
                file->path);
  if (!code) {
    yyjson_doc *document = yyjson_read_opts(header, (size_t)length, 0, NULL, &error);
    if (document)
      code = read_table(file, yyjson_doc_get_root(document), LENGTH_SIZE + length, act, context);
    else
      code = fail(EXIT_INPUT, "%s: its header is not JSON: %s at byte %zu", file->path, error.msg,
                  error.pos);
    yyjson_doc_free(document);
  }
  free(header);
  return code;
}

int safetensors_find(const struct input_file *file, const char *const *names, bool optional,
                     const char **name, struct stored_tensor *tensor) {
  struct search search = {.names = names, .optional = optional, .tensor = tensor};
  TRY(with_table(file, find, &search));
  *name = search.found;
  return 0;
}

int safetensors_list(const struct input_file *file,
                     void (*show)(void *, const char *, const struct stored_tensor *),
                     void *context) {
  struct listing listing = {show, context};
  return with_table(file, list, &listing);
}

static const char *name_of(fa3_dtype dtype) {
  for (int i = 0; i < DTYPE_COUNT; i++)
    if (dtypes[i].dtype == dtype) return dtypes[i].name;
  return "";
}

int safetensors_header(const struct safetensors_entry *entries, size_t count, char **header,
                       size_t *size) {
  yyjson_mut_doc *document = yyjson_mut_doc_new(NULL);
  yyjson_mut_val *root = yyjson_mut_obj(document);
  uint64_t offset = 0;
  size_t length;
  yyjson_mut_doc_set_root(document, root);
  for (size_t i = 0; i < count; i++) {
    const uint64_t offsets[] = {offset, offset + entries[i].size};
    yyjson_mut_val *tensor = yyjson_mut_obj_add_obj(document, root, entries[i].name);
    yyjson_mut_obj_add_str(document, tensor, "dtype", name_of(entries[i].dtype));
    yyjson_mut_obj_add_val(
        document, tensor, "shape",
        yyjson_mut_arr_with_sint64(document, entries[i].shape, (size_t)entries[i].rank));
    yyjson_mut_obj_add_val(document, tensor, "data_offsets",
                           yyjson_mut_arr_with_uint64(document, offsets, 2));
    offset = offsets[1];
  }
  char *json = yyjson_mut_write(document, 0, &length);
  yyjson_mut_doc_free(document);

  /* Spaces bring the data to a multiple of 8 bytes. */
  size_t padded = (length + 7) / 8 * 8;
  *size = LENGTH_SIZE + padded;
  *header = json ? malloc(*size) : NULL;
  if (*header) {
    for (int i = 0; i < LENGTH_SIZE; i++) (*header)[i] = (char)(padded >> (8 * i) & 0xff);
    memcpy(*header + LENGTH_SIZE, json, length);
    memset(*header + LENGTH_SIZE + length, ' ', padded - length);
  }
  free(json);
  return *header ? 0 : fail(EXIT_FAILED, "no memory for the header of a .safetensors file");
}
