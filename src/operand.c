#include "operand.h"

#include <inttypes.h>

#include "error.h"
#include "validate.h"

struct operand make_operand(const fa3_tensor *tensor) {
  int row = tensor->rank - 3;
  return (struct operand){.data = tensor->data,
                          .dtype = tensor->dtype,
                          .batch = row ? tensor->shape[0] : 1,
                          .rows = tensor->shape[row],
                          .heads = tensor->shape[row + 1],
                          .dim = tensor->shape[row + 2],
                          .stride_batch = row ? tensor->strides[0] : 0,
                          .stride_row = tensor->strides[row],
                          .stride_head = tensor->strides[row + 1]};
}

/* A packed tensor has no dimension for the batch. */
static fa3_status check_rank(const char *name, const fa3_tensor *tensor, int32_t rank_if_packed,
                             bool packed, const char *lengths) {
  if (tensor->rank == rank_if_packed + !packed) return FA3_OK;
  if (packed)
    return set_error(FA3_INVALID_SHAPE,
                     "%s.rank is %" PRId32 ": expected %" PRId32 ", as %s is given", name,
                     tensor->rank, rank_if_packed, lengths);
  return set_error(FA3_INVALID_SHAPE,
                   "%s.rank is %" PRId32 ": expected %" PRId32 ", or %" PRId32 " with %s", name,
                   tensor->rank, rank_if_packed + 1, rank_if_packed, lengths);
}

fa3_status check_operand(const char *name, const fa3_tensor *tensor, bool packed,
                         const char *lengths) {
  if (tensor_absent(tensor))
    return set_error(FA3_INVALID_POINTER, "%s is absent: it is needed", name);
  if (!dtype_is_float(tensor->dtype))
    return set_error(FA3_INVALID_DTYPE,
                     "%s.dtype is %" PRId32
                     " (%s): expected FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16",
                     name, tensor->dtype, dtype_name(tensor->dtype));
  TRY(check_rank(name, tensor, 3, packed, lengths));
  TRY(check_tensor(name, tensor, tensor->rank));
  int last = tensor->rank - 1;
  if (tensor->shape[last] < 1)
    return set_error(FA3_INVALID_SHAPE, "%s.shape[%d] is 0: expected a head dim", name, last);
  if (tensor->shape[last - 1] < 1)
    return set_error(FA3_INVALID_SHAPE, "%s.shape[%d] is 0: expected at least one head", name,
                     last - 1);
  return FA3_OK;
}

fa3_status read_row_values(const char *name, const fa3_tensor *tensor,
                           const struct problem *problem, struct operand *operand) {
  bool packed = problem->features & FA3_FEATURE_VARLEN_QUERY;
  TRY(check_dtype(name, tensor, FA3_FLOAT32));
  TRY(check_rank(name, tensor, 2, packed, "cu_seqlens_q"));
  TRY(check_tensor(name, tensor, tensor->rank));
  int head = packed ? 0 : 1;
  if (!packed) TRY(check_extent(name, tensor, 0, problem->batch, "the batch"));
  TRY(check_extent(name, tensor, head, problem->heads_q, "query's heads"));
  TRY(check_extent(name, tensor, head + 1, problem->rows_q, "query's rows"));
  *operand = (struct operand){.data = tensor->data,
                              .dtype = tensor->dtype,
                              .batch = packed ? 1 : tensor->shape[0],
                              .rows = tensor->shape[head + 1],
                              .heads = tensor->shape[head],
                              .dim = 1,
                              .stride_batch = packed ? 0 : tensor->strides[0],
                              .stride_head = tensor->strides[head],
                              .stride_row = tensor->strides[head + 1]};
  return FA3_OK;
}

fa3_status read_head_values(const char *name, const fa3_tensor *tensor,
                            const struct problem *problem, struct operand *operand) {
  TRY(check_computed_dtype(name, tensor, "query's", problem->query.dtype));
  TRY(check_tensor(name, tensor, 1));
  TRY(check_extent(name, tensor, 0, problem->heads_q, "query's heads"));
  *operand = (struct operand){.data = tensor->data,
                              .dtype = tensor->dtype,
                              .batch = 1,
                              .rows = 1,
                              .heads = tensor->shape[0],
                              .dim = 1,
                              .stride_head = tensor->strides[0]};
  return FA3_OK;
}
