#include "cuda.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "failure.h"

/* The CUDA that gave the functions below their parameters; fa3_prepare asks for no older driver. */
enum { CUDA_VERSION = 12000 };
enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };

typedef uint64_t device_pointer;
typedef struct CUctx_st *context_handle;
typedef struct CUevent_st *event_handle;

/* Of the CUDA driver API, each with its parameters. */
#define FUNCTIONS(FUNCTION)                                                \
  FUNCTION(cuInit, unsigned flags)                                         \
  FUNCTION(cuGetErrorName, int error, const char **name)                   \
  FUNCTION(cuDeviceGet, int *device, int ordinal)                          \
  FUNCTION(cuDevicePrimaryCtxRetain, context_handle *context, int device)  \
  FUNCTION(cuDevicePrimaryCtxRelease, int device)                          \
  FUNCTION(cuCtxPushCurrent, context_handle context)                       \
  FUNCTION(cuCtxPopCurrent, context_handle *context)                       \
  FUNCTION(cuCtxSynchronize, void)                                         \
  FUNCTION(cuMemAlloc, device_pointer *memory, size_t size)                \
  FUNCTION(cuMemFree, device_pointer memory)                               \
  FUNCTION(cuMemGetInfo, size_t *available, size_t *total)                 \
  FUNCTION(cuMemcpyHtoD, device_pointer to, const void *from, size_t size) \
  FUNCTION(cuMemcpyDtoH, void *to, device_pointer from, size_t size)       \
  FUNCTION(cuEventCreate, event_handle *event, unsigned flags)             \
  FUNCTION(cuEventDestroy, event_handle event)                             \
  FUNCTION(cuEventRecord, event_handle event, void *stream)                \
  FUNCTION(cuEventSynchronize, event_handle event)                         \
  FUNCTION(cuEventElapsedTime, float *milliseconds, event_handle start, event_handle end)

static struct {
#define FUNCTION(name, ...) int (*name)(__VA_ARGS__);
  FUNCTIONS(FUNCTION)
#undef FUNCTION
} driver;

static struct {
  bool open;
  int32_t index;
  int device;
} gpu;

/* Leaves the function if a function of the driver fails. */
#define TRY_CUDA(function, ...) TRY(check(#function, driver.function(__VA_ARGS__)))

static int check(const char *function, int result) {
  const char *name = NULL;
  if (result == SUCCESS) return 0;
  (void)driver.cuGetErrorName(result, &name);
  return fail(EXIT_FAILED, "cuda:%" PRId32 ": %s gave %s (%d)", gpu.index, function,
              name ? name : "an error", result);
}

static int load_driver(void) {
  int (*get_proc_address)(const char *name, void **function, int version, uint64_t flags,
                          int *found) = NULL;
  /* libfa3 has it open already, and keeps it so. */
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void *address = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
  if (!address) return fail(EXIT_UNSUPPORTED, "no NVIDIA driver for CUDA 12.0 or newer");
  /* ISO C has no cast from an object pointer to a function pointer; POSIX makes the bytes the same.
   */
  memcpy(&get_proc_address, &address, sizeof address);
  const struct {
    const char *name;
    void *target;
  } functions[] = {
#define FUNCTION(name, ...) {#name, &driver.name},
      FUNCTIONS(FUNCTION)
#undef FUNCTION
  };
  for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
    int found = 0;
    address = NULL;
    if (get_proc_address(functions[i].name, &address, CUDA_VERSION, 0, &found) != SUCCESS ||
        !address)
      return fail(EXIT_UNSUPPORTED, "the NVIDIA driver has no %s", functions[i].name);
    memcpy(functions[i].target, &address, sizeof address);
  }
  return 0;
}

int cuda_open(int32_t index) {
  context_handle context = NULL;
  TRY(load_driver());
  gpu.index = index;
  TRY_CUDA(cuInit, 0);
  TRY_CUDA(cuDeviceGet, &gpu.device, index);
  TRY_CUDA(cuDevicePrimaryCtxRetain, &context, gpu.device);
  int code = check("cuCtxPushCurrent", driver.cuCtxPushCurrent(context));
  if (code) (void)driver.cuDevicePrimaryCtxRelease(gpu.device);
  gpu.open = !code;
  return code;
}

void cuda_close(void) {
  context_handle context;
  if (!gpu.open) return;
  gpu.open = false;
  (void)driver.cuCtxPopCurrent(&context);
  (void)driver.cuDevicePrimaryCtxRelease(gpu.device);
}

int cuda_allocate(size_t size, const char *what, void **memory) {
  device_pointer pointer = 0;
  int result = driver.cuMemAlloc(&pointer, size ? size : 1);
  if (result == OUT_OF_MEMORY) {
    size_t available = 0;
    size_t total = 0;
    (void)driver.cuMemGetInfo(&available, &total);
    return fail(EXIT_FAILED, "cuda:%" PRId32 ": no memory for %s: %zu bytes, and %zu are free",
                gpu.index, what, size, available);
  }
  *memory = (void *)(uintptr_t)pointer;
  return check("cuMemAlloc", result);
}

void cuda_free(void *memory) {
  if (memory) (void)driver.cuMemFree((device_pointer)memory);
}

int cuda_upload(void *to, const void *from, size_t size) {
  return size ? check("cuMemcpyHtoD", driver.cuMemcpyHtoD((device_pointer)to, from, size)) : 0;
}

int cuda_download(void *to, const void *from, size_t size) {
  return size ? check("cuMemcpyDtoH", driver.cuMemcpyDtoH(to, (device_pointer)from, size)) : 0;
}

int cuda_wait(void) {
  return check("cuCtxSynchronize", driver.cuCtxSynchronize());
}

static int time_between(event_handle start, event_handle end, int (*queue)(void *context),
                        void *context, double *seconds) {
  float milliseconds = 0;
  TRY_CUDA(cuEventRecord, start, NULL);
  TRY(queue(context));
  TRY_CUDA(cuEventRecord, end, NULL);
  TRY_CUDA(cuEventSynchronize, end);
  TRY_CUDA(cuEventElapsedTime, &milliseconds, start, end);
  *seconds = milliseconds * 1e-3;
  return 0;
}

int cuda_time(int (*queue)(void *context), void *context, double *seconds) {
  event_handle start = NULL;
  event_handle end = NULL;
  TRY_CUDA(cuEventCreate, &start, 0);
  int code = check("cuEventCreate", driver.cuEventCreate(&end, 0));
  if (!code) {
    code = time_between(start, end, queue, context, seconds);
    (void)driver.cuEventDestroy(end);
  }
  (void)driver.cuEventDestroy(start);
  return code;
}
