/* The NVIDIA driver, found at run time: what we use of the CUDA driver API, declared here so that
 * no CUDA header or library is needed to build or to run. */
#ifndef FA3_SRC_CUDA_DRIVER_H
#define FA3_SRC_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "fa3.h"

/* CUDA driver API: "Data types used by CUDA driver". */
typedef int32_t CUresult;
typedef int32_t CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUfunc_st *CUfunction; /* the driver takes a CUkernel in its place */

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_CONTEXT = 201
};
enum {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,       /* kHz */
  CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37, /* bits */
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
};
enum { CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { CU_MEMORYTYPE_HOST = 1 };
enum {
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
};
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum { CU_DEV_RESOURCE_TYPE_SM = 1 };
enum {
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
};
enum { CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2, CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };

/* Streams that belong to whatever context is current. */
#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

enum {
  CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
  CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
};
struct CUlaunchAttribute {
  int32_t id;
  int32_t padding;
  int32_t value[16];
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  struct CUlaunchAttribute *attributes;
  unsigned attribute_count;
};

/* The first version of CUdevResource, with room for the driver to write. */
struct CUdevResource {
  int32_t type;
  char padding[92];
  unsigned sm_count;
  char rest[156];
};

struct cuda_driver {
  int32_t version; /* 1000 * major + 10 * minor of the CUDA that it brings */
#define FUNCTION(name, ...) CUresult (*name)(__VA_ARGS__);
#include "cuda/driver.def"
  /* From CUDA 12.4 on, else null: contexts then have the whole GPU, functions load in full. */
  CUresult (*cuCtxGetDevResource)(CUcontext context, struct CUdevResource *resource, int type);
  CUresult (*cuFuncLoad)(CUfunction function);
};

/* The driver, loaded once per process. FA3_NO_DRIVER or FA3_DRIVER_TOO_OLD, with a message, on
 * every call where it can't be had. */
fa3_status cuda_driver_get(const struct cuda_driver **driver);

/* A message that names the driver's function and the error that it gave. */
fa3_status cuda_error(const struct cuda_driver *driver, const char *call, CUresult result);

/* Leaves the function if a driver's function fails. */
#define TRY_CUDA(driver, function, ...)                               \
  do {                                                                \
    CUresult try_result = (driver)->function(__VA_ARGS__);            \
    if (try_result) return cuda_error(driver, #function, try_result); \
  } while (0)

#endif
