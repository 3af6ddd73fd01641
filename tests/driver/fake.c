/* A libcuda.so.1 without a GPU, whose answers come from the environment:
 *   FAKE_CUDA_VERSION   cuDriverGetVersion; 0: it fails
 *   FAKE_CUDA_INIT      what cuInit returns
 *   FAKE_CUDA_MISSING   a function that cuGetProcAddress does not find
 *   FAKE_CUDA_FAILING   a function that returns 999
 *   FAKE_CUDA_GPUS      compute capabilities, e.g. "80 90" */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, NO_DEVICE = 100, INVALID_DEVICE = 101, UNKNOWN = 999 };

static int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? (int)strtol(text, NULL, 10) : otherwise;
}

static int failing(const char *function) {
  const char *name = getenv("FAKE_CUDA_FAILING");
  return name && !strcmp(name, function) ? UNKNOWN : SUCCESS;
}

/* The capabilities of the GPUs, 80 or 90; returns how many there are. */
static int list_gpus(int capabilities[8]) {
  const char *text = getenv("FAKE_CUDA_GPUS");
  int count = 0;
  while (text && *text && count < 8) {
    char *end;
    capabilities[count++] = (int)strtol(text, &end, 10);
    text = end;
  }
  return count;
}

EXPORT int32_t cuDriverGetVersion(int *version);
EXPORT int fake_thread_is_clean(void);
EXPORT int32_t cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                                   int *result);

int32_t cuDriverGetVersion(int *version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return *version ? SUCCESS : UNKNOWN;
}

static int32_t init(unsigned flags) {
  (void)flags;
  int capabilities[8];
  return number("FAKE_CUDA_INIT", list_gpus(capabilities) ? SUCCESS : NO_DEVICE);
}

static int32_t get_error_name(int32_t error, const char **name) {
  *name = error == UNKNOWN ? "CUDA_ERROR_UNKNOWN" : NULL;
  return *name ? SUCCESS : 1;
}

static int32_t device_get_count(int *count) {
  int capabilities[8];
  *count = list_gpus(capabilities);
  return failing("cuDeviceGetCount");
}

static int32_t device_get(int32_t *device, int ordinal) {
  int capabilities[8];
  if (ordinal < 0 || ordinal >= list_gpus(capabilities)) return INVALID_DEVICE;
  *device = ordinal;
  return failing("cuDeviceGet");
}

static int32_t device_get_name(char *name, int length, int32_t device) {
  int capabilities[8];
  list_gpus(capabilities);
  snprintf(name, (size_t)length, "Fake GPU %d of sm_%d", device, capabilities[device]);
  return failing("cuDeviceGetName");
}

static int32_t device_get_attribute(int *value, int attribute, int32_t device) {
  int capabilities[8];
  list_gpus(capabilities);
  if (attribute == 16)
    *value = 132;
  else if (attribute == 75)
    *value = capabilities[device] / 10;
  else if (attribute == 76)
    *value = capabilities[device] % 10;
  else
    return 1;
  return failing("cuDeviceGetAttribute");
}

static int32_t device_total_mem(size_t *bytes, int32_t device) {
  (void)device;
  *bytes = (size_t)80 << 30;
  return failing("cuDeviceTotalMem");
}

/* One context, the primary one of every GPU; what is current, and how the thread captures. */
static char primary;
static _Thread_local int depth;
static _Thread_local int capture_mode;

static int32_t context_retain(void **context, int32_t device) {
  (void)device;
  *context = &primary;
  return failing("cuDevicePrimaryCtxRetain");
}

static int32_t context_current(void **context) {
  *context = depth ? &primary : NULL;
  return failing("cuCtxGetCurrent");
}

static int32_t context_push(void *context) {
  (void)context;
  int result = failing("cuCtxPushCurrent");
  if (!result) depth++;
  return result;
}

static int32_t context_pop(void **context) {
  *context = &primary;
  depth--;
  return SUCCESS;
}

static int32_t exchange_capture_mode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return SUCCESS;
}

/* What a call must leave as it found it. */
int fake_thread_is_clean(void) {
  return depth == 0 && capture_mode == 0;
}

static int32_t pointer_attributes(unsigned count, const int *attributes, void **values,
                                  uint64_t pointer) {
  (void)pointer;
  for (unsigned i = 0; i < count; i++)
    *(int *)values[i] = attributes[i] == 2 ? 2 : 0; /* memory of GPU 0 */
  return failing("cuPointerGetAttributes");
}

static int32_t library_load(void **library) {
  *library = &primary;
  return failing("cuLibraryLoadData");
}

static int32_t library_get_kernel(void **kernel) {
  *kernel = &primary;
  return failing("cuLibraryGetKernel");
}

static int32_t kernel_get_function(void **function) {
  *function = &primary;
  return failing("cuKernelGetFunction");
}

static int32_t kernel_set_attribute(void) {
  return failing("cuKernelSetAttribute");
}

static int32_t func_load(void) {
  return failing("cuFuncLoad");
}

static int32_t tensor_map_encode(void) {
  return failing("cuTensorMapEncodeTiled");
}

static int32_t memset_async(void) {
  return failing("cuMemsetD32Async");
}

static int32_t launch(void) {
  return failing("cuLaunchKernelEx");
}

static int32_t not_there(void) {
  return UNKNOWN;
}

int32_t cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                            int *result) {
  (void)version;
  (void)flags;
  void (*const not_there_address)(void) = (void (*)(void))not_there;
  const struct {
    const char *name;
    void (*address)(void);
  } functions[] = {
      {"cuInit", (void (*)(void))init},
      {"cuDriverGetVersion", (void (*)(void))cuDriverGetVersion},
      {"cuGetErrorName", (void (*)(void))get_error_name},
      {"cuDeviceGetCount", (void (*)(void))device_get_count},
      {"cuDeviceGet", (void (*)(void))device_get},
      {"cuDeviceGetName", (void (*)(void))device_get_name},
      {"cuDeviceGetAttribute", (void (*)(void))device_get_attribute},
      {"cuDeviceTotalMem", (void (*)(void))device_total_mem},
      {"cuDevicePrimaryCtxRetain", (void (*)(void))context_retain},
      {"cuCtxGetCurrent", (void (*)(void))context_current},
      {"cuCtxPushCurrent", (void (*)(void))context_push},
      {"cuCtxPopCurrent", (void (*)(void))context_pop},
      {"cuThreadExchangeStreamCaptureMode", (void (*)(void))exchange_capture_mode},
      {"cuPointerGetAttributes", (void (*)(void))pointer_attributes},
      {"cuLibraryLoadData", (void (*)(void))library_load},
      {"cuLibraryGetKernel", (void (*)(void))library_get_kernel},
      {"cuKernelGetFunction", (void (*)(void))kernel_get_function},
      {"cuKernelSetAttribute", (void (*)(void))kernel_set_attribute},
      {"cuFuncLoad", (void (*)(void))func_load},
      {"cuTensorMapEncodeTiled", (void (*)(void))tensor_map_encode},
      {"cuMemsetD32Async", (void (*)(void))memset_async},
      {"cuLaunchKernelEx", (void (*)(void))launch},
      {"cuCtxGetDevice", not_there_address},
      {"cuStreamGetCtx", not_there_address},
      {"cuStreamIsCapturing", not_there_address},
  };
  const char *missing = getenv("FAKE_CUDA_MISSING");
  *function = NULL;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(functions[i].name, symbol) && !(missing && !strcmp(missing, symbol)))
      memcpy(function, &functions[i].address, sizeof *function);
  *result = *function ? 0 : 1;
  return *function ? SUCCESS : 500;
}
