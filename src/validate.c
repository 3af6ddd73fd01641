#include "validate.h"

#include <inttypes.h>
#include <string.h>

#include "error.h"

bool tensor_absent(const fa3_tensor *tensor) {
  static const fa3_tensor absent;
  return memcmp(tensor, &absent, sizeof absent) == 0;
}

bool dtype_is_float(fa3_dtype dtype) {
  return dtype == FA3_FLOAT32 || dtype == FA3_FLOAT16 || dtype == FA3_BFLOAT16 ||
         dtype == FA3_FLOAT8_E4M3;
}

bool dtype_is_wide(fa3_dtype dtype) {
  return dtype_is_float(dtype) && dtype != FA3_FLOAT8_E4M3;
}

const char *dtype_name(fa3_dtype dtype) {
  static const char *const names[] = {
      [FA3_FLOAT32] = "FA3_FLOAT32",   [FA3_FLOAT16] = "FA3_FLOAT16",
      [FA3_BFLOAT16] = "FA3_BFLOAT16", [FA3_FLOAT8_E4M3] = "FA3_FLOAT8_E4M3",
      [FA3_INT32] = "FA3_INT32",       [FA3_INT64] = "FA3_INT64"};
  return fa3_dtype_size(dtype) ? names[dtype] : "no dtype";
}

/* Offsets in bytes must fit ptrdiff_t with room to add a tile. */
static const int64_t largest_offset = INT64_MAX / 16;

/* Of an expanded tensor, or one without elements, the extents may multiply to more than memory
 * holds; what is counted by them must not overflow. */
static fa3_status check_count(const char *name, const fa3_tensor *tensor) {
  int64_t count = 1;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->shape[d] > 1 &&
        (__builtin_mul_overflow(count, tensor->shape[d], &count) || count > largest_offset))
      return set_error(FA3_INVALID_SHAPE,
                       "%s.shape[%d] is %" PRId64 ": the number of elements overflows", name, d,
                       tensor->shape[d]);
  }
  return FA3_OK;
}

static fa3_status check_reach(const char *name, const fa3_tensor *tensor) {
  int64_t reach = 0;
  for (int d = 0; d < tensor->rank; d++) {
    if (tensor->shape[d] == 0) return FA3_OK;
    int64_t step;
    if (__builtin_mul_overflow(tensor->shape[d] - 1, tensor->strides[d], &step) ||
        __builtin_add_overflow(reach, step, &reach) || reach > largest_offset)
      return set_error(FA3_INVALID_STRIDE,
                       "%s.strides[%d] is %" PRId64 " with shape[%d] = %" PRId64
                       ": the last element's offset overflows",
                       name, d, tensor->strides[d], d, tensor->shape[d]);
  }
  return FA3_OK;
}

fa3_status check_strided_tensor(const char *name, const fa3_tensor *tensor, int32_t rank) {
  if (tensor->rank != rank)
    return set_error(FA3_INVALID_SHAPE, "%s.rank is %" PRId32 ": expected %" PRId32, name,
                     tensor->rank, rank);
  for (int i = 0; i < 6; i++)
    if (tensor->reserved[i])
      return set_error(FA3_INVALID_RESERVED, "%s.reserved[%d] is %" PRIu64 ": expected 0", name, i,
                       tensor->reserved[i]);
  for (int d = 0; d < rank; d++) {
    if (tensor->shape[d] < 0 || tensor->shape[d] > MAX_EXTENT)
      return set_error(FA3_INVALID_SHAPE, "%s.shape[%d] is %" PRId64 ": expected 0 to 2^48", name,
                       d, tensor->shape[d]);
    if (tensor->strides[d] < 0)
      return set_error(FA3_INVALID_STRIDE, "%s.strides[%d] is %" PRId64 ": expected 0 or more",
                       name, d, tensor->strides[d]);
  }
  for (int d = rank; d < 4; d++) {
    if (tensor->shape[d])
      return set_error(FA3_INVALID_SHAPE,
                       "%s.shape[%d] is %" PRId64 ": expected 0 beyond rank %" PRId32, name, d,
                       tensor->shape[d], rank);
    if (tensor->strides[d])
      return set_error(FA3_INVALID_STRIDE,
                       "%s.strides[%d] is %" PRId64 ": expected 0 beyond rank %" PRId32, name, d,
                       tensor->strides[d], rank);
  }
  TRY(check_count(name, tensor));
  return check_reach(name, tensor);
}

fa3_status check_tensor(const char *name, const fa3_tensor *tensor, int32_t rank) {
  TRY(check_strided_tensor(name, tensor, rank));
  const int last = rank - 1;
  if (tensor->shape[last] > 1 && tensor->strides[last] != 1)
    return set_error(FA3_INVALID_STRIDE,
                     "%s.strides[%d] is %" PRId64 ": expected 1, the last dimension is contiguous",
                     name, last, tensor->strides[last]);
  return FA3_OK;
}

fa3_status check_output_strides(const char *name, const fa3_tensor *tensor) {
  /* Dimensions by rising stride: each must step over all that the smaller ones span. */
  bool done[4] = {false};
  int64_t span = 1;
  for (int d = 0; d < tensor->rank; d++)
    if (tensor->shape[d] == 0) return FA3_OK;
  for (int n = 0; n < tensor->rank; n++) {
    int smallest = -1;
    for (int d = 0; d < tensor->rank; d++)
      if (!done[d] && (smallest < 0 || tensor->strides[d] <= tensor->strides[smallest]))
        smallest = d;
    done[smallest] = true;
    if (tensor->shape[smallest] == 1) continue;
    if (tensor->strides[smallest] < span)
      return set_error(FA3_INVALID_STRIDE,
                       "%s.strides[%d] is %" PRId64
                       ": elements of an output overlap, expected at "
                       "least %" PRId64,
                       name, smallest, tensor->strides[smallest], span);
    span += (tensor->shape[smallest] - 1) * tensor->strides[smallest];
  }
  return FA3_OK;
}

fa3_status check_float(const char *name, const fa3_tensor *tensor) {
  if (dtype_is_float(tensor->dtype)) return FA3_OK;
  return set_error(FA3_INVALID_DTYPE,
                   "%s.dtype is %" PRId32
                   " (%s): expected FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16 or "
                   "FA3_FLOAT8_E4M3",
                   name, tensor->dtype, dtype_name(tensor->dtype));
}

fa3_status check_wide(const char *name, const fa3_tensor *tensor) {
  if (dtype_is_wide(tensor->dtype)) return FA3_OK;
  return set_error(FA3_INVALID_DTYPE,
                   "%s.dtype is %" PRId32
                   " (%s): expected FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16",
                   name, tensor->dtype, dtype_name(tensor->dtype));
}

fa3_status check_dtype(const char *name, const fa3_tensor *tensor, fa3_dtype expected) {
  if (tensor->dtype == expected) return FA3_OK;
  return set_error(FA3_INVALID_DTYPE, "%s.dtype is %" PRId32 " (%s): expected %s", name,
                   tensor->dtype, dtype_name(tensor->dtype), dtype_name(expected));
}

fa3_status check_same_dtype(const char *name, const fa3_tensor *tensor, const char *whose,
                            fa3_dtype expected) {
  if (tensor->dtype == expected) return FA3_OK;
  return set_error(FA3_INVALID_DTYPE, "%s.dtype is %" PRId32 " (%s): expected %s's, %s", name,
                   tensor->dtype, dtype_name(tensor->dtype), whose, dtype_name(expected));
}

fa3_status check_computed_dtype(const char *name, const fa3_tensor *tensor, const char *whose,
                                fa3_dtype expected) {
  if (tensor->dtype == FA3_FLOAT32) return FA3_OK;
  if (expected == FA3_FLOAT8_E4M3) {
    if (dtype_is_wide(tensor->dtype)) return FA3_OK;
    return set_error(FA3_INVALID_DTYPE,
                     "%s.dtype is %" PRId32
                     " (%s): with %s of FA3_FLOAT8_E4M3 expected FA3_FLOAT32, FA3_FLOAT16 or "
                     "FA3_BFLOAT16",
                     name, tensor->dtype, dtype_name(tensor->dtype), whose);
  }
  if (tensor->dtype == expected || expected == FA3_FLOAT32)
    return check_same_dtype(name, tensor, whose, expected);
  return set_error(FA3_INVALID_DTYPE,
                   "%s.dtype is %" PRId32 " (%s): expected %s's, %s, or FA3_FLOAT32", name,
                   tensor->dtype, dtype_name(tensor->dtype), whose, dtype_name(expected));
}

fa3_status check_pointer(const char *name, const void *data, fa3_dtype dtype, bool empty) {
  if (empty) return FA3_OK;
  if (!data) return set_error(FA3_INVALID_POINTER, "%s.data is null", name);
  if ((uintptr_t)data % fa3_dtype_size(dtype))
    return set_error(FA3_INVALID_POINTER, "%s.data is %p: expected a multiple of %zu bytes", name,
                     data, fa3_dtype_size(dtype));
  return FA3_OK;
}
