#include "scale.h"

#include <inttypes.h>

#include "error.h"
#include "integer.h"
#include "validate.h"

/* An extent of a scale, which may be stated in two ways. */
static fa3_status check_extent(const char *name, const fa3_tensor *tensor, int d, int64_t expected,
                               int64_t or_else, const char *what) {
  if (tensor->shape[d] == expected || tensor->shape[d] == or_else) return FA3_OK;
  return set_error(FA3_INVALID_SHAPE, "%s.shape[%d] is %" PRId64 ": expected %" PRId64 ", %s", name,
                   d, tensor->shape[d], expected, what);
}

static fa3_status check_rank(const char *name, const fa3_tensor *tensor, int64_t rows,
                             bool packed) {
  const int32_t rank = rows == 0 || packed ? 2 : 3;
  if (tensor->rank == rank || (rows == 0 && tensor->rank == 1)) return FA3_OK;
  const char *expected = rows == 0 ? "1 or 2: one number, or (batch, heads)"
                         : packed  ? "2: (heads, blocks)"
                                   : "3: (batch, heads, blocks)";
  return set_error(FA3_INVALID_SHAPE,
                   "%s.rank is %" PRId32 ": with %s_rows %" PRId64 " expected %s", name,
                   tensor->rank, name, rows, expected);
}

static fa3_status check_shape(const char *name, const fa3_tensor *tensor, int64_t rows, bool packed,
                              const struct operand *operand, const struct problem *problem) {
  TRY(check_rank(name, tensor, rows, packed));
  TRY(check_strided_tensor(name, tensor, tensor->rank));
  if (tensor->rank == 1) return check_extent(name, tensor, 0, 1, 1, "the one scale of all");
  const int head = rows > 0 && packed ? 0 : 1;
  const int64_t entries = packed ? problem->batch : operand->batch;
  if (head == 1)
    TRY(check_extent(name, tensor, 0, entries, entries,
                     problem->page_table.dtype && !packed ? "the pages" : "the batch"));
  /* FlashAttention-3 scales queries by the head of their keys. */
  const int64_t or_else = problem->heads_k ? problem->heads_k : operand->heads;
  TRY(check_extent(name, tensor, head, operand->heads, or_else, "the heads"));
  if (rows == 0) return FA3_OK;
  const int64_t blocks =
      packed ? operand->rows / rows + problem->batch : divide_up(operand->rows, rows);
  return check_extent(name, tensor, head + 1, blocks, blocks, "the blocks of rows");
}

static struct operand make_scale(const fa3_tensor *tensor, int64_t rows, bool packed) {
  struct operand scale = {
      .data = tensor->data, .dtype = FA3_FLOAT32, .batch = 1, .rows = 1, .heads = 1, .dim = 1};
  if (tensor->rank == 1) return scale;
  const int head = rows > 0 && packed ? 0 : 1;
  if (head == 1) {
    scale.batch = tensor->shape[0];
    scale.stride_batch = tensor->strides[0];
  }
  scale.heads = tensor->shape[head];
  scale.stride_head = tensor->strides[head];
  if (rows > 0) {
    scale.rows = tensor->shape[head + 1];
    scale.stride_row = tensor->strides[head + 1];
  }
  return scale;
}

static fa3_status read_scale(enum tensor which, const fa3_tensor *tensor, int64_t rows,
                             struct problem *problem) {
  const char *name = tensor_rows[which].name;
  const char *model = tensor_rows[tensor_rows[which].model].name;
  const struct operand *operand = problem_operand(problem, tensor_rows[which].model);
  const bool of_keys = which == TENSOR_key_scale || which == TENSOR_value_scale;
  const fa3_features packing = of_keys ? FA3_FEATURE_VARLEN_KEY : FA3_FEATURE_VARLEN_QUERY;
  const bool packed = problem->features & packing;
  if (rows < 0)
    return set_error(FA3_INVALID_SCALE, "%s_rows is %" PRId64 ": expected 0 or more", name, rows);
  if (tensor_absent(tensor)) {
    if (!rows) return FA3_OK;
    return set_error(FA3_INVALID_FLAGS, "%s_rows is %" PRId64 ", but %s is absent", name, rows,
                     name);
  }
  if (operand->dtype != FA3_FLOAT8_E4M3)
    return set_error(FA3_INVALID_DTYPE,
                     "%s is given, but %s.dtype is %s: only FA3_FLOAT8_E4M3 has a scale", name,
                     model, dtype_name(operand->dtype));
  TRY(check_dtype(name, tensor, FA3_FLOAT32));
  TRY(check_shape(name, tensor, rows, packed, operand, problem));
  *problem_operand(problem, which) = make_scale(tensor, rows, packed);
  return FA3_OK;
}

/* The scale that a call writes. */
static fa3_status read_codes_scale(const fa3_quantize_args *args, struct problem *problem) {
  const fa3_tensor *tensor = &args->codes_scale;
  problem->codes_scale_rows = args->codes_scale_rows;
  if (tensor_absent(tensor))
    return set_error(FA3_INVALID_POINTER, "codes_scale is absent: it is needed");
  TRY(read_scale(TENSOR_codes_scale, tensor, args->codes_scale_rows, problem));
  return check_output_strides("codes_scale", tensor);
}

static fa3_status read_forward_scales(const fa3_forward_args *args, struct problem *problem) {
  problem->query_scale_rows = args->query_scale_rows;
  problem->key_scale_rows = args->key_scale_rows;
  problem->value_scale_rows = args->value_scale_rows;
  TRY(read_scale(TENSOR_query_scale, &args->query_scale, args->query_scale_rows, problem));
  TRY(read_scale(TENSOR_key_scale, &args->key_scale, args->key_scale_rows, problem));
  return read_scale(TENSOR_value_scale, &args->value_scale, args->value_scale_rows, problem);
}

/* A scale of each row is written, others are read. */
static fa3_status read_appended(enum tensor which, const fa3_tensor *tensor, int64_t rows,
                                struct problem *problem) {
  const char *name = tensor_rows[which].name;
  TRY(read_scale(which, tensor, rows, problem));
  if (!tensor_absent(tensor) && problem->new_key.dtype == FA3_FLOAT8_E4M3)
    return set_error(FA3_INVALID_DTYPE,
                     "%s is given, but new_key.dtype is FA3_FLOAT8_E4M3: codes are copied, and "
                     "their scales are the caller's",
                     name);
  return rows == 1 ? check_output_strides(name, tensor) : FA3_OK;
}

static fa3_status read_append_scales(const fa3_append_args *args, struct problem *problem) {
  problem->key_scale_rows = args->key_scale_rows;
  problem->value_scale_rows = args->value_scale_rows;
  TRY(read_appended(TENSOR_key_scale, &args->key_scale, args->key_scale_rows, problem));
  return read_appended(TENSOR_value_scale, &args->value_scale, args->value_scale_rows, problem);
}

fa3_status read_scales(const void *args, struct problem *problem) {
  if (problem->phase == FA3_FORWARD) return read_forward_scales(args, problem);
  if (problem->phase == FA3_APPEND) return read_append_scales(args, problem);
  return problem->phase == FA3_QUANTIZE ? read_codes_scale(args, problem) : FA3_OK;
}

/* `entry` is the sequence's index where it is packed, else the batch entry. */
static float *scale_at(const struct operand *scale, int64_t rows, const int32_t *cu_seqlens,
                       int64_t entry, int64_t head, int64_t row) {
  if (!scale->dtype) return NULL;
  int64_t block = rows ? row / rows : 0;
  if (rows && cu_seqlens) block += cu_seqlens[entry] / rows + entry;
  return (float *)(void *)scale->data + entry * scale->stride_batch + head * scale->stride_head +
         block * scale->stride_row;
}

/* Of a key or a value: a page stands for a sequence. */
static float *cache_scale_at(const struct problem *problem, const struct operand *scale,
                             int64_t rows, const struct sequence *sequence, int64_t head,
                             int64_t row) {
  int64_t entry = problem->cu_seqlens_k ? sequence->index : sequence->batch_k;
  if (sequence->pages) {
    entry = sequence->pages[row / problem->key.rows];
    row %= problem->key.rows;
  }
  return scale_at(scale, rows, problem->cu_seqlens_k, entry, head, row);
}

float query_scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                     int64_t row) {
  const struct operand *scale = &problem->query_scale;
  if (scale->heads == problem->heads_k) head /= problem->heads_q / problem->heads_k;
  const float *at =
      scale_at(scale, problem->query_scale_rows, problem->cu_seqlens_q,
               problem->cu_seqlens_q ? sequence->index : sequence->batch_q, head, row);
  return at ? *at : 1;
}

float *key_scale_at(const struct problem *problem, const struct sequence *sequence, int64_t head,
                    int64_t row) {
  return cache_scale_at(problem, &problem->key_scale, problem->key_scale_rows, sequence, head, row);
}

float *value_scale_at(const struct problem *problem, const struct sequence *sequence, int64_t head,
                      int64_t row) {
  return cache_scale_at(problem, &problem->value_scale, problem->value_scale_rows, sequence, head,
                        row);
}

float key_scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                   int64_t row) {
  const float *at = key_scale_at(problem, sequence, head, row);
  return at ? *at : 1;
}

float value_scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                     int64_t row) {
  const float *at = value_scale_at(problem, sequence, head, row);
  return at ? *at : 1;
}

float *codes_scale_at(const struct problem *problem, const struct sequence *sequence, int64_t head,
                      int64_t row) {
  return scale_at(&problem->codes_scale, problem->codes_scale_rows, problem->cu_seqlens_q,
                  problem->cu_seqlens_q ? sequence->index : sequence->batch_q, head, row);
}
