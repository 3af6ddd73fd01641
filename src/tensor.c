/* Making tensor descriptors. */
#include <inttypes.h>
#include <stdbool.h>

#include "error.h"
#include "fa3.h"

size_t fa3_dtype_size(fa3_dtype dtype) {
  static const uint8_t sizes[] = {[FA3_FLOAT8_E4M3] = 1, [FA3_FLOAT16] = 2, [FA3_BFLOAT16] = 2,
                                  [FA3_FLOAT32] = 4,     [FA3_INT32] = 4,   [FA3_INT64] = 8};
  return dtype > 0 && dtype < (fa3_dtype)sizeof sizes ? sizes[dtype] : 0;
}

/* With the strides of a contiguous tensor. A shape whose strides overflow is refused when the
 * tensor is used; wrapping here only keeps the arithmetic defined. */
static fa3_tensor contiguous(fa3_tensor tensor) {
  uint64_t stride = 1;
  for (int d = tensor.rank - 1; d >= 0; d--) {
    tensor.strides[d] = (int64_t)stride;
    stride *= (uint64_t)tensor.shape[d];
  }
  return tensor;
}

fa3_tensor fa3_dense(const void *data, fa3_dtype dtype, int64_t batch, int64_t seqlen,
                     int64_t heads, int64_t head_dim) {
  return contiguous((fa3_tensor){
      .data = (void *)data, .dtype = dtype, .rank = 4, .shape = {batch, seqlen, heads, head_dim}});
}

fa3_tensor fa3_packed(const void *data, fa3_dtype dtype, int64_t total, int64_t heads,
                      int64_t head_dim) {
  return contiguous((fa3_tensor){
      .data = (void *)data, .dtype = dtype, .rank = 3, .shape = {total, heads, head_dim}});
}

fa3_tensor fa3_vector(const void *data, fa3_dtype dtype, int64_t extent) {
  return contiguous(
      (fa3_tensor){.data = (void *)data, .dtype = dtype, .rank = 1, .shape = {extent}});
}

fa3_tensor fa3_lse(const void *data, int64_t batch, int64_t heads, int64_t seqlen) {
  return contiguous((fa3_tensor){
      .data = (void *)data, .dtype = FA3_FLOAT32, .rank = 3, .shape = {batch, heads, seqlen}});
}

fa3_tensor fa3_packed_lse(const void *data, int64_t heads, int64_t total) {
  return contiguous(
      (fa3_tensor){.data = (void *)data, .dtype = FA3_FLOAT32, .rank = 2, .shape = {heads, total}});
}

/* The stable part of DLPack's ABI (dlpack.h, version 1.x), declared here so that callers need no
 * header of ours beyond fa3.h and we need none of theirs. */
struct dlpack_tensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t *shape;
  int64_t *strides; /* null: contiguous */
  uint64_t byte_offset;
};

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2, DLPACK_CUDA_HOST = 3, DLPACK_CUDA_MANAGED = 13 };
enum { DLPACK_INT = 0, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_FLOAT8_E4M3FN = 10 };

static fa3_dtype dtype_from_dlpack(int code, int bits, int lanes) {
  if (lanes != 1) return 0;
  if (code == DLPACK_FLOAT && bits == 32) return FA3_FLOAT32;
  if (code == DLPACK_FLOAT && bits == 16) return FA3_FLOAT16;
  if (code == DLPACK_BFLOAT && bits == 16) return FA3_BFLOAT16;
  if (code == DLPACK_FLOAT8_E4M3FN && bits == 8) return FA3_FLOAT8_E4M3;
  if (code == DLPACK_INT && bits == 32) return FA3_INT32;
  if (code == DLPACK_INT && bits == 64) return FA3_INT64;
  return 0;
}

/* The names of float64 and of the other 8-bit formats, or an empty one. */
static const char *foreign_dtype(int code, int bits) {
  static const char *const names[] = {
      [7] = " (E3M4)",  [8] = " (E4M3, IEEE)", [9] = " (E4M3B11FNUZ)", [11] = " (E4M3FNUZ)",
      [12] = " (E5M2)", [13] = " (E5M2FNUZ)",  [14] = " (E8M0FNU)"};
  const int count = sizeof names / sizeof *names;
  if (code == DLPACK_FLOAT && bits == 64) return " (float64)";
  return code >= 0 && code < count && names[code] ? names[code] : "";
}

fa3_status fa3_tensor_from_dlpack(const void *dl_tensor, fa3_tensor *tensor) {
  const struct dlpack_tensor *source = dl_tensor;
  if (!source) return set_error(FA3_INVALID_POINTER, "dl_tensor is null");
  if (!tensor) return set_error(FA3_INVALID_POINTER, "tensor is null");
  if (source->device_type != DLPACK_CPU && source->device_type != DLPACK_CUDA &&
      source->device_type != DLPACK_CUDA_HOST && source->device_type != DLPACK_CUDA_MANAGED)
    return set_error(FA3_INVALID_DEVICE,
                     "dl_tensor's device type is %d: expected the CPU's (1) or CUDA's (2, 3, 13)",
                     source->device_type);
  fa3_dtype dtype = dtype_from_dlpack(source->dtype_code, source->dtype_bits, source->dtype_lanes);
  if (!dtype)
    return set_error(FA3_INVALID_DTYPE,
                     "dl_tensor's dtype has code %d%s, %d bits and %d lanes: expected float32, "
                     "float16, bfloat16 or E4M3 (fn), or int32 or int64 of integers, of one lane",
                     source->dtype_code, foreign_dtype(source->dtype_code, source->dtype_bits),
                     source->dtype_bits, source->dtype_lanes);
  if (source->ndim < 1 || source->ndim > 4)
    return set_error(FA3_INVALID_SHAPE, "dl_tensor has %d dimensions: expected 1 to 4",
                     source->ndim);
  if (!source->shape) return set_error(FA3_INVALID_POINTER, "dl_tensor's shape is null");

  fa3_tensor view = {.dtype = dtype, .rank = source->ndim};
  if (source->data) {
    uintptr_t first; /* of any offset, so that what is wrong with it is no overflow here */
    if (__builtin_add_overflow((uintptr_t)source->data, source->byte_offset, &first))
      return set_error(FA3_INVALID_POINTER,
                       "dl_tensor's byte_offset is %" PRIu64 ": it leads out of memory",
                       source->byte_offset);
    view.data = (void *)first;
  }
  bool empty = false;
  for (int d = 0; d < source->ndim; d++) {
    view.shape[d] = source->shape[d];
    empty |= source->shape[d] == 0;
  }
  view = contiguous(view);
  if (source->strides && !empty)
    for (int d = 0; d < source->ndim; d++) view.strides[d] = source->strides[d];
  *tensor = view;
  return FA3_OK;
}
