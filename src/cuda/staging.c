#include "cuda/staging.h"

#include "cuda/launch.h"
#include "cuda/limits.h"
#include "error.h"
#include "integer.h"
#include "kernels/strided_params.h"

enum { ALIGNMENT = 128 };

enum { COPY_STRIDED, SINKS_TO_FLOAT };
const struct kernel_kind strided_kind = {
    .entries = {[COPY_STRIDED] = "copy_strided", [SINKS_TO_FLOAT] = "sinks_to_float"}};

/* The copy engine's strides: multiples of 16 bytes below 2^40, 0 as well. That of a single entry
 * does not matter. */
static bool stride_fits(int64_t extent, int64_t stride, int64_t element) {
  return extent <= 1 || (stride % (16 / element) == 0 && stride < (INT64_C(1) << 40) / element);
}

bool fits_copy_engine(const struct operand *operand) {
  const int64_t element = (int64_t)fa3_dtype_size(operand->dtype);
  return (uintptr_t)operand->data % 16 == 0 &&
         stride_fits(operand->batch, operand->stride_batch, element) &&
         stride_fits(operand->rows, operand->stride_row, element) &&
         stride_fits(operand->heads, operand->stride_head, element);
}

static bool is_as_demanded(const struct operand *operand, const struct demand *demand) {
  switch (demand->form) {
    case FORM_TMA:
      return fits_copy_engine(operand);
    case FORM_MINUS:
      return false;
    default:
      return operand->dtype == FA3_FLOAT32;
  }
}

fa3_status reserve(size_t *workspace_size, struct reservation *reservation, const char *name,
                   int64_t batch, int64_t rows, int64_t row_bytes) {
  int64_t bytes;
  *reservation = (struct reservation){.used = true, .offset = *workspace_size};
  if (__builtin_mul_overflow(larger(batch, 1), larger(rows, 1), &bytes) ||
      __builtin_mul_overflow(bytes, row_bytes, &bytes) || bytes > INT64_MAX / 16)
    return set_error(FA3_UNSUPPORTED, "%s is too large for the workspace", name);
  *workspace_size += (size_t)round_up(bytes, ALIGNMENT);
  return FA3_OK;
}

size_t with_alignment(size_t workspace_size) {
  return workspace_size ? workspace_size + ALIGNMENT - 1 : 0;
}

char *align_workspace(void *workspace) {
  const uintptr_t mask = ALIGNMENT - 1;
  return workspace ? (char *)(((uintptr_t)workspace + mask) & ~mask) : NULL;
}

/* The view of an operand's copy. A single entry of a batch keeps its stride of 0: packed sequences
 * count from the same start, whatever their number. */
static struct operand make_copy(const struct operand *operand, enum form form, char *data) {
  struct operand copy = *operand;
  copy.data = data;
  if (form == FORM_FLOATS) copy.dtype = FA3_FLOAT32;
  copy.stride_head = copy.dim;
  copy.stride_row = copy.heads * copy.stride_head;
  copy.stride_batch = copy.batch > 1 ? copy.rows * copy.stride_row : 0;
  return copy;
}

fa3_status plan_staging(const struct problem *problem, const struct demand *demands, int count,
                        struct staging *staging, size_t *workspace_size) {
  for (int d = 0; d < count; d++) {
    const struct operand *operand = problem_operand(problem, demands[d].tensor);
    if (!operand->dtype || is_as_demanded(operand, &demands[d])) continue;
    const int64_t element = demands[d].form == FORM_FLOATS
                                ? (int64_t)sizeof(float)
                                : (int64_t)fa3_dtype_size(operand->dtype);
    int64_t elements; /* of a row, which the kernel that copies counts in 32 bits */
    if (demands[d].form != FORM_FLOATS &&
        (__builtin_mul_overflow(operand->heads, operand->dim, &elements) || elements > INT32_MAX))
      return set_error(FA3_UNSUPPORTED,
                       "%s has rows of 2^31 elements or more: too long to be copied",
                       tensor_rows[demands[d].tensor].name);
    const struct operand staged = make_copy(operand, demands[d].form, NULL);
    if (demands[d].form != FORM_FLOATS && !fits_copy_engine(&staged))
      return set_error(FA3_UNSUPPORTED, "%s is too large for the copy engine, also contiguous",
                       tensor_rows[demands[d].tensor].name);
    struct reservation room;
    TRY(reserve(workspace_size, &room, tensor_rows[demands[d].tensor].name, operand->batch,
                operand->rows, element * operand->heads * operand->dim));
    staging->tensors[staging->count++] = (struct staged){demands[d], room.offset};
  }
  return FA3_OK;
}

/* What a copy moves: a float is two elements of 16 bits. */
static fa3_view make_view(const struct operand *operand, int64_t elements) {
  return (fa3_view){.data = (uint16_t *)(void *)operand->data,
                    .stride_batch = operand->stride_batch * elements,
                    .stride_row = operand->stride_row * elements,
                    .stride_head = operand->stride_head * elements};
}

static fa3_status copy(const struct cuda_scope *scope, const fa3_copy_params *params,
                       int64_t batches) {
  /* In parts that fit a grid. */
  const int64_t most = MAX_GRID;
  int64_t elements = params->rows * params->heads * params->dims;
  int64_t blocks = divide_up(elements, FA3_STRIDED_THREADS);
  int64_t enough = 16 * (int64_t)scope->multiprocessors;
  const struct kernel *strided = find_kernel(&(struct kernel_need){.kind = &strided_kind});
  if (elements == 0) return FA3_OK;
  for (int64_t first = 0; first < batches; first += most) {
    fa3_copy_params part = *params;
    int64_t count = batches - first < most ? batches - first : most;
    if (part.cu_seqlens) {
      part.cu_seqlens += first;
    } else {
      part.from.data += first * part.from.stride_batch;
      part.to.data += first * part.to.stride_batch;
    }
    if (part.used) part.used += first;
    struct grid grid = {.x = (unsigned)(blocks < enough ? blocks : enough),
                        .y = (unsigned)count,
                        .z = 1,
                        .threads = FA3_STRIDED_THREADS};
    TRY(launch_kernel(scope, strided, COPY_STRIDED, &grid, &part));
  }
  return FA3_OK;
}

static fa3_status copy_input(const struct cuda_scope *scope, const struct operand *from,
                             const struct operand *to, bool negated) {
  fa3_copy_params params = {.from = make_view(from, 1),
                            .to = make_view(to, 1),
                            .rows = from->rows,
                            .heads = (int)from->heads,
                            .dims = (int)from->dim,
                            .flip = negated ? 0x8000 : 0};
  return copy(scope, &params, from->batch);
}

static fa3_status copy_output(const struct cuda_scope *scope, const struct problem *problem,
                              const struct operand *from, const struct operand *to) {
  const int64_t elements = to->dtype == FA3_FLOAT32 ? 2 : 1;
  fa3_copy_params params = {.from = make_view(from, elements),
                            .to = make_view(to, elements),
                            .rows = smaller(problem->max_seqlen_q, to->rows),
                            .heads = (int)to->heads,
                            .dims = (int)(to->dim * elements),
                            .cu_seqlens = problem->cu_seqlens_q,
                            .used = problem->seqused_q};
  return copy(scope, &params, problem->batch);
}

static fa3_status make_floats(const struct cuda_scope *scope, const struct operand *from,
                              const struct operand *to) {
  fa3_sink_params params = {.from = from->data,
                            .stride = from->stride_head,
                            .heads = (int)from->heads,
                            .kind = from->dtype == FA3_FLOAT32   ? 0
                                    : from->dtype == FA3_FLOAT16 ? 1
                                                                 : 2};
  params.to = (float *)(void *)to->data;
  struct grid grid = {.x = 1, .y = 1, .z = 1, .threads = FA3_STRIDED_THREADS};
  return launch_kernel(scope, find_kernel(&(struct kernel_need){.kind = &strided_kind}),
                       SINKS_TO_FLOAT, &grid, &params);
}

static bool is_output(const struct problem *problem, const struct staged *staged) {
  return find_argument(problem->phase, staged->demand.tensor)->output;
}

fa3_status stage(const struct cuda_scope *scope, const struct problem *problem,
                 const struct staging *staging, char *workspace, struct problem *staged) {
  *staged = *problem;
  for (const struct staged *s = staging->tensors; s < staging->tensors + staging->count; s++) {
    struct operand *to = problem_operand(staged, s->demand.tensor);
    const struct operand from = *to;
    *to = make_copy(&from, s->demand.form, workspace + s->offset);
    if (is_output(problem, s)) continue;
    if (s->demand.form == FORM_FLOATS)
      TRY(make_floats(scope, &from, to));
    else
      TRY(copy_input(scope, &from, to, s->demand.form == FORM_MINUS));
  }
  return FA3_OK;
}

fa3_status unstage(const struct cuda_scope *scope, const struct problem *problem,
                   const struct staging *staging, const struct problem *staged) {
  for (const struct staged *s = staging->tensors; s < staging->tensors + staging->count; s++)
    if (is_output(problem, s))
      TRY(copy_output(scope, problem, problem_operand(staged, s->demand.tensor),
                      problem_operand(problem, s->demand.tensor)));
  return FA3_OK;
}
