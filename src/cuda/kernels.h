/* The compiled kernels: kernels/variants.def as a table. */
#ifndef FA3_SRC_CUDA_KERNELS_H
#define FA3_SRC_CUDA_KERNELS_H

#include <stdbool.h>

#include "fa3.h"

struct forward_kernel {
  const char *name;
  const void *cubin; /* null in a build without kernels */
  fa3_dtype dtype;
  int32_t head_dim; /* the largest it takes, as value_head_dim */
  int32_t value_head_dim;
  bool softcap;
  int32_t warpgroups;
  int32_t tile_k;
  int32_t threads;
  int32_t chunk;
  int32_t shared_bytes;
};

struct backward_kernel {
  const char *name;
  const void *cubin;
  fa3_dtype dtype;
  int32_t head_dim;
  int32_t value_head_dim;
  bool softcap;
  int32_t tile_q;
  int32_t tile_k;
  int32_t least_queries; /* that a tile of keys meets: with fewer another kernel is faster */
  int32_t threads;
  int32_t cluster; /* blocks that share a tile */
  int32_t chunk;
  int32_t shared_bytes;
};

enum {
#define FA3_FORWARD(dtype, head_dim, value_head_dim, softcap, ...) \
  FORWARD_##dtype##_##head_dim##_##value_head_dim##_##softcap,
#include "kernels/variants.def"
  FORWARD_KERNELS
};

enum {
#define FA3_BACKWARD(dtype, head_dim, value_head_dim, softcap, ...) \
  BACKWARD_##dtype##_##head_dim##_##value_head_dim##_##softcap,
#define FA3_BACKWARD_WIDE FA3_BACKWARD
#include "kernels/variants.def"
  BACKWARD_KERNELS
};

extern const struct forward_kernel forward_kernels[FORWARD_KERNELS];
extern const struct backward_kernel backward_kernels[BACKWARD_KERNELS];

/* The helper kernels: kernels/strided.cu, and kernels/backward_prepare.cu for float16 and
 * bfloat16. */
extern const void *const strided_cubin;
extern const void *const backward_prepare_cubins[2];

/* False if this build has no kernels (it was made without nvcc). */
bool kernels_compiled(void);

/* The CUDA version that a driver needs to load them, as the driver counts: 1000 * major. A cubin
 * loads on every driver from its compiler's major version on (CUDA Compatibility, "Minor Version
 * Compatibility"). */
int32_t kernels_cuda_version(void);

/* The first kernel that takes such a call; -1 and an error if there is none. */
fa3_status find_forward_kernel(fa3_dtype dtype, int64_t head_dim, int64_t value_head_dim,
                               bool softcap, int32_t *kernel);

/* Likewise; a tile of keys meets `queries` queries of a head. */
fa3_status find_backward_kernel(fa3_dtype dtype, int64_t head_dim, int64_t value_head_dim,
                                bool softcap, int64_t queries, int32_t *kernel);

#endif
