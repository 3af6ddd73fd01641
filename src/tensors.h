/* tensors.def as C data, for loops over the tensors of a call. The program and the tests compile
 * tensors.c too, so it knows fa3.h alone. */
#ifndef FA3_SRC_TENSORS_H
#define FA3_SRC_TENSORS_H

#include <stdbool.h>

#include "fa3.h"

enum tensor {
  TENSOR_nothing = -1,
#define TENSOR(name, ...) TENSOR_##name,
#define VECTOR(name, ...) TENSOR_##name,
#include "tensors.def"
  TENSORS
};

/* What an extent counts. */
enum axis {
  NO_AXIS,
  AXIS_BATCH,
  AXIS_BATCH_AND_ONE,
  AXIS_BATCH_K, /* of a dense key and value: the batch, unless they are a cache; or all pages */
  AXIS_ROWS_Q,
  AXIS_ROWS_K, /* or those of a page */
  AXIS_PAGES,  /* of a sequence */
  AXIS_POSITIONS,
  AXIS_PAIRS,    /* of elements that are turned together */
  AXIS_PARTIALS, /* the batch, as often as there are sets of keys */
  AXIS_HEADS_Q,
  AXIS_HEADS_K,
  AXIS_HEAD_DIM,
  AXIS_VALUE_HEAD_DIM,
  AXES
};

struct shape {
  enum tensor packed_by;
  int rank; /* if not packed; else one less */
  enum axis axes[4];
};

enum dtype_rule {
  RULE_FLOATS,
  RULE_WIDE,
  RULE_ONLY,
  RULE_SAME,
  RULE_CACHED,
  RULE_COMPUTED,
  RULE_SCALE
};

struct tensor_row {
  const char *name;
  enum dtype_rule rule;
  fa3_dtype dtype;   /* of RULE_ONLY */
  enum tensor model; /* of the rules that name another tensor */
  bool vector;
  const struct shape *shape;
  fa3_features feature;
};
extern const struct tensor_row tensor_rows[TENSORS];

/* A tensor in an argument struct. */
struct argument {
  size_t offset;
  enum tensor tensor;
  bool output;
  bool optional;
};

/* A call's argument struct. */
struct argument_struct {
  const char *name; /* of the pass */
  size_t size;
  size_t oldest; /* its first version's size */
  int count;
  const struct argument *arguments;
};

/* Null for a phase that has no call. */
const struct argument_struct *arguments_of(fa3_phase phase);

/* A tensor of the phase's struct; null if it has no such tensor. */
const struct argument *find_argument(fa3_phase phase, enum tensor tensor);

/* The tensor in an argument struct, which is const if the struct is. */
static inline fa3_tensor *argument_in(const void *args, const struct argument *argument) {
  return (fa3_tensor *)((uintptr_t)args + argument->offset);
}

#endif
