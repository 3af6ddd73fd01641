/* The library's calls as data: what they are named, their argument structs' fields, how they run.
 */
#ifndef FA3_PYTHON_PHASES_H
#define FA3_PYTHON_PHASES_H

#include <stddef.h>

#include "fa3.h"

/* The fields of the calls' arguments, which are keyword arguments of the same names here: tensors,
 * by tensors.def's words for what a call does with them, and numbers. */
enum kind { INPUT, OPTIONAL_INPUT, OUTPUT, OPTIONAL_OUTPUT, INT32, UINT32, INT64, FLOAT };

struct field {
  const char *name;
  enum kind kind;
  size_t offset;
};

/* Any phase's arguments. */
union arguments {
  struct {
    size_t struct_size;
    fa3_device device;
    void *stream;
  } common;
  fa3_forward_args forward;
  fa3_backward_args backward;
  fa3_append_args append;
  fa3_combine_args combine;
  fa3_quantize_args quantize;
};

static inline int is_tensor(const struct field *field) {
  return field->kind <= OPTIONAL_OUTPUT;
}

static inline int is_written(const struct field *field) {
  return field->kind == OUTPUT || field->kind == OPTIONAL_OUTPUT;
}

enum { MAX_FIELDS = 64 };

struct phase {
  const char *name;
  size_t struct_size;
  const struct field *fields;
  int num_fields;
  fa3_status (*workspace)(const union arguments *args, size_t *bytes);
  fa3_status (*run)(union arguments *args, void *workspace, size_t bytes);
};

enum { FORWARD_PHASE, BACKWARD_PHASE, APPEND_PHASE, COMBINE_PHASE, QUANTIZE_PHASE, NUM_PHASES };

extern const struct phase phases[NUM_PHASES];

/* Sets a field that is an integer. Returns 0, or -1 if it doesn't fit. */
int set_integer(union arguments *args, const struct field *field, int64_t number);

#endif
