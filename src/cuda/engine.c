/* The CUDA engine: today it finds the GPU and says what is missing; no kernels are compiled in. */
#include "engine.h"

#include <stdio.h>

#include "cuda/driver.h"
#include "error.h"

static fa3_status device_error(const struct cuda_driver *driver, const char *call,
                               CUresult result) {
  const char *name = NULL;
  driver->cuGetErrorName(result, &name);
  return set_error(FA3_DEVICE_ERROR, "%s gave %s (%d)", call, name ? name : "an error", result);
}

static int32_t device_count(void) {
  const struct cuda_driver *driver;
  int count = 0;
  if (cuda_driver_get(&driver) || driver->cuDeviceGetCount(&count) != CUDA_SUCCESS) return 0;
  return count;
}

static fa3_status find_device(int32_t index, const struct cuda_driver **driver, CUdevice *device) {
  TRY(cuda_driver_get(driver));
  int32_t count = device_count();
  if (count == 0)
    return set_error(FA3_NO_HOPPER_GPU,
                     "the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES set to hide it?): "
                     "libfa3 needs a Hopper GPU (H100, H200), or the CPU");
  if (index >= count)
    return set_error(FA3_INVALID_DEVICE, "device.index is %d: the driver shows %d GPUs", index,
                     count);
  CUresult result = (*driver)->cuDeviceGet(device, index);
  return result ? device_error(*driver, "cuDeviceGet", result) : FA3_OK;
}

static fa3_status get_attribute(const struct cuda_driver *driver, CUdevice device, int attribute,
                                int *value) {
  CUresult result = driver->cuDeviceGetAttribute(value, attribute, device);
  return result ? device_error(driver, "cuDeviceGetAttribute", result) : FA3_OK;
}

static fa3_status compute_capability(const struct cuda_driver *driver, CUdevice device, int *major,
                                     int *minor) {
  TRY(get_attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, major));
  return get_attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, minor);
}

static fa3_status device_info(int32_t index, fa3_device_info *info) {
  const struct cuda_driver *driver;
  CUdevice device = 0;
  TRY(find_device(index, &driver, &device));
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  TRY(compute_capability(driver, device, &major, &minor));
  TRY(get_attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &multiprocessors));
  size_t bytes;
  CUresult result = driver->cuDeviceTotalMem(&bytes, device);
  if (result) return device_error(driver, "cuDeviceTotalMem", result);
  result = driver->cuDeviceGetName(info->name, sizeof info->name, device);
  if (result) return device_error(driver, "cuDeviceGetName", result);
  snprintf(info->level, sizeof info->level, "sm_%d%d", major, minor);
  info->units = multiprocessors;
  info->memory_bytes = bytes;
  return FA3_OK;
}

static fa3_status prepare(int32_t index) {
  const struct cuda_driver *driver;
  CUdevice device = 0;
  TRY(find_device(index, &driver, &device));
  fa3_device_info info = {0};
  TRY(device_info(index, &info));
  int major = 0;
  int minor = 0;
  TRY(compute_capability(driver, device, &major, &minor));
  if (major != 9 || minor != 0)
    return set_error(FA3_NO_HOPPER_GPU,
                     "GPU %d is %s of compute capability %d.%d: libfa3's kernels need a Hopper GPU "
                     "(H100, H200; 9.0); use another device, or the CPU",
                     index, info.name, major, minor);
  return set_error(FA3_UNSUPPORTED,
                   "GPU %d, %s, could be used, but this build of libfa3 has no CUDA kernels; use "
                   "the CPU",
                   index, info.name);
}

static fa3_status supports(const fa3_capability *capability) {
  (void)capability;
  return set_error(FA3_UNSUPPORTED, "this build of libfa3 has no CUDA kernels");
}

static int32_t kernel_count(void) {
  return 0;
}

/* Nothing passes `supports` and `kernel_count`, so what follows has no rows to fill yet. */
const struct engine cuda_engine = {
    .name = "cuda",
    .device_type = FA3_CUDA,
    .device_count = device_count,
    .device_info = device_info,
    .prepare = prepare,
    .supports = supports,
    .kernel_count = kernel_count,
};
