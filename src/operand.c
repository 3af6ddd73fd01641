#include "operand.h"

#include <inttypes.h>

#include "error.h"
#include "validate.h"

/* Where the problem has each tensor. */
static const size_t offsets[TENSORS] = {
#define TENSOR(name, ...) offsetof(struct problem, name),
#define VECTOR(name, ...) offsetof(struct problem, name),
#include "tensors.def"
};

static const char *const axis_names[AXES] = {
    [AXIS_BATCH] = "batch",   [AXIS_BATCH_K] = "batch",       [AXIS_ROWS_Q] = "rows",
    [AXIS_ROWS_K] = "rows",   [AXIS_HEADS_Q] = "heads",       [AXIS_HEADS_K] = "heads",
    [AXIS_PAGES] = "pages",   [AXIS_POSITIONS] = "positions", [AXIS_PAIRS] = "pairs",
    [AXIS_PARTIALS] = "sets", [AXIS_HEAD_DIM] = "head dim",   [AXIS_VALUE_HEAD_DIM] = "head dim"};

/* The tensors of a call while they are read. */
struct reading {
  const void *args;
  struct problem *problem;
  /* Set by the first tensor that has the axis, whose name is kept; the others must agree. */
  int64_t extents[AXES];
  const char *owners[AXES];
  enum axis batch_k; /* AXIS_BATCH, or of a cache that is looked up AXIS_BATCH_K */
};

/* A tensor that is in the phase's struct and was given, or null. */
static const fa3_tensor *find_given(const struct reading *reading, enum tensor tensor) {
  const struct argument *argument = find_argument(reading->problem->phase, tensor);
  if (!argument) return NULL;
  const fa3_tensor *given = argument_in(reading->args, argument);
  return tensor_absent(given) ? NULL : given;
}

static fa3_status check_dtype_rule(const struct reading *reading, const struct tensor_row *row,
                                   const fa3_tensor *tensor) {
  switch (row->rule) {
    case RULE_FLOATS:
      return check_float(row->name, tensor);
    case RULE_WIDE:
      return check_wide(row->name, tensor);
    case RULE_ONLY:
      return check_dtype(row->name, tensor, row->dtype);
    default:
      break;
  }
  const char *model_name = tensor_rows[row->model].name;
  const fa3_tensor *model = find_given(reading, row->model);
  /* A call that has no queries, or may lack them. */
  if (!model && row->model == TENSOR_query) {
    if (reading->problem->phase == FA3_COMBINE) return check_wide(row->name, tensor);
    model_name = tensor_rows[TENSOR_new_key].name;
    model = find_given(reading, TENSOR_new_key);
  }
  if (!model && reading->problem->phase == FA3_QUANTIZE && row->model == TENSOR_new_key) {
    model_name = tensor_rows[TENSOR_input].name;
    model = find_given(reading, TENSOR_input);
  }
  if (!model) return set_error(FA3_INVALID_FLAGS, "%s is given without %s", row->name, model_name);
  if (row->rule == RULE_COMPUTED)
    return check_computed_dtype(row->name, tensor, model_name, model->dtype);
  const bool cached = row->rule == RULE_CACHED && reading->problem->phase != FA3_BACKWARD;
  if (cached && tensor->dtype == FA3_FLOAT8_E4M3) return FA3_OK;
  return check_same_dtype(row->name, tensor, model_name, model->dtype);
}

/* A packed tensor has no axis for the batch. */
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

static fa3_status check_least(const char *name, int d, int64_t extent, enum axis axis) {
  const bool heads = axis == AXIS_HEADS_Q || axis == AXIS_HEADS_K;
  const bool dim = axis == AXIS_HEAD_DIM || axis == AXIS_VALUE_HEAD_DIM;
  if (extent > 0 || !(heads || dim || axis == AXIS_BATCH_AND_ONE)) return FA3_OK;
  return set_error(FA3_INVALID_SHAPE, "%s.shape[%d] is 0: expected %s", name, d,
                   heads ? "at least one head"
                   : dim ? "a head dim"
                         : "batch + 1");
}

static fa3_status check_group(const struct reading *reading, int64_t heads_k) {
  const int64_t heads_q = reading->extents[AXIS_HEADS_Q];
  if (!reading->owners[AXIS_HEADS_Q] || heads_q % heads_k == 0) return FA3_OK;
  const bool packed = reading->problem->features & FA3_FEATURE_VARLEN_QUERY;
  return set_error(FA3_INVALID_SHAPE,
                   "query.shape[%d] is %" PRId64 ": expected a multiple of key's %" PRId64 " heads",
                   packed ? 1 : 2, heads_q, heads_k);
}

static fa3_status check_extent(struct reading *reading, const char *name, int d, int64_t extent,
                               enum axis axis) {
  TRY(check_least(name, d, extent, axis));
  /* What is as long as the batch and one is bound as the batch. */
  const int64_t more = axis == AXIS_BATCH_AND_ONE;
  if (more) axis = AXIS_BATCH;
  if (!reading->owners[axis]) {
    if (axis == AXIS_HEADS_K) TRY(check_group(reading, extent));
    reading->owners[axis] = name;
    reading->extents[axis] = extent - more;
    return FA3_OK;
  }
  const int64_t expected = reading->extents[axis] + more;
  if (extent == expected) return FA3_OK;
  return set_error(FA3_INVALID_SHAPE,
                   "%s.shape[%d] is %" PRId64 ": expected %" PRId64 ", %s's %s%s", name, d, extent,
                   expected, reading->owners[axis], axis_names[axis], more ? " + 1" : "");
}

/* Where a tensor's axis is in an operand. */
static void set_axis(struct operand *operand, enum axis axis, int64_t extent, int64_t stride) {
  switch (axis) {
    case AXIS_ROWS_Q:
    case AXIS_ROWS_K:
    case AXIS_PAGES:
    case AXIS_POSITIONS:
      operand->rows = extent;
      operand->stride_row = stride;
      break;
    case AXIS_HEADS_Q:
    case AXIS_HEADS_K:
      operand->heads = extent;
      operand->stride_head = stride;
      break;
    case AXIS_HEAD_DIM:
    case AXIS_VALUE_HEAD_DIM:
    case AXIS_PAIRS:
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
  const bool packed = find_given(reading, row->shape->packed_by);
  const enum axis *axes = row->shape->axes + packed;
  struct operand operand = {
      .data = tensor->data, .dtype = tensor->dtype, .batch = 1, .rows = 1, .heads = 1, .dim = 1};
  TRY(check_dtype_rule(reading, row, tensor));
  TRY(check_rank(row, tensor, packed));
  TRY(check_tensor(row->name, tensor, tensor->rank));
  for (int d = 0; d < tensor->rank; d++) {
    const enum axis axis = axes[d] == AXIS_BATCH_K ? reading->batch_k : axes[d];
    TRY(check_extent(reading, row->name, d, tensor->shape[d], axis));
    /* A single entry's stride, which may be any number, is never used: no sum overflows. */
    set_axis(&operand, axis, tensor->shape[d], tensor->shape[d] > 1 ? tensor->strides[d] : 0);
  }
  if (argument->output) TRY(check_output_strides(row->name, tensor));
  void *field = (char *)reading->problem + offsets[argument->tensor];
  if (row->vector)
    *(const void **)field = tensor->data;
  else
    *(struct operand *)field = operand;
  reading->problem->features |= row->feature;
  return FA3_OK;
}

fa3_status read_tensors(const void *args, struct problem *problem) {
  struct reading reading = {.args = args, .problem = problem};
  const bool looked_up =
      find_given(&reading, TENSOR_cache_batch_index) || find_given(&reading, TENSOR_page_table);
  reading.batch_k = looked_up ? AXIS_BATCH_K : AXIS_BATCH;
  const struct argument_struct *list = arguments_of(problem->phase);
  for (int i = 0; i < list->count; i++) {
    const struct argument *argument = &list->arguments[i];
    const fa3_tensor *tensor = argument_in(args, argument);
    if (tensor_rows[argument->tensor].rule == RULE_SCALE) continue; /* scale.c */
    if (!tensor_absent(tensor))
      TRY(read_tensor(&reading, argument, tensor));
    else if (!argument->optional)
      return set_error(FA3_INVALID_POINTER, "%s is absent: it is needed",
                       tensor_rows[argument->tensor].name);
  }
  const int64_t *extents = reading.extents;
  problem->batch = extents[AXIS_BATCH];
  problem->heads_q = extents[AXIS_HEADS_Q];
  problem->heads_k = extents[AXIS_HEADS_K];
  problem->head_dim = extents[AXIS_HEAD_DIM];
  problem->value_head_dim = extents[AXIS_VALUE_HEAD_DIM];
  problem->rows_q = extents[AXIS_ROWS_Q];
  problem->rows_k = extents[AXIS_ROWS_K];
  problem->batch_k = problem->key.batch;
  if (problem->features & FA3_FEATURE_PAGE_TABLE &&
      (__builtin_mul_overflow(extents[AXIS_PAGES], extents[AXIS_ROWS_K], &problem->rows_k) ||
       problem->rows_k > MAX_EXTENT))
    return set_error(FA3_INVALID_SHAPE,
                     "page_table.shape[1] is %" PRId64
                     ": expected at most 2^48 rows in pages of "
                     "%" PRId64,
                     extents[AXIS_PAGES], extents[AXIS_ROWS_K]);
  return FA3_OK;
}

struct operand *problem_operand(const struct problem *problem, enum tensor tensor) {
  return (struct operand *)((uintptr_t)problem + offsets[tensor]);
}

void problem_set_data(struct problem *problem, enum tensor tensor, void *data) {
  if (tensor_rows[tensor].vector)
    *(void **)((char *)problem + offsets[tensor]) = data;
  else
    problem_operand(problem, tensor)->data = data;
}

struct tensor_data problem_tensor(const struct problem *problem, enum tensor tensor) {
  const struct tensor_row *row = &tensor_rows[tensor];
  const void *field = (const char *)problem + offsets[tensor];
  if (!row->vector) {
    const struct operand *operand = field;
    return (struct tensor_data){row->name, operand->data, operand->dtype, !has_elements(operand)};
  }
  const bool given = problem->features & row->feature;
  const bool no_sequences = row->shape->axes[0] == AXIS_BATCH && problem->batch == 0;
  return (struct tensor_data){row->name, *(void *const *)field, row->dtype, !given || no_sequences};
}
