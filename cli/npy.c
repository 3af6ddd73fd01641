#include "npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "failure.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the files' byte order is the host's");

enum { PREAMBLE = 10, MAX_HEADER = 65535 };
static const char magic[] = "\x93NUMPY";

static const struct {
  const char *descr;
  fa3_dtype dtype;
  bool untyped;
} dtypes[] = {
    {"<f4", FA3_FLOAT32, false}, {"<f2", FA3_FLOAT16, false}, {"<V2", 0, true}, {"|V2", 0, true},
    {"<i4", FA3_INT32, false},   {"<i8", FA3_INT64, false}};

/* NumPy's names of what else is common. */
static const struct {
  const char *descr;
  const char *name;
} others[] = {{"<f8", "float64"}, {"|b1", "bool"},      {"|i1", "int8"},       {"|u1", "uint8"},
              {"<i2", "int16"},   {"<u2", "uint16"},    {"<u4", "uint32"},     {"<u8", "uint64"},
              {"|O", "object"},   {"<c8", "complex64"}, {"<c16", "complex128"}};

/* The header is a Python dict literal; this walks it. */
struct cursor {
  const char *path;
  const char *at;
  const char *end;
};

static int malformed(const struct cursor *cursor, const char *expected) {
  return fail(EXIT_INPUT, "%s: malformed .npy header: expected %s", cursor->path, expected);
}

static void skip_spaces(struct cursor *cursor) {
  while (cursor->at < cursor->end && (*cursor->at == ' ' || *cursor->at == '\n')) cursor->at++;
}

static bool take(struct cursor *cursor, char c) {
  skip_spaces(cursor);
  if (cursor->at == cursor->end || *cursor->at != c) return false;
  cursor->at++;
  return true;
}

static bool take_word(struct cursor *cursor, const char *word) {
  size_t length = strlen(word);
  skip_spaces(cursor);
  if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, word, length) != 0)
    return false;
  cursor->at += length;
  return true;
}

static int read_string(struct cursor *cursor, const char *what, char *text, size_t size) {
  char quote = '\'';
  size_t length = 0;
  if (!take(cursor, quote)) {
    quote = '"';
    if (!take(cursor, quote)) return malformed(cursor, what);
  }
  while (cursor->at < cursor->end && *cursor->at != quote) {
    if (length + 1 == size || *cursor->at == '\\' || *cursor->at == '\0')
      return malformed(cursor, what);
    text[length++] = *cursor->at++;
  }
  text[length] = '\0';
  return take(cursor, quote) ? 0 : malformed(cursor, what);
}

static int read_extent(struct cursor *cursor, int64_t *extent) {
  skip_spaces(cursor);
  const char *first = cursor->at;
  *extent = 0;
  while (cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9') {
    if (__builtin_mul_overflow(*extent, 10, extent) ||
        __builtin_add_overflow(*extent, *cursor->at - '0', extent))
      return fail(EXIT_INPUT, "%s: an extent of its shape overflows", cursor->path);
    cursor->at++;
  }
  return cursor->at > first ? 0 : malformed(cursor, "an extent of the shape");
}

static int read_shape(struct cursor *cursor, struct stored_tensor *tensor) {
  if (!take(cursor, '(')) return malformed(cursor, "a tuple as the shape");
  tensor->rank = 0;
  while (!take(cursor, ')')) {
    int64_t extent;
    TRY(read_extent(cursor, &extent));
    if (tensor->rank == STORED_MAX_RANK)
      return fail(EXIT_INPUT, "%s: has more than %d dimensions", cursor->path, STORED_MAX_RANK);
    tensor->shape[tensor->rank++] = extent;
    if (take(cursor, ',')) continue;
    /* (5) is a number in Python, not a tuple. */
    if (tensor->rank == 1 || !take(cursor, ')')) return malformed(cursor, "',' in the shape");
    break;
  }
  return 0;
}

static int read_descr(struct cursor *cursor, struct stored_tensor *tensor) {
  char descr[24];
  TRY(read_string(cursor, "a simple type as 'descr'", descr, sizeof descr));
  (void)snprintf(tensor->dtype_name, sizeof tensor->dtype_name, "'%s'", descr);
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
    if (strcmp(descr, dtypes[i].descr) != 0) continue;
    tensor->dtype = dtypes[i].dtype;
    tensor->untyped = dtypes[i].untyped;
    return 0;
  }
  if (descr[0] == '>')
    return fail(EXIT_INPUT, "%s: its elements are big-endian (%s): expected little-endian",
                cursor->path, tensor->dtype_name);
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
    if (strcmp(descr, others[i].descr) == 0)
      (void)snprintf(tensor->dtype_name, sizeof tensor->dtype_name, "%s ('%s')", others[i].name,
                     descr);
  tensor->other = true;
  return fail(EXIT_INPUT, "%s: its elements are %s", cursor->path, tensor->dtype_name);
}

static int read_order(struct cursor *cursor) {
  if (take_word(cursor, "False")) return 0;
  if (!take_word(cursor, "True")) return malformed(cursor, "True or False as 'fortran_order'");
  return fail(EXIT_INPUT, "%s: is in Fortran order: expected C order (numpy.ascontiguousarray)",
              cursor->path);
}

static int read_dictionary(struct cursor *cursor, struct stored_tensor *tensor) {
  enum { DESCR = 1, ORDER = 2, SHAPE = 4, ALL = 7 };
  int seen = 0;
  if (!take(cursor, '{')) return malformed(cursor, "'{'");
  while (!take(cursor, '}')) {
    char name[16];
    int field;
    TRY(read_string(cursor, "a field's name", name, sizeof name));
    if (!take(cursor, ':')) return malformed(cursor, "':'");
    if (strcmp(name, "descr") == 0) {
      field = DESCR;
      TRY(read_descr(cursor, tensor));
    } else if (strcmp(name, "fortran_order") == 0) {
      field = ORDER;
      TRY(read_order(cursor));
    } else if (strcmp(name, "shape") == 0) {
      field = SHAPE;
      TRY(read_shape(cursor, tensor));
    } else {
      return malformed(cursor, "no field but 'descr', 'fortran_order' and 'shape'");
    }
    if (seen & field) return malformed(cursor, "each field once");
    seen |= field;
    if (take(cursor, ',')) continue;
    if (!take(cursor, '}')) return malformed(cursor, "',' or '}'");
    break;
  }
  if (seen != ALL) return malformed(cursor, "'descr', 'fortran_order' and 'shape'");
  skip_spaces(cursor);
  return cursor->at == cursor->end ? 0 : malformed(cursor, "nothing after '}'");
}

static int check_size(const struct input_file *file, struct stored_tensor *tensor) {
  uint64_t available = file->size - tensor->offset;
  uint64_t size = tensor->untyped ? 2 : fa3_dtype_size(tensor->dtype);
  for (int d = 0; d < tensor->rank; d++) {
    if (__builtin_mul_overflow(size, (uint64_t)tensor->shape[d], &size))
      return fail(EXIT_INPUT, "%s: the size of its shape overflows", file->path);
  }
  if (size > available)
    return fail(EXIT_INPUT,
                "%s: cut short: its shape needs %" PRIu64 " bytes of data, it has %" PRIu64,
                file->path, size, available);
  if (size < available)
    return fail(EXIT_INPUT, "%s: holds %" PRIu64 " bytes of data, its shape needs only %" PRIu64,
                file->path, available, size);
  tensor->size = size;
  return 0;
}

int npy_read(const struct input_file *file, struct stored_tensor *tensor) {
  unsigned char preamble[PREAMBLE + 2];
  char header[MAX_HEADER];
  size_t start = PREAMBLE;
  size_t known = file->size < sizeof preamble ? (size_t)file->size : sizeof preamble;
  memset(tensor, 0, sizeof *tensor);
  TRY(input_file_read(file, 0, preamble, known));
  if (known < sizeof magic - 1 || memcmp(preamble, magic, sizeof magic - 1) != 0)
    return fail(EXIT_INPUT, "%s: not a .npy file", file->path);
  if (known < sizeof preamble) return fail(EXIT_INPUT, "%s: cut short in its header", file->path);

  int version = preamble[6];
  if (version < 1 || version > 3 || preamble[7] != 0)
    return fail(EXIT_INPUT, "%s: its .npy version is %d.%d: expected 1.0, 2.0 or 3.0", file->path,
                version, preamble[7]);
  uint64_t length = preamble[8] | (uint64_t)preamble[9] << 8;
  if (version > 1) {
    start += 2;
    length |= (uint64_t)preamble[10] << 16 | (uint64_t)preamble[11] << 24;
  }
  if (length > file->size - start)
    return fail(EXIT_INPUT, "%s: cut short in its header", file->path);
  if (length > MAX_HEADER)
    return fail(EXIT_INPUT, "%s: its header is %" PRIu64 " bytes: expected at most %d", file->path,
                length, MAX_HEADER);
  TRY(input_file_read(file, start, header, (size_t)length));

  struct cursor cursor = {file->path, header, header + length};
  TRY(read_dictionary(&cursor, tensor));
  tensor->offset = start + length;
  return check_size(file, tensor);
}

size_t npy_header(fa3_dtype dtype, int rank, const int64_t *shape, char buffer[NPY_HEADER_SIZE]) {
  const char *descr = dtype == FA3_FLOAT32 ? "<f4" : dtype == FA3_FLOAT16 ? "<f2" : "<V2";
  char *header = buffer + PREAMBLE;
  size_t size = NPY_HEADER_SIZE - PREAMBLE;
  int length = snprintf(header, size, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
  for (int d = 0; d < rank; d++)
    length += snprintf(header + length, size - (size_t)length, "%" PRId64 "%s", shape[d],
                       d + 1 < rank ? ", "
                       : rank == 1  ? ","
                                    : "");
  length += snprintf(header + length, size - (size_t)length, "), }");
  /* The data starts at a multiple of 64 bytes, after a line break. */
  while ((PREAMBLE + length + 1) % 64) header[length++] = ' ';
  header[length++] = '\n';
  memcpy(buffer, magic, sizeof magic - 1);
  buffer[6] = 1;
  buffer[7] = 0;
  buffer[8] = (char)(length & 0xff);
  buffer[9] = (char)(length >> 8);
  return PREAMBLE + (size_t)length;
}
