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

/* Of 16-bit elements, for shared memory in which `chunk` columns (64 or 32) lie side by side,
 * swizzled over as many bytes; what lies outside the tensor is read as zero. An empty tensor may
 * have any aligned address: nothing of it is read.
 */
fa3_status make_tensor_map(const struct cuda_driver *driver, fa3_dtype dtype, int32_t chunk,
                           const char *name, const void *data, int rank,
                           const struct map_dimension *dimensions, fa3_tensor_map *map);

#endif
