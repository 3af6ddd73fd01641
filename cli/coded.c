#include "coded.h"

#include <string.h>

#include "failure.h"
#include "lengths.h"

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
  args->codes_scale = loaded_tensor_view(&coded->scale);
  args->codes_scale_rows = coding->rows > 0 ? coding->rows : 0;
  if (packed) {
    args->cu_seqlens_q = *starts;
    args->max_seqlen_q = lengths_longest(starts);
  }
  if (coding->rotate) {
    args->flags |= FA3_ROTATE;
    args->seed = coding->seed;
  }
  if (coding->subtract_mean) args->flags |= FA3_SUBTRACT_MEAN;
  return 0;
}
