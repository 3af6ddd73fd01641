/* Tensor maps, made anew for every call: they hold pointers, extents and strides. */
#ifndef FA3_SRC_CUDA_TENSOR_MAP_H
#define FA3_SRC_CUDA_TENSOR_MAP_H

#include "cuda/driver.h"
#include "kernels/forward_params.h"

enum { TENSOR_MAP_RANK = 5 };

/* One dimension of a map: its extent, the elements to its next entry, and how many of its entries
 * a box has. The innermost comes first; its stride is 1. */
struct map_dimension {
  int64_t extent;
  int64_t stride;
  int32_t box;
};

/* Of elements of 16 bits, or codes, for shared memory in which `chunk` columns lie side by side:
 * 128 or 64 bytes, over which they are swizzled. What lies outside the tensor is read as zero. An
 * empty tensor may have any aligned address: nothing of it is read. */
fa3_status make_tensor_map(const struct cuda_driver *driver, fa3_dtype dtype, int32_t chunk,
                           const char *name, const void *data, int rank,
                           const struct map_dimension *dimensions, fa3_tensor_map *map);

#endif
