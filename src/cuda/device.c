#include "cuda/device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

enum { MAX_DEVICES = 64 };

static struct cuda_device devices[MAX_DEVICES];
static atomic_bool ready[MAX_DEVICES];

/* Guards loading. A cubin is loaded once, for all devices and contexts. */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static CUlibrary libraries[KERNELS];

int32_t cuda_device_count(void) {
  const struct cuda_driver *driver;
  int count = 0;
  if (cuda_driver_get(&driver) || driver->cuDeviceGetCount(&count) != CUDA_SUCCESS) return 0;
  return count;
}

/* The GPU of that index if the driver shows it, of any kind. */
static fa3_status find_device(int32_t index, const struct cuda_driver **driver, CUdevice *device) {
  TRY(cuda_driver_get(driver));
  int32_t count = cuda_device_count();
  if (count == 0)
    return set_error(FA3_NO_HOPPER_GPU,
                     "the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES set to hide it?): "
                     "libfa3 needs a Hopper GPU (H100, H200), or the CPU");
  if (index >= count)
    return set_error(FA3_INVALID_DEVICE, "device.index is %d: the driver shows %d GPUs", index,
                     count);
  TRY_CUDA(*driver, cuDeviceGet, device, index);
  return FA3_OK;
}

static fa3_status compute_capability(const struct cuda_driver *driver, CUdevice device, int *major,
                                     int *minor) {
  TRY_CUDA(driver, cuDeviceGetAttribute, major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
           device);
  TRY_CUDA(driver, cuDeviceGetAttribute, minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
           device);
  return FA3_OK;
}

fa3_status cuda_device_info(int32_t index, fa3_device_info *info) {
  const struct cuda_driver *driver;
  CUdevice device = 0;
  TRY(find_device(index, &driver, &device));
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  size_t bytes;
  TRY(compute_capability(driver, device, &major, &minor));
  TRY_CUDA(driver, cuDeviceGetAttribute, &multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
           device);
  TRY_CUDA(driver, cuDeviceTotalMem, &bytes, device);
  TRY_CUDA(driver, cuDeviceGetName, info->name, sizeof info->name, device);
  snprintf(info->level, sizeof info->level, "sm_%d%d%s", major, minor, major == 9 ? "a" : "");
  info->units = multiprocessors;
  info->memory_bytes = bytes;
  return FA3_OK;
}

/* Whether the build, the driver and the GPU go together. */
static fa3_status check_usable(int32_t index, const struct cuda_driver *driver, CUdevice device,
                               const fa3_device_info *info) {
  int major = 0;
  int minor = 0;
  TRY(compute_capability(driver, device, &major, &minor));
  if (!kernels_for(info->level))
    return set_error(FA3_NO_HOPPER_GPU,
                     "GPU %d is %s of compute capability %d.%d: libfa3's kernels need a Hopper GPU "
                     "(H100, H200; 9.0); use another device, or the CPU",
                     index, info->name, major, minor);
  if (!kernels_compiled())
    return set_error(FA3_UNSUPPORTED,
                     "GPU %d, %s, could be used, but this build of libfa3 has no CUDA kernels (it "
                     "was made without nvcc); use the CPU",
                     index, info->name);
  if (driver->version < kernels_cuda_version())
    return set_error(FA3_DRIVER_TOO_OLD,
                     "the NVIDIA driver brings CUDA %d.%d: this build's kernels need a driver for "
                     "CUDA %d.0 or newer",
                     driver->version / 1000, driver->version % 1000 / 10,
                     kernels_cuda_version() / 1000);
  if (index >= MAX_DEVICES)
    return set_error(FA3_UNSUPPORTED, "device.index is %d: libfa3 uses the first %d GPUs", index,
                     MAX_DEVICES);
  return FA3_OK;
}

fa3_status cuda_device_check(int32_t index) {
  const struct cuda_driver *driver;
  CUdevice device = 0;
  fa3_device_info info = {0};
  TRY(find_device(index, &driver, &device));
  TRY(cuda_device_info(index, &info));
  return check_usable(index, driver, device, &info);
}

/* A function of a loaded library, also loaded into the current context, so that no launch has to.
 */
static fa3_status get_function(const struct cuda_driver *driver, CUlibrary library,
                               const char *name, CUkernel *entry) {
  CUfunction function;
  TRY_CUDA(driver, cuLibraryGetKernel, entry, library, name);
  TRY_CUDA(driver, cuKernelGetFunction, &function, *entry);
  if (driver->cuFuncLoad) TRY_CUDA(driver, cuFuncLoad, function);
  return FA3_OK;
}

static fa3_status load_kernel(struct cuda_device *device, int32_t k) {
  const struct cuda_driver *driver = device->driver;
  const struct kernel *kernel = &kernels[k];
  CUkernel *entries = device->entries[k];
  if (!libraries[k])
    TRY_CUDA(driver, cuLibraryLoadData, &libraries[k], kernel->fatbin, NULL, NULL, 0, NULL, NULL,
             0);
  for (int e = 0; e < KERNEL_ENTRIES && kernel->kind->entries[e]; e++)
    TRY(get_function(driver, libraries[k], kernel->kind->entries[e], &entries[e]));
  const int shared_bytes = kernel_shared_limit(kernel);
  for (int e = 0; shared_bytes && e <= kernel->kind->others_with_shared; e++)
    TRY_CUDA(driver, cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
             shared_bytes, entries[e], device->device);
  for (int e = 0; kernel->kind->large_clusters && e <= kernel->kind->others_with_shared; e++)
    TRY_CUDA(driver, cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1,
             entries[e], device->device);
  return FA3_OK;
}

/* Those of the device's architecture, with its primary context current. */
static fa3_status load_kernels(struct cuda_device *device) {
  for (int32_t k = 0; k < KERNELS; k++)
    if (!strcmp(kernels[k].architecture, device->architecture)) TRY(load_kernel(device, k));
  return FA3_OK;
}

/* Twice a clock a bit comes on each line. A driver that does not say means an H100's. */
static int find_bandwidth(const struct cuda_device *device) {
  const struct cuda_driver *driver = device->driver;
  int clock = 0, width = 0;
  if (driver->cuDeviceGetAttribute(&clock, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device->device) ||
      driver->cuDeviceGetAttribute(&width, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
                                   device->device) ||
      clock <= 0 || width <= 0)
    return 3352;
  return (int)(2e-6 * clock * width / 8);
}

/* What a variable of the environment says: 0 or 1. */
static fa3_status read_switch(const char *name, bool otherwise, bool *on) {
  const char *value = getenv(name);
  *on = value ? !strcmp(value, "1") : otherwise;
  if (!value || *on || !strcmp(value, "0")) return FA3_OK;
  return set_error(FA3_INVALID_ENVIRONMENT, "%s is \"%.40s\": expected 0 or 1", name, value);
}

static fa3_status load_device(int32_t index, struct cuda_device *device) {
  fa3_device_info info = {0};
  TRY(find_device(index, &device->driver, &device->device));
  TRY(cuda_device_info(index, &info));
  TRY(cuda_device_check(index));
  TRY(read_switch("FA3_CHECK_DEVICE", false, &device->checks));
  TRY(read_switch("FA3_DEPENDENT_LAUNCH", true, &device->dependent));
  device->bandwidth = find_bandwidth(device);
  device->multiprocessors = info.units;
  memcpy(device->architecture, info.level, sizeof device->architecture);
  /* Kept: the kernels stay loaded until the process ends. */
  if (!device->primary)
    TRY_CUDA(device->driver, cuDevicePrimaryCtxRetain, &device->primary, device->device);
  TRY_CUDA(device->driver, cuCtxPushCurrent, device->primary);
  fa3_status status = load_kernels(device);
  CUcontext popped;
  device->driver->cuCtxPopCurrent(&popped);
  return status;
}

/* Loading allocates, which would end a capture that is under way on this thread or beside it, did
 * not the relaxed mode vouch for it. */
static fa3_status load_relaxed(int32_t index, struct cuda_device *device) {
  const struct cuda_driver *driver;
  TRY(cuda_driver_get(&driver));
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool exchanged = driver->cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
  fa3_status status = load_device(index, device);
  if (exchanged) driver->cuThreadExchangeStreamCaptureMode(&mode);
  return status;
}

fa3_status cuda_device_get(int32_t index, const struct cuda_device **device) {
  if (index < MAX_DEVICES && atomic_load_explicit(&ready[index], memory_order_acquire)) {
    *device = &devices[index];
    return FA3_OK;
  }
  /* Beyond the table there is nothing to load, only to refuse. */
  static struct cuda_device none;
  pthread_mutex_lock(&loading);
  fa3_status status = load_relaxed(index, index < MAX_DEVICES ? &devices[index] : &none);
  if (status == FA3_OK) {
    atomic_store_explicit(&ready[index], true, memory_order_release);
    *device = &devices[index];
  }
  pthread_mutex_unlock(&loading);
  return status;
}

CUresult cuda_kernel_variable(const struct cuda_driver *driver, const struct kernel *kernel,
                              const char *name, CUdeviceptr *address) {
  size_t bytes;
  return driver->cuLibraryGetGlobal(address, &bytes, libraries[kernel - kernels], name);
}
