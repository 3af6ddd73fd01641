#include "tensors.h"

enum {
#define SHAPE(name, ...) SHAPE_##name,
#include "tensors.def"
  SHAPES
};

static const struct shape shapes[SHAPES] = {
#define RANK(...) ((int)(sizeof((enum axis[]){__VA_ARGS__}) / sizeof(enum axis)))
#define SHAPE(name, packed_by, ...) \
  [SHAPE_##name] = {TENSOR_##packed_by, RANK(__VA_ARGS__), {__VA_ARGS__}},
#include "tensors.def"
};

#define FLOATS .rule = RULE_FLOATS
#define WIDE .rule = RULE_WIDE
#define ONLY(only) .rule = RULE_ONLY, .dtype = only
#define SAME(as) .rule = RULE_SAME, .model = TENSOR_##as
#define CACHED(of) .rule = RULE_CACHED, .model = TENSOR_##of
#define COMPUTED(from) .rule = RULE_COMPUTED, .model = TENSOR_##from
#define SCALE(of) .rule = RULE_SCALE, .dtype = FA3_FLOAT32, .model = TENSOR_##of
#define DTYPE_int32_t FA3_INT32
#define DTYPE_int64_t FA3_INT64

const struct tensor_row tensor_rows[TENSORS] = {
#define TENSOR(tensor, dtypes, its_shape, its_feature) \
  {.name = #tensor, dtypes, .shape = &shapes[SHAPE_##its_shape], .feature = (its_feature)},
#define VECTOR(tensor, type, its_shape, its_feature) \
  {.name = #tensor,                                  \
   ONLY(DTYPE_##type),                               \
   .vector = true,                                   \
   .shape = &shapes[SHAPE_##its_shape],              \
   .feature = (its_feature)},
#include "tensors.def"
};

#define INPUT .output = false
#define OPTIONAL_INPUT .optional = true
#define OUTPUT .output = true
#define OPTIONAL_OUTPUT .output = true, .optional = true

static const struct argument forward_arguments[] = {
#define FORWARD(use, name) {offsetof(fa3_forward_args, name), TENSOR_##name, use},
#include "tensors.def"
};

static const struct argument backward_arguments[] = {
#define BACKWARD(use, name) {offsetof(fa3_backward_args, name), TENSOR_##name, use},
#include "tensors.def"
};

static const struct argument append_arguments[] = {
#define APPEND(use, name) {offsetof(fa3_append_args, name), TENSOR_##name, use},
#include "tensors.def"
};

static const struct argument combine_arguments[] = {
#define COMBINE(use, name) {offsetof(fa3_combine_args, name), TENSOR_##name, use},
#include "tensors.def"
};

static const struct argument quantize_arguments[] = {
#define QUANTIZE(use, name) {offsetof(fa3_quantize_args, name), TENSOR_##name, use},
#include "tensors.def"
};

/* `last` is the last field of the struct's first version. */
#define STRUCT(pass, last)                                                                     \
  {                                                                                            \
    .name = #pass, .size = sizeof(fa3_##pass##_args),                                          \
    .oldest = offsetof(fa3_##pass##_args, last) + sizeof(((fa3_##pass##_args *)NULL)->last),   \
    .count = sizeof pass##_arguments / sizeof *pass##_arguments, .arguments = pass##_arguments \
  }

static const struct argument_struct structs[] = {
    [FA3_FORWARD] = STRUCT(forward, workspace_size),
    [FA3_BACKWARD] = STRUCT(backward, workspace_size),
    [FA3_QUANTIZE] = STRUCT(quantize, num_threads),
    [FA3_APPEND] = STRUCT(append, num_threads),
    [FA3_COMBINE] = STRUCT(combine, num_threads),
};

const struct argument_struct *arguments_of(fa3_phase phase) {
  const bool known = phase > 0 && phase < (fa3_phase)(sizeof structs / sizeof *structs);
  return known && structs[phase].count ? &structs[phase] : NULL;
}

const struct argument *find_argument(fa3_phase phase, enum tensor tensor) {
  const struct argument_struct *list = arguments_of(phase);
  for (int i = 0; i < list->count; i++)
    if (list->arguments[i].tensor == tensor) return &list->arguments[i];
  return NULL;
}
