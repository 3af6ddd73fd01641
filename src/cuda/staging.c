#include "cuda/staging.h"

#include "error.h"
#include "integer.h"
#include "kernels/strided_params.h"

enum { ALIGNMENT = 128 };

enum { COPY_STRIDED, SINKS_TO_FLOAT };
const struct kernel_kind strided_kind = {
    .entries = {[COPY_STRIDED] = "copy_strided", [SINKS_TO_FLOAT] = "sinks_to_float"}};

/* The copy engine's strides: multiples of 16 bytes below 2^40, 0 as well. That of a single entry
 * does not matter. */
static bool stride_fits(int64_t extent, int64_t stride) {
  return extent <= 1 || (stride % 8 == 0 && stride < (INT64_C(1) << 39));
}

bool needs_staging(const struct operand *operand) {
  return (uintptr_t)operand->data % 16 || !stride_fits(operand->batch, operand->stride_batch) ||
         !stride_fits(operand->rows, operand->stride_row) ||
         !stride_fits(operand->heads, operand->stride_head);
}

fa3_status reserve(size_t *workspace_size, struct reservation *reservation, const char *name,
                   int64_t batch, int64_t rows, int64_t row_bytes) {
  int64_t bytes;
  reservation->used = true;
  reservation->offset = *workspace_size;
  if (__builtin_mul_overflow(larger(batch, 1), larger(rows, 1), &bytes) ||
      __builtin_mul_overflow(bytes, row_bytes, &bytes) || bytes > INT64_MAX / 16)
    return set_error(FA3_UNSUPPORTED, "%s is too large for the workspace", name);
  *workspace_size += (size_t)round_up(bytes, ALIGNMENT);
  return FA3_OK;
}

fa3_status reserve_if_needed(size_t *workspace_size, struct reservation *reservation,
                             const char *name, const struct operand *operand) {
  if (!needs_staging(operand)) return FA3_OK;
  return reserve(workspace_size, reservation, name, operand->batch, operand->rows,
                 2 * operand->heads * operand->dim);
}

size_t with_alignment(size_t workspace_size) {
  return workspace_size ? workspace_size + ALIGNMENT - 1 : 0;
}

char *align_workspace(void *workspace) {
  const uintptr_t mask = ALIGNMENT - 1;
  return workspace ? (char *)(((uintptr_t)workspace + mask) & ~mask) : NULL;
}

struct operand staged_operand(const struct operand *operand, const struct reservation *staged,
                              char *workspace) {
  struct operand copy = *operand;
  if (!staged->used) return copy;
  copy.data = workspace + staged->offset;
  copy.stride_head = copy.dim;
  copy.stride_row = copy.heads * copy.stride_head;
  copy.stride_batch = copy.rows * copy.stride_row;
  return copy;
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
  /* A grid's second dimension ends at 65535, so batches beyond it are copied in parts. */
  const int64_t most = 65535;
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

fa3_status stage_input(const struct cuda_scope *scope, const struct reservation *staged,
                       const struct operand *from, const struct operand *to, bool negate) {
  if (!staged->used) return FA3_OK;
  fa3_copy_params params = {.from = make_view(from, 1),
                            .to = make_view(to, 1),
                            .rows = from->rows,
                            .heads = (int)from->heads,
                            .dims = (int)from->dim,
                            .flip = negate ? 0x8000 : 0};
  return copy(scope, &params, from->batch);
}

fa3_status unstage_output(const struct cuda_scope *scope, const struct reservation *staged,
                          const struct operand *from, const struct operand *to,
                          const struct lengths *lengths) {
  if (!staged->used) return FA3_OK;
  const int64_t elements = to->dtype == FA3_FLOAT32 ? 2 : 1;
  fa3_copy_params params = {.from = make_view(from, elements),
                            .to = make_view(to, elements),
                            .rows = smaller(lengths->longest, to->rows),
                            .heads = (int)to->heads,
                            .dims = (int)(to->dim * elements),
                            .cu_seqlens = lengths->cu_seqlens,
                            .used = lengths->seqused};
  return copy(scope, &params, lengths->batch);
}

fa3_status stage_head_values(const struct cuda_scope *scope, const struct reservation *staged,
                             const struct operand *from, float *to) {
  if (!staged->used) return FA3_OK;
  fa3_sink_params params = {.from = from->data,
                            .stride = from->stride_head,
                            .heads = (int)from->heads,
                            .kind = from->dtype == FA3_FLOAT32   ? 0
                                    : from->dtype == FA3_FLOAT16 ? 1
                                                                 : 2};
  params.to = to;
  struct grid grid = {.x = 1, .y = 1, .z = 1, .threads = FA3_STRIDED_THREADS};
  return launch_kernel(scope, find_kernel(&(struct kernel_need){.kind = &strided_kind}),
                       SINKS_TO_FLOAT, &grid, &params);
}
