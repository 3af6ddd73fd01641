/* A libcuda.so.1 without a GPU, whose answers come from the environment:
 *   FAKE_CUDA_VERSION   cuDriverGetVersion; 0: it fails
 *   FAKE_CUDA_INIT      what cuInit returns
 *   FAKE_CUDA_MISSING   a function that cuGetProcAddress does not find
 *   FAKE_CUDA_FAILING   functions that return 999, e.g. "cuDeviceGet cuDeviceGetName"
 *   FAKE_CUDA_GPUS      compute capabilities, e.g. "80 90"
 *   FAKE_CUDA_MEMORY    bytes of memory that all GPUs share
 *   FAKE_CUDA_CAPTURING 1: every stream is being captured
 * What a program still has when it ends, it is told: memory, events, a context. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake.h"

long fake_number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? strtol(text, NULL, 10) : otherwise;
}

int fake_failing(const char *function) {
  const char *names = getenv("FAKE_CUDA_FAILING");
  const size_t length = strlen(function);
  while (names && *names) {
    const size_t name = strcspn(names, " ");
    if (name == length && !strncmp(names, function, length)) return UNKNOWN;
    names += name + strspn(names + name, " ");
  }
  return SUCCESS;
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

FAKE_EXPORT int32_t cuDriverGetVersion(int *version);
FAKE_EXPORT int32_t cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                        uint64_t flags, int *result);

int32_t cuDriverGetVersion(int *version) {
  *version = (int)fake_number("FAKE_CUDA_VERSION", 13000);
  return *version ? SUCCESS : UNKNOWN;
}

static int32_t init(unsigned flags) {
  (void)flags;
  int capabilities[8];
  return (int)fake_number("FAKE_CUDA_INIT", list_gpus(capabilities) ? SUCCESS : NO_DEVICE);
}

static int32_t get_error_name(int32_t error, const char **name) {
  *name = error == UNKNOWN ? "CUDA_ERROR_UNKNOWN" : NULL;
  return *name ? SUCCESS : INVALID_VALUE;
}

static int32_t device_get_count(int *count) {
  int capabilities[8];
  *count = list_gpus(capabilities);
  return fake_failing("cuDeviceGetCount");
}

static int32_t device_get(int32_t *device, int ordinal) {
  int capabilities[8];
  if (ordinal < 0 || ordinal >= list_gpus(capabilities)) return INVALID_DEVICE;
  *device = ordinal;
  return fake_failing("cuDeviceGet");
}

static int32_t device_get_name(char *name, int length, int32_t device) {
  int capabilities[8];
  list_gpus(capabilities);
  snprintf(name, (size_t)length, "Fake GPU %d of sm_%d", device, capabilities[device]);
  return fake_failing("cuDeviceGetName");
}

static int32_t device_get_attribute(int *value, int attribute, int32_t device) {
  int capabilities[8];
  list_gpus(capabilities);
  if (attribute == 16)
    *value = 132;
  else if (attribute == 36)
    *value = 2619000;
  else if (attribute == 37)
    *value = 5120;
  else if (attribute == 75)
    *value = capabilities[device] / 10;
  else if (attribute == 76)
    *value = capabilities[device] % 10;
  else
    return INVALID_VALUE;
  return fake_failing("cuDeviceGetAttribute");
}

static int32_t device_total_mem(size_t *bytes, int32_t device) {
  (void)device;
  *bytes = (size_t)80 << 30;
  return fake_failing("cuDeviceTotalMem");
}

/* One context, the primary one of the GPU that was used last; what is current, and how the thread
 * captures. */
static char primary;
static int32_t primary_device;
static int retained;
static _Thread_local int depth;
static _Thread_local int capture_mode;

static int32_t context_retain(void **context, int32_t device) {
  primary_device = device;
  *context = &primary;
  int result = fake_failing("cuDevicePrimaryCtxRetain");
  if (!result) retained++;
  return result;
}

static int32_t context_release(int32_t device) {
  (void)device;
  return retained-- > 0 ? SUCCESS : INVALID_VALUE;
}

static int32_t context_current(void **context) {
  *context = depth ? &primary : NULL;
  return fake_failing("cuCtxGetCurrent");
}

static int32_t context_push(void *context) {
  (void)context;
  int result = fake_failing("cuCtxPushCurrent");
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

int fake_thread_is_clean(void) {
  return depth == 0 && capture_mode == 0;
}

/* The library keeps one hold of the context until the process ends. */
__attribute__((destructor)) static void check_end(void) {
  if (fake_thread_is_clean() && retained <= 1 && !fake_memory_left()) return;
  (void)fprintf(stderr, "fake driver: memory, an event or a context is left\n");
  _exit(99);
}

static int32_t pointer_attributes(unsigned count, const int *attributes, void **values,
                                  uint64_t pointer) {
  (void)pointer;
  for (unsigned i = 0; i < count; i++)
    *(int *)values[i] = attributes[i] == 2 ? 2 : primary_device; /* memory of a GPU */
  return fake_failing("cuPointerGetAttributes");
}

/* A library is the code that it was loaded from. */
static int32_t library_load(const void **library, const void *code) {
  *library = code;
  return fake_failing("cuLibraryLoadData");
}

struct kernel {
  const void *library;
  char name[64];
  unsigned shared_limit;
  unsigned cluster_limit;
};
static struct kernel kernels[512];
static int kernel_count;

static int32_t library_get_kernel(struct kernel **kernel, const void *library, const char *name) {
  if (fake_failing("cuLibraryGetKernel")) return UNKNOWN;
  for (int k = 0; k < kernel_count; k++)
    if (kernels[k].library == library && !strcmp(kernels[k].name, name)) {
      *kernel = &kernels[k];
      return SUCCESS;
    }
  if (kernel_count == sizeof kernels / sizeof *kernels) return OUT_OF_MEMORY;
  *kernel = &kernels[kernel_count++];
  (*kernel)->library = library;
  /* Of a function that was allowed no more. */
  (*kernel)->shared_limit = 48 << 10;
  (*kernel)->cluster_limit = 8;
  const int length = snprintf((*kernel)->name, sizeof(*kernel)->name, "%s", name);
  return length < (int)sizeof(*kernel)->name ? SUCCESS : OUT_OF_MEMORY;
}

const char *fake_kernel_name(int index) {
  return index < kernel_count ? kernels[index].name : NULL;
}

static int32_t kernel_get_function(void **function) {
  *function = &primary;
  return fake_failing("cuKernelGetFunction");
}

static int32_t kernel_set_attribute(int attribute, int value, struct kernel *kernel) {
  enum { MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14 };
  if (attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES) kernel->shared_limit = (unsigned)value;
  if (attribute == NON_PORTABLE_CLUSTER_SIZE_ALLOWED) kernel->cluster_limit = value ? 16 : 8;
  return fake_failing("cuKernelSetAttribute");
}

static int32_t func_load(void) {
  return fake_failing("cuFuncLoad");
}

/* What the driver API demands of a tiled map's arguments. */
static int32_t tensor_map_encode(void *map, int type, unsigned rank, void *data,
                                 const uint64_t *extents, const uint64_t *strides,
                                 const uint32_t *box, const uint32_t *steps) {
  if ((uintptr_t)map % 64 || (uintptr_t)data % 16 || type < 0 || rank < 3 || rank > 5)
    return INVALID_VALUE;
  for (unsigned d = 0; d < rank; d++)
    if (extents[d] < 1 || extents[d] > UINT64_C(1) << 32 || box[d] < 1 || box[d] > 256 ||
        steps[d] != 1 || (d > 0 && (strides[d - 1] % 16 || strides[d - 1] >= UINT64_C(1) << 40)))
      return INVALID_VALUE;
  return fake_failing("cuTensorMapEncodeTiled");
}

static char tile_counters[1 << 17];

static int32_t library_get_global(uint64_t *address, size_t *bytes) {
  *address = (uint64_t)(uintptr_t)tile_counters;
  *bytes = sizeof tile_counters;
  return fake_failing("cuLibraryGetGlobal");
}

static int32_t stream_is_capturing(void *stream, int *status) {
  (void)stream;
  *status = (int)fake_number("FAKE_CUDA_CAPTURING", 0);
  return fake_failing("cuStreamIsCapturing");
}

static int32_t stream_get_id(void *stream, uint64_t *id) {
  *id = (uint64_t)(uintptr_t)stream;
  return fake_failing("cuStreamGetId");
}

static int32_t memset_async(void) {
  return fake_failing("cuMemsetD32Async");
}

/* Tensors that a test lays out are in its own memory. */
static int32_t copy_to_host_async(void *to, uint64_t from, size_t bytes) {
  memcpy(to, (const void *)(uintptr_t)from, bytes);
  return fake_failing("cuMemcpyDtoHAsync");
}

static int32_t stream_synchronize(void) {
  return fake_failing("cuStreamSynchronize");
}

static fake_watcher *watcher;

void fake_watch(fake_watcher *its_watcher) {
  watcher = its_watcher;
}

/* As cuda.h has them. */
struct launch_attribute {
  int32_t id;
  int32_t padding;
  int32_t value[16];
};
struct launch_config {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void *stream;
  const struct launch_attribute *attributes;
  unsigned attribute_count;
};

static int32_t launch(const struct launch_config *config, const struct kernel *kernel,
                      void **params) {
  enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
  struct fake_launch seen = {.function = kernel->name,
                             .cubin = kernel->library,
                             .shared_bytes = config->shared_bytes,
                             .shared_limit = kernel->shared_limit,
                             .stream = config->stream,
                             .params = params[0]};
  memcpy(seen.grid, config->grid, sizeof seen.grid);
  memcpy(seen.block, config->block, sizeof seen.block);
  for (unsigned i = 0; i < config->attribute_count; i++) {
    const struct launch_attribute *attribute = &config->attributes[i];
    if (attribute->id == PROGRAMMATIC_STREAM_SERIALIZATION) seen.dependent = attribute->value[0];
    if (attribute->id == CLUSTER_DIMENSION) seen.cluster = (unsigned)attribute->value[0];
  }
  if (watcher) watcher(&seen);
  if (seen.shared_bytes > seen.shared_limit || seen.cluster > kernel->cluster_limit ||
      (seen.cluster && seen.grid[0] % seen.cluster))
    return INVALID_VALUE;
  for (int d = 0; d < 3; d++)
    if (!seen.grid[d] || !seen.block[d] || (d > 0 && seen.grid[d] > 65535)) return INVALID_VALUE;
  if (seen.block[0] * seen.block[1] * seen.block[2] > 1024) return INVALID_VALUE;
  fake_launch();
  return fake_failing("cuLaunchKernelEx");
}

static int32_t not_there(void) {
  return UNKNOWN;
}

int32_t cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                            int *result) {
  (void)version;
  (void)flags;
  const fake_function not_there_address = (fake_function)not_there;
  const struct {
    const char *name;
    fake_function address;
  } functions[] = {
      {"cuInit", (fake_function)init},
      {"cuDriverGetVersion", (fake_function)cuDriverGetVersion},
      {"cuGetErrorName", (fake_function)get_error_name},
      {"cuDeviceGetCount", (fake_function)device_get_count},
      {"cuDeviceGet", (fake_function)device_get},
      {"cuDeviceGetName", (fake_function)device_get_name},
      {"cuDeviceGetAttribute", (fake_function)device_get_attribute},
      {"cuDeviceTotalMem", (fake_function)device_total_mem},
      {"cuDevicePrimaryCtxRetain", (fake_function)context_retain},
      {"cuDevicePrimaryCtxRelease", (fake_function)context_release},
      {"cuCtxGetCurrent", (fake_function)context_current},
      {"cuCtxPushCurrent", (fake_function)context_push},
      {"cuCtxPopCurrent", (fake_function)context_pop},
      {"cuThreadExchangeStreamCaptureMode", (fake_function)exchange_capture_mode},
      {"cuPointerGetAttributes", (fake_function)pointer_attributes},
      {"cuLibraryLoadData", (fake_function)library_load},
      {"cuLibraryGetKernel", (fake_function)library_get_kernel},
      {"cuKernelGetFunction", (fake_function)kernel_get_function},
      {"cuKernelSetAttribute", (fake_function)kernel_set_attribute},
      {"cuFuncLoad", (fake_function)func_load},
      {"cuTensorMapEncodeTiled", (fake_function)tensor_map_encode},
      {"cuMemsetD32Async", (fake_function)memset_async},
      {"cuMemcpyDtoHAsync", (fake_function)copy_to_host_async},
      {"cuLaunchKernelEx", (fake_function)launch},
      {"cuCtxGetDevice", not_there_address},
      {"cuStreamGetCtx", not_there_address},
      {"cuStreamIsCapturing", (fake_function)stream_is_capturing},
      {"cuStreamGetId", (fake_function)stream_get_id},
      {"cuStreamSynchronize", (fake_function)stream_synchronize},
      {"cuLibraryGetGlobal", (fake_function)library_get_global},
  };
  const char *missing = getenv("FAKE_CUDA_MISSING");
  fake_function found = fake_memory_function(symbol);
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(functions[i].name, symbol)) found = functions[i].address;
  if (missing && !strcmp(missing, symbol)) found = NULL;
  memcpy(function, &found, sizeof *function);
  *result = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}
