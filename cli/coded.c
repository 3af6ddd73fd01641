#include "coded.h"

#include <string.h>

#include "failure.h"

static void set_scale_shape(const fa3_tensor *input, int64_t rows, int64_t sequences,
                            struct loaded_tensor *scale) {
  const bool packed = input->rank == 3;
  const int64_t extent = input->shape[packed ? 0 : 1], heads = input->shape[input->rank - 2];
  const int64_t blocks = rows <= 0 ? 0
                         : packed  ? extent / rows + sequences
                                   : extent / rows + (extent % rows > 0);
  const int64_t one[] = {1}, by_head[] = {sequences, heads}, of_packed[] = {heads, blocks};
  const int64_t by_rows[] = {sequences, heads, blocks};
  const int64_t *shape = rows == SCALE_PER_TENSOR     ? one
                         : rows == SCALE_PER_SEQUENCE ? by_head
                         : packed                     ? of_packed
                                                      : by_rows;
  scale->dtype = FA3_FLOAT32;
  scale->rank = rows == SCALE_PER_TENSOR ? 1 : rows == SCALE_PER_SEQUENCE || packed ? 2 : 3;
  memcpy(scale->shape, shape, (size_t)scale->rank * sizeof *shape);
}

static fa3_tensor view_of_scale(const struct loaded_tensor *scale) {
  fa3_tensor view = {.data = scale->data, .dtype = scale->dtype, .rank = scale->rank};
  uint64_t stride = 1; /* it may overflow where there are no elements */
  for (int d = scale->rank - 1; d >= 0; d--) {
    view.shape[d] = scale->shape[d];
    view.strides[d] = (int64_t)stride;
    stride *= (uint64_t)scale->shape[d];
  }
  return view;
}

/* Of packed sequences, 1 at least. */
static int64_t longest_of(const fa3_tensor *starts) {
  const int32_t *start = starts->data;
  int64_t longest = 1;
  for (int64_t b = 1; b < starts->shape[0]; b++)
    if (start[b] - start[b - 1] > longest) longest = start[b] - start[b - 1];
  return longest;
}

int coded_make(const struct loaded_tensor *tensor, const fa3_tensor *view, const fa3_tensor *starts,
               const struct coding *coding, struct coded *coded) {
  const bool packed = starts->rank > 0;
  fa3_quantize_args *args = &coded->call.args.quantize;
  coded->call.phase = FA3_QUANTIZE;
  *args = (fa3_quantize_args){.struct_size = sizeof *args, .input = *view};
  coded->codes.dtype = FA3_FLOAT8_E4M3;
  coded->codes.rank = tensor->rank;
  memcpy(coded->codes.shape, tensor->shape, sizeof tensor->shape);
  TRY(loaded_tensor_make(&coded->codes, "codes"));
  args->codes = *view; /* in the same order */
  args->codes.dtype = FA3_FLOAT8_E4M3;
  if (coded->codes.data) args->codes.data = coded->codes.data;
  const int64_t sequences = packed ? starts->shape[0] - 1 : view->shape[0];
  set_scale_shape(view, coding->rows, sequences, &coded->scale);
  TRY(loaded_tensor_make(&coded->scale, "scales"));
  args->codes_scale = view_of_scale(&coded->scale);
  args->codes_scale_rows = coding->rows > 0 ? coding->rows : 0;
  if (packed) {
    args->cu_seqlens_q = *starts;
    args->max_seqlen_q = longest_of(starts);
  }
  if (coding->rotate) {
    args->flags |= FA3_ROTATE;
    args->seed = coding->seed;
  }
  if (coding->subtract_mean) args->flags |= FA3_SUBTRACT_MEAN;
  return 0;
}
