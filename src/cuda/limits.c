#include "cuda/limits.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

#include "error.h"
#include "kernels/mask.h"
#include "validate.h"

/* With room for a tile beyond the end. */
#define MAX_ROWS (INT32_MAX - 65536)

fa3_status check_half_precision(const fa3_capability *capability) {
  fa3_dtype dtype = capability->query_dtype;
  if (dtype != FA3_FLOAT16 && dtype != FA3_BFLOAT16)
    return set_error(FA3_UNSUPPORTED,
                     "query's dtype is %s: the CUDA kernels take FA3_FLOAT16 and FA3_BFLOAT16",
                     dtype_name(dtype));
  const struct {
    const char *name;
    fa3_dtype dtype;
  } others[] = {{"key", capability->key_dtype},
                {"value", capability->value_dtype},
                {"output", capability->output_dtype}};
  for (int i = 0; i < 3; i++)
    if (others[i].dtype != dtype &&
        !(i == 2 && capability->phase == FA3_FORWARD && others[i].dtype == FA3_FLOAT32))
      return set_error(FA3_UNSUPPORTED,
                       "%s's dtype is %s and query's %s: the CUDA kernels take one dtype for all",
                       others[i].name, dtype_name(others[i].dtype), dtype_name(dtype));
  if (capability->head_dim < 8 || capability->head_dim % 8 || capability->value_head_dim < 8 ||
      capability->value_head_dim % 8)
    return set_error(FA3_UNSUPPORTED,
                     "head dims %" PRId32 " and %" PRId32
                     " (query and key, value): expected multiples of 8",
                     capability->head_dim, capability->value_head_dim);
  return FA3_OK;
}

static fa3_status check_code_dims(const fa3_capability *capability) {
  if (capability->head_dim >= 16 && capability->head_dim % 16 == 0 &&
      capability->value_head_dim >= 16 && capability->value_head_dim % 16 == 0)
    return FA3_OK;
  return set_error(FA3_UNSUPPORTED,
                   "head dims %" PRId32 " and %" PRId32
                   " (query and key, value): of FA3_FLOAT8_E4M3 expected multiples of 16",
                   capability->head_dim, capability->value_head_dim);
}

fa3_status check_fp8(const fa3_capability *capability) {
  const fa3_dtype dtype = capability->query_dtype, output = capability->output_dtype;
  if (capability->key_dtype != dtype || capability->value_dtype != dtype)
    return set_error(FA3_UNSUPPORTED, "key's dtype is %s and value's %s: expected query's, %s",
                     dtype_name(capability->key_dtype), dtype_name(capability->value_dtype),
                     dtype_name(dtype));
  if (output != FA3_FLOAT16 && output != FA3_BFLOAT16 && output != FA3_FLOAT32)
    return set_error(FA3_UNSUPPORTED,
                     "output's dtype is %s: expected FA3_FLOAT16, FA3_BFLOAT16 or FA3_FLOAT32",
                     dtype_name(output));
  return check_code_dims(capability);
}

fa3_status check_fp8_cache(const fa3_capability *capability) {
  const fa3_dtype dtype = capability->query_dtype, output = capability->output_dtype;
  if (dtype != FA3_FLOAT16 && dtype != FA3_BFLOAT16)
    return set_error(FA3_UNSUPPORTED,
                     "query's dtype is %s and key's FA3_FLOAT8_E4M3: the CUDA kernels take queries "
                     "of FA3_FLOAT16, FA3_BFLOAT16 and FA3_FLOAT8_E4M3",
                     dtype_name(dtype));
  if (capability->value_dtype != FA3_FLOAT8_E4M3)
    return set_error(FA3_UNSUPPORTED, "value's dtype is %s: expected key's, FA3_FLOAT8_E4M3",
                     dtype_name(capability->value_dtype));
  if (output != dtype && output != FA3_FLOAT32)
    return set_error(FA3_UNSUPPORTED, "output's dtype is %s: expected query's, %s, or FA3_FLOAT32",
                     dtype_name(output), dtype_name(dtype));
  return check_code_dims(capability);
}

fa3_status check_scale(const struct problem *problem) {
  const double log2e = 1.4426950408889634, most = (double)FLT_MAX / log2e;
  const double scale = (double)problem->scale, softcap = (double)problem->softcap;
  if (!(fabs(scale) <= most))
    return set_error(FA3_UNSUPPORTED,
                     "softmax_scale is %g: the CUDA kernels take up to %g, times log2(e) a float",
                     scale, most);
  if (!(softcap <= most))
    return set_error(FA3_UNSUPPORTED,
                     "softcap is %g: the CUDA kernels take up to %g, times log2(e) a float",
                     softcap, most);
  if (softcap > 0 && !(fabs(scale) * 2 <= softcap * most))
    return set_error(FA3_UNSUPPORTED,
                     "softmax_scale is %g, softcap %g: the CUDA kernels take up to %g times the "
                     "softcap",
                     scale, softcap, most / 2);
  return FA3_OK;
}

fa3_status check_lengths(const struct problem *problem) {
  const struct {
    const char *name;
    char letter;
    bool packed;
    int64_t rows;
    int64_t longest;
  } sides[] = {{"query", 'q', problem->features & FA3_FEATURE_VARLEN_QUERY, problem->rows_q,
                problem->max_seqlen_q},
               {"key", 'k', problem->features & FA3_FEATURE_VARLEN_KEY, problem->rows_k,
                problem->max_seqlen_k}};
  for (int i = 0; i < 2; i++) {
    if (sides[i].packed && sides[i].longest == 0 && sides[i].rows > 0)
      return set_error(FA3_INVALID_LENGTHS,
                       "max_seqlen_%c is 0 with cu_seqlens_%c: expected the longest sequence, "
                       "whose length a GPU's caller has to give",
                       sides[i].letter, sides[i].letter);
    if (sides[i].rows > MAX_ROWS)
      return set_error(FA3_UNSUPPORTED, "%s has %" PRId64 " rows: the CUDA kernels take %d",
                       sides[i].name, sides[i].rows, MAX_ROWS);
    if (sides[i].longest > FA3_MAX_SEQLEN)
      return set_error(FA3_UNSUPPORTED,
                       "%s has sequences of up to %" PRId64 " rows: the CUDA kernels take %d",
                       sides[i].name, sides[i].longest, FA3_MAX_SEQLEN);
  }
  if (problem->batch_k > MAX_TILES)
    return set_error(FA3_UNSUPPORTED,
                     "key has %" PRId64 " entries or pages: the CUDA kernels take %d",
                     problem->batch_k, MAX_TILES);
  return FA3_OK;
}
