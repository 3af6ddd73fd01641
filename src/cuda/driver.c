#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cuda/kernels.h"
#include "error.h"

/* cuGetProcAddress_v2, and the tensor maps that Hopper kernels need, are there from CUDA 12.0
 * (driver 525) on. */
#define OLDEST_CUDA 12000

static struct cuda_driver the_driver;
static fa3_status the_status;
static char the_reason[384];
static pthread_once_t once = PTHREAD_ONCE_INIT;

typedef CUresult (*get_proc_address)(const char *symbol, void **function, int cuda_version,
                                     uint64_t flags, int *query_result);

/* ISO C has no cast from an object pointer to a function pointer; POSIX makes the bytes the same.
 */
static void set_function(void *function_pointer, void *address) {
  memcpy(function_pointer, &address, sizeof address);
}

static void refuse(fa3_status status, const char *reason) {
  the_status = status;
  snprintf(the_reason, sizeof the_reason, "%s", reason);
}

static void refuse_version(int32_t version) {
  the_status = FA3_DRIVER_TOO_OLD;
  snprintf(the_reason, sizeof the_reason,
           "the NVIDIA driver brings CUDA %d.%d: libfa3 needs a driver for CUDA 12.0 or newer "
           "(525 or newer); update it, or use the CPU",
           version / 1000, version % 1000 / 10);
}

/* Null if this driver has no such function; the version fixes its parameters. */
static void *find_function(get_proc_address get, const char *name, int cuda_version) {
  void *address = NULL;
  int found = 0;
  return get(name, &address, cuda_version, 0, &found) == CUDA_SUCCESS ? address : NULL;
}

static void load(void) {
  /* Never closed: the driver keeps threads and state of its own until the process ends. */
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    refuse(
        FA3_NO_DRIVER,
        kernels_compiled()
            ? "no NVIDIA driver: libcuda.so.1 was not found; install the driver, or use the CPU"
            : "no NVIDIA driver: libcuda.so.1 was not found, and this build has no CUDA kernels "
              "(FA3_CUDA=OFF, or there was no nvcc); build it with them and install the driver, or "
              "use the CPU");
    return;
  }
  /* Present in every driver since CUDA 2.2, so it can speak for one that is too old. */
  CUresult (*driver_version)(int *version);
  set_function(&driver_version, dlsym(library, "cuDriverGetVersion"));
  int version = 0;
  if (!driver_version || driver_version(&version) != CUDA_SUCCESS) {
    refuse(FA3_NO_DRIVER, "libcuda.so.1 is there, but it does not tell its version");
    return;
  }
  get_proc_address get;
  set_function(&get, dlsym(library, "cuGetProcAddress_v2"));
  if (version < OLDEST_CUDA || !get) {
    refuse_version(version);
    return;
  }

  const struct {
    const char *name;
    void *target;
  } functions[] = {
#define FUNCTION(name, ...) {#name, &the_driver.name},
#include "cuda/driver.def"
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void *address = find_function(get, functions[i].name, OLDEST_CUDA);
    if (!address) {
      the_status = FA3_DRIVER_TOO_OLD;
      snprintf(the_reason, sizeof the_reason, "the NVIDIA driver (CUDA %d.%d) has no %s",
               version / 1000, version % 1000 / 10, functions[i].name);
      return;
    }
    set_function(functions[i].target, address);
  }
  set_function(&the_driver.cuCtxGetDevResource, find_function(get, "cuCtxGetDevResource", 12040));
  set_function(&the_driver.cuFuncLoad, find_function(get, "cuFuncLoad", 12040));
  the_driver.version = version;

  CUresult result = the_driver.cuInit(0);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NO_DEVICE) {
    const char *name = NULL;
    the_driver.cuGetErrorName(result, &name);
    the_status = FA3_NO_DRIVER;
    snprintf(the_reason, sizeof the_reason,
             "the NVIDIA driver does not start: cuInit gave %s (%d); is its kernel module loaded?",
             name ? name : "an error", result);
  }
}

fa3_status cuda_driver_get(const struct cuda_driver **driver) {
  pthread_once(&once, load);
  if (the_status) return set_error(the_status, "%s", the_reason);
  *driver = &the_driver;
  return FA3_OK;
}

fa3_status cuda_error(const struct cuda_driver *driver, const char *call, CUresult result) {
  const char *name = NULL;
  driver->cuGetErrorName(result, &name);
  return set_error(result == CUDA_ERROR_OUT_OF_MEMORY ? FA3_OUT_OF_MEMORY : FA3_DEVICE_ERROR,
                   "%s gave %s (%d)", call, name ? name : "an error", result);
}
