#include "operand.h"

#include <inttypes.h>

#include "error.h"
#include "validate.h"

/* Where the problem has each tensor. */
static const size_t places[TENSORS] = {
#define TENSOR(name, ...) offsetof(struct problem, name),
#define VECTOR(name, ...) offsetof(struct problem, name),
#include "tensors.def"
};

static const char *const dimension_names[DIMENSIONS] = {
    [BATCH] = "batch",       [BATCH_K] = "batch",          [ROWS_Q] = "rows",
    [ROWS_K] = "rows",       [HEADS_Q] = "heads",          [HEADS_K] = "heads",
    [HEAD_DIM] = "head dim", [VALUE_HEAD_DIM] = "head dim"};

/* The tensors of a call while they are read. */
struct reading {
  const void *args;
  struct problem *problem;
  /* Set by the first tensor that has the dimension, whose name is kept; the others must agree. */
  int64_t extents[DIMENSIONS];
  const char *owners[DIMENSIONS];
  enum dimension batch_k; /* BATCH, or of a cache BATCH_K */
};

/* Whether a tensor is in the phase's struct, and was given. */
static bool is_given(const struct reading *reading, enum tensor tensor) {
  const fa3_tensor *argument = find_argument(reading->problem->phase, reading->args, tensor);
  return argument && !tensor_absent(argument);
}

static fa3_status check_dtype_rule(const struct reading *reading, const struct tensor_row *row,
                                   const fa3_tensor *tensor) {
  switch (row->rule) {
    case RULE_FLOATS:
      return check_float(row->name, tensor);
    case RULE_ONLY:
      return check_dtype(row->name, tensor, row->dtype);
    default:
      break;
  }
  const char *model_name = tensor_rows[row->model].name;
  if (!is_given(reading, row->model))
    return set_error(FA3_INVALID_FLAGS, "%s is given without %s", row->name, model_name);
  const fa3_tensor *model = find_argument(reading->problem->phase, reading->args, row->model);
  return row->rule == RULE_SAME ? check_same_dtype(row->name, tensor, model_name, model->dtype)
                                : check_computed_dtype(row->name, tensor, model_name, model->dtype);
}

/* A packed tensor has no dimension for the batch. */
static fa3_status check_rank(const struct tensor_row *row, const fa3_tensor *tensor, bool packed) {
  const struct shape *shape = row->shape;
  if (tensor->rank == shape->rank - packed) return FA3_OK;
  if (shape->packed_by == TENSOR_nothing)
    return set_error(FA3_INVALID_SHAPE, "%s.rank is %" PRId32 ": expected %d", row->name,
                     tensor->rank, shape->rank);
  const char *starts = tensor_rows[shape->packed_by].name;
  if (packed)
    return set_error(FA3_INVALID_SHAPE, "%s.rank is %" PRId32 ": expected %d, as %s is given",
                     row->name, tensor->rank, shape->rank - 1, starts);
  return set_error(FA3_INVALID_SHAPE, "%s.rank is %" PRId32 ": expected %d, or %d with %s",
                   row->name, tensor->rank, shape->rank, shape->rank - 1, starts);
}

static fa3_status check_least(const char *name, int d, int64_t extent, enum dimension dimension) {
  const bool heads = dimension == HEADS_Q || dimension == HEADS_K;
  const bool dim = dimension == HEAD_DIM || dimension == VALUE_HEAD_DIM;
  if (extent > 0 || !(heads || dim || dimension == BATCH_AND_ONE)) return FA3_OK;
  return set_error(FA3_INVALID_SHAPE, "%s.shape[%d] is 0: expected %s", name, d,
                   heads ? "at least one head"
                   : dim ? "a head dim"
                         : "batch + 1");
}

static fa3_status check_group(const struct reading *reading, int64_t heads_k) {
  const int64_t heads_q = reading->extents[HEADS_Q];
  if (!reading->owners[HEADS_Q] || heads_q % heads_k == 0) return FA3_OK;
  const bool packed = reading->problem->features & FA3_FEATURE_VARLEN_QUERY;
  return set_error(FA3_INVALID_SHAPE,
                   "query.shape[%d] is %" PRId64 ": expected a multiple of key's %" PRId64 " heads",
                   packed ? 1 : 2, heads_q, heads_k);
}

static fa3_status check_extent(struct reading *reading, const char *name, int d, int64_t extent,
                               enum dimension dimension) {
  TRY(check_least(name, d, extent, dimension));
  /* What is as long as the batch and one is bound as the batch. */
  const int64_t more = dimension == BATCH_AND_ONE;
  if (more) dimension = BATCH;
  if (!reading->owners[dimension]) {
    if (dimension == HEADS_K) TRY(check_group(reading, extent));
    reading->owners[dimension] = name;
    reading->extents[dimension] = extent - more;
    return FA3_OK;
  }
  const int64_t expected = reading->extents[dimension] + more;
  if (extent == expected) return FA3_OK;
  return set_error(
      FA3_INVALID_SHAPE, "%s.shape[%d] is %" PRId64 ": expected %" PRId64 ", %s's %s%s", name, d,
      extent, expected, reading->owners[dimension], dimension_names[dimension], more ? " + 1" : "");
}

/* The place of a tensor's dimension in an operand. */
static void set_axis(struct operand *operand, enum dimension dimension, int64_t extent,
                     int64_t stride) {
  switch (dimension) {
    case ROWS_Q:
    case ROWS_K:
      operand->rows = extent;
      operand->stride_row = stride;
      break;
    case HEADS_Q:
    case HEADS_K:
      operand->heads = extent;
      operand->stride_head = stride;
      break;
    case HEAD_DIM:
    case VALUE_HEAD_DIM:
      operand->dim = extent;
      break;
    default:
      operand->batch = extent;
      operand->stride_batch = stride;
  }
}

static fa3_status read_tensor(struct reading *reading, const struct argument *argument,
                              const fa3_tensor *tensor) {
  const struct tensor_row *row = &tensor_rows[argument->tensor];
  const bool packed = is_given(reading, row->shape->packed_by);
  const enum dimension *dimensions = row->shape->dimensions + packed;
  struct operand operand = {
      .data = tensor->data, .dtype = tensor->dtype, .batch = 1, .rows = 1, .heads = 1, .dim = 1};
  TRY(check_dtype_rule(reading, row, tensor));
  TRY(check_rank(row, tensor, packed));
  TRY(check_tensor(row->name, tensor, tensor->rank));
  for (int d = 0; d < tensor->rank; d++) {
    const enum dimension dimension = dimensions[d] == BATCH_K ? reading->batch_k : dimensions[d];
    TRY(check_extent(reading, row->name, d, tensor->shape[d], dimension));
    set_axis(&operand, dimension, tensor->shape[d], tensor->strides[d]);
  }
  if (argument->output) TRY(check_output_strides(row->name, tensor));
  void *place = (char *)reading->problem + places[argument->tensor];
  if (row->vector)
    *(const void **)place = tensor->data;
  else
    *(struct operand *)place = operand;
  reading->problem->features |= row->feature;
  return FA3_OK;
}

fa3_status read_tensors(const void *args, struct problem *problem) {
  struct reading reading = {.args = args, .problem = problem};
  reading.batch_k = is_given(&reading, TENSOR_cache_batch_index) ? BATCH_K : BATCH;
  const struct argument_struct *list = arguments_of(problem->phase);
  for (int i = 0; i < list->count; i++) {
    const struct argument *argument = &list->arguments[i];
    const fa3_tensor *tensor = find_argument(problem->phase, args, argument->tensor);
    if (!tensor_absent(tensor))
      TRY(read_tensor(&reading, argument, tensor));
    else if (!argument->optional)
      return set_error(FA3_INVALID_POINTER, "%s is absent: it is needed",
                       tensor_rows[argument->tensor].name);
  }
  const int64_t *extents = reading.extents;
  problem->batch = extents[BATCH];
  problem->heads_q = extents[HEADS_Q];
  problem->heads_k = extents[HEADS_K];
  problem->head_dim = extents[HEAD_DIM];
  problem->value_head_dim = extents[VALUE_HEAD_DIM];
  problem->rows_q = extents[ROWS_Q];
  problem->rows_k = extents[ROWS_K];
  problem->batch_k = problem->key.batch;
  return FA3_OK;
}

struct tensor_data problem_tensor(const struct problem *problem, enum tensor tensor) {
  const struct tensor_row *row = &tensor_rows[tensor];
  const void *place = (const char *)problem + places[tensor];
  if (!row->vector) {
    const struct operand *operand = place;
    return (struct tensor_data){row->name, operand->data, operand->dtype, !has_elements(operand)};
  }
  const bool given = problem->features & row->feature;
  const bool no_sequences = row->shape->dimensions[0] == BATCH && problem->batch == 0;
  return (struct tensor_data){row->name, *(void *const *)place, row->dtype, !given || no_sequences};
}
