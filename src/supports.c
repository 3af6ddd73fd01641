#include "supports.h"

#include <inttypes.h>

#include "error.h"
#include "head_dim.h"
#include "validate.h"

static fa3_status check_head_dim(const char *name, int32_t head_dim, fa3_dtype dtype) {
  const int step = dtype == FA3_FLOAT8_E4M3 ? 16 : 8;
  if (head_dim >= step && head_dim <= LARGEST_HEAD_DIM && head_dim % step == 0) return FA3_OK;
  return set_error(FA3_UNSUPPORTED, "%s is %" PRId32 ": expected a multiple of %d from %d to %d",
                   name, head_dim, step, step, LARGEST_HEAD_DIM);
}

fa3_status supports_head_dims(const fa3_capability *capability) {
  const fa3_dtype dtype = capability->key_dtype;
  TRY(check_head_dim("head_dim", capability->head_dim, dtype));
  return check_head_dim("value_head_dim", capability->value_head_dim, dtype);
}

/* Of a call that copies or sums rows of any width. */
static fa3_status check_positive(const char *name, int32_t head_dim) {
  if (head_dim > 0) return FA3_OK;
  return set_error(FA3_UNSUPPORTED, "%s is %" PRId32 ": expected 1 or more", name, head_dim);
}

fa3_status supports_quantize(const fa3_capability *capability) {
  const fa3_dtype from = capability->query_dtype, to = capability->output_dtype;
  if (!dtype_is_wide(from))
    return set_error(FA3_UNSUPPORTED,
                     "input's dtype is %s: expected FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16",
                     dtype_name(from));
  if (to != FA3_FLOAT8_E4M3)
    return set_error(FA3_UNSUPPORTED, "codes' dtype is %s: expected FA3_FLOAT8_E4M3",
                     dtype_name(to));
  if (capability->head_dim < 1 || capability->head_dim > LARGEST_HEAD_DIM)
    return set_error(FA3_UNSUPPORTED, "head_dim is %" PRId32 ": expected 1 to %d",
                     capability->head_dim, LARGEST_HEAD_DIM);
  return FA3_OK;
}

fa3_status supports_append(const fa3_capability *capability) {
  const fa3_dtype fresh = capability->query_dtype, cached = capability->key_dtype;
  if (!dtype_is_float(fresh))
    return set_error(FA3_UNSUPPORTED,
                     "query_dtype, that of new_key, is %d (%s): expected FA3_FLOAT32, FA3_FLOAT16, "
                     "FA3_BFLOAT16 or FA3_FLOAT8_E4M3",
                     fresh, dtype_name(fresh));
  if ((cached != fresh && cached != FA3_FLOAT8_E4M3) || capability->value_dtype != cached)
    return set_error(FA3_UNSUPPORTED,
                     "key_dtype is %s and value_dtype is %s: expected new_key's, %s, or "
                     "FA3_FLOAT8_E4M3, for both",
                     dtype_name(cached), dtype_name(capability->value_dtype), dtype_name(fresh));
  if (cached == FA3_FLOAT8_E4M3) return supports_head_dims(capability);
  TRY(check_positive("head_dim", capability->head_dim));
  return check_positive("value_head_dim", capability->value_head_dim);
}

fa3_status supports_combine(const fa3_capability *capability) {
  if (!dtype_is_wide(capability->output_dtype))
    return set_error(FA3_UNSUPPORTED,
                     "output_dtype is %d (%s): expected FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16",
                     capability->output_dtype, dtype_name(capability->output_dtype));
  return check_positive("value_head_dim", capability->value_head_dim);
}
