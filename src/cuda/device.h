/* What a GPU needs before calls can run on it: found, checked and loaded once per process. */
#ifndef FA3_SRC_CUDA_DEVICE_H
#define FA3_SRC_CUDA_DEVICE_H

#include <stdbool.h>

#include "cuda/driver.h"
#include "cuda/kernels.h"

struct cuda_device {
  const struct cuda_driver *driver;
  CUcontext primary;
  CUkernel entries[KERNELS][KERNEL_ENTRIES]; /* of the kernels of its architecture */
  CUdevice device;
  int multiprocessors;
  int bandwidth;         /* of the memory, by its clock and width, in GB/s */
  bool checks;           /* lengths and pages before every call: FA3_CHECK_DEVICE */
  bool dependent;        /* launches may begin before those ahead end: FA3_DEPENDENT_LAUNCH */
  char architecture[32]; /* as variants.def has it */
};

/* Whether this build can run on that GPU; loads nothing. */
fa3_status cuda_device_check(int32_t index);

/* The GPU ready for calls; loads what is needed the first time. Safe during a stream capture, and
 * from many threads. */
fa3_status cuda_device_get(int32_t index, const struct cuda_device **device);

/* Where a loaded kernel has this variable in the current context. Not to be kept: a context that is
 * reset has it elsewhere. */
CUresult cuda_kernel_variable(const struct cuda_driver *driver, const struct kernel *kernel,
                              const char *name, CUdeviceptr *address);

int32_t cuda_device_count(void);
fa3_status cuda_device_info(int32_t index, fa3_device_info *info);

#endif
