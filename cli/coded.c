#include "coded.h"

#include <string.h>

#include "attention.h"
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

/* Rows that are not used make no scale larger; where keys are looked up, nothing says which are. */
static fa3_tensor used_rows(const fa3_forward_args *args, bool query) {
  const bool looked_up = args->page_table.rank || args->cache_batch_index.rank;
  if (query) return args->seqused_q;
  return looked_up ? (fa3_tensor){0} : args->seqused_k;
}

int coded_add(const struct coding *coding, enum tensor tensor, struct operands *operands) {
  fa3_forward_args *forward = &operands->forward.args.forward;
  const bool query = tensor == TENSOR_query;
  const fa3_tensor view = *argument_in(forward, find_argument(FA3_FORWARD, tensor));
  const fa3_tensor *starts = query ? &forward->cu_seqlens_q : &forward->cu_seqlens_k;
  const enum tensor scale = operands_scale_of(tensor);
  struct loaded_tensor *loaded = &operands->loaded[tensor], *scales = &operands->loaded[scale];
  struct call *call = &operands->quantize[operands->quantize_count];
  fa3_quantize_args *args = &call->args.quantize;
  struct loaded_tensor codes = *loaded;
  codes.dtype = FA3_FLOAT8_E4M3;
  TRY(loaded_tensor_make(&codes, "codes"));
  operands->originals[operands->quantize_count++] = *loaded;
  *loaded = codes;
  memcpy(scales->origin, codes.origin, sizeof codes.origin);
  set_scale_shape(&view, coding->rows, starts->rank ? starts->shape[0] - 1 : view.shape[0], scales);
  TRY(loaded_tensor_make(scales, "scales"));
  TRY(operands_set_view(operands, tensor));
  TRY(operands_set_view(operands, scale));
  call->phase = FA3_QUANTIZE;
  *args = (fa3_quantize_args){.struct_size = sizeof *args,
                              .input = view,
                              .codes = *argument_in(forward, find_argument(FA3_FORWARD, tensor)),
                              .codes_scale = loaded_tensor_view(scales),
                              .codes_scale_rows = coding->rows > 0 ? coding->rows : 0,
                              .cu_seqlens_q = *starts,
                              .max_seqlen_q = lengths_longest(starts),
                              .seqused_q = used_rows(forward, query)};
  if (coding->rotate && tensor != TENSOR_value) {
    args->flags |= FA3_ROTATE;
    args->seed = coding->seed;
  }
  if (coding->subtract_mean && tensor == TENSOR_key) args->flags |= FA3_SUBTRACT_MEAN;
  *operands_scale_rows(operands, scale) = args->codes_scale_rows;
  return 0;
}

int coded_run(const struct operands *operands) {
  for (int i = 0; i < operands->quantize_count; i++) TRY(attention_run(&operands->quantize[i]));
  return 0;
}

int coded_read_originals(const struct attention_options *options, const char *file,
                         struct operands *operands) {
  struct loaded_tensor shapes[INPUTS];
  for (int i = 0; i < INPUTS; i++) {
    const enum tensor scale = operands_scale_of(inputs[i]);
    shapes[i] = operands->loaded[inputs[i]];
    operands->loaded[inputs[i]] = (struct loaded_tensor){0};
    *argument_in(&operands->forward.args, find_argument(FA3_FORWARD, scale)) = (fa3_tensor){0};
    *operands_scale_rows(operands, scale) = 0;
  }
  if (!file) {
    for (int i = 0; i < INPUTS; i++) {
      operands->loaded[inputs[i]] = operands->originals[i];
      TRY(operands_set_view(operands, inputs[i]));
    }
    return 0;
  }
  for (int i = 0; i < INPUTS; i++) {
    const struct loaded_tensor *loaded = &operands->loaded[inputs[i]];
    TRY(operands_load(options, inputs[i], file, operands));
    if (loaded->dtype == FA3_FLOAT8_E4M3 || loaded->rank != shapes[i].rank ||
        memcmp(loaded->shape, shapes[i].shape, sizeof loaded->shape) != 0)
      return fail(EXIT_INPUT, "%s: expected float32, float16 or bfloat16 in the shape of %s",
                  loaded->origin, shapes[i].origin);
  }
  return 0;
}

void coded_free_originals(struct operands *operands) {
  if (operands->quantize_count) return; /* they are those of the operands */
  for (int i = 0; i < INPUTS; i++) loaded_tensor_free(&operands->loaded[inputs[i]]);
}
