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
enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100 };
enum {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
};

struct cuda_driver {
  int32_t version; /* 1000 * major + 10 * minor of the CUDA that it brings */
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int *version);
  CUresult (*cuGetErrorName)(CUresult error, const char **name);
  CUresult (*cuDeviceGetCount)(int *count);
  CUresult (*cuDeviceGet)(CUdevice *device, int ordinal);
  CUresult (*cuDeviceGetName)(char *name, int length, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int *value, int attribute, CUdevice device);
  CUresult (*cuDeviceTotalMem)(size_t *bytes, CUdevice device);
};

/* The driver, loaded once per process. FA3_NO_DRIVER or FA3_DRIVER_TOO_OLD, with a message, on
 * every call where it can't be had. */
fa3_status cuda_driver_get(const struct cuda_driver **driver);

#endif
