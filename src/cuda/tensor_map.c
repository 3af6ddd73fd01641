#include "cuda/tensor_map.h"

#include "error.h"

fa3_status make_tensor_map(const struct cuda_driver *driver, fa3_dtype dtype, int32_t chunk,
                           const char *name, const void *data, int rank,
                           const struct map_dimension *dimensions, fa3_tensor_map *map) {
  const uint64_t bytes = fa3_dtype_size(dtype);
  uint64_t extents[TENSOR_MAP_RANK];
  uint64_t strides[TENSOR_MAP_RANK]; /* in bytes, from the second dimension on */
  uint32_t box[TENSOR_MAP_RANK];
  uint32_t steps[TENSOR_MAP_RANK];
  for (int d = 0; d < rank; d++) {
    extents[d] = dimensions[d].extent > 0 ? (uint64_t)dimensions[d].extent : 1;
    box[d] = (uint32_t)dimensions[d].box;
    steps[d] = 1;
    /* A single entry's stride is never used, but has to be one that the driver takes. */
    if (d > 0) strides[d - 1] = extents[d] > 1 ? bytes * (uint64_t)dimensions[d].stride : 16;
  }
  int type = dtype == FA3_FLOAT16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
             : dtype == FA3_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  int swizzle =
      bytes * (uint64_t)chunk == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  /* What is fetched around a row of 128 bytes: where memory is the limit, an H200 is 5 to 10%
   * slower with 256 bytes of 16-bit rows. Codes are not. */
  int promotion =
      bytes == 1 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  CUresult result =
      driver->cuTensorMapEncodeTiled(map, type, (unsigned)rank, (void *)(uintptr_t)data, extents,
                                     strides, box, steps, 0, swizzle, promotion, 0);
  if (result == CUDA_SUCCESS) return FA3_OK;
  return set_error(FA3_INTERNAL_ERROR, "the driver takes no tensor map of %s (error %d)", name,
                   result);
}
