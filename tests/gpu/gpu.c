#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "test.h"

struct gpu_driver gpu;
static gpu_context primary;

void gpu_check(const char *call, int result) {
  if (result) fail_msg("%s gave error %d", call, result);
}

gpu_context gpu_primary(void) {
  return primary;
}

static bool find_functions(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  int (*get)(const char *, void **, int, uint64_t, int *) = NULL;
  void *address = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
  memcpy(&get, &address, sizeof address);
  if (!get) return false;
  const struct {
    const char *name;
    void *target;
    int version;
  } functions[] = {
#define FUNCTION(name, version, ...) {#name, &gpu.name, version},
      GPU_FUNCTIONS(FUNCTION)
#undef FUNCTION
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    int found;
    if (get(functions[i].name, functions[i].target, functions[i].version, 0, &found) &&
        functions[i].version < 12040)
      return false;
  }
  return true;
}

bool gpu_open_unprepared(void) {
  int count = 0;
  if (!find_functions() || gpu.cuInit(0) || gpu.cuDeviceGetCount(&count) || count == 0)
    return false;
  GPU(cuDevicePrimaryCtxRetain, &primary, 0);
  GPU(cuCtxSetCurrent, primary);
  return true;
}

bool gpu_open(void) {
  const fa3_device device = {FA3_CUDA, 0};
  if (fa3_prepare(device)) {
    printf("skipped: %s\n", fa3_last_error());
    return false;
  }
  return gpu_open_unprepared();
}

int gpu_trials(int otherwise) {
  const char *count = getenv("FA3_GPU_TRIALS");
  return count ? (int)strtol(count, NULL, 10) : otherwise;
}

struct gpu_arena gpu_arena_new(size_t size) {
  struct gpu_arena arena = {.size = size};
  GPU(cuMemAlloc, &arena.base, size);
  return arena;
}

void gpu_arena_free(struct gpu_arena *arena) {
  GPU(cuMemFree, arena->base);
  *arena = (struct gpu_arena){0};
}

gpu_pointer gpu_arena_take(struct gpu_arena *arena, size_t size) {
  gpu_pointer start = arena->base + arena->used;
  arena->used += (size + 4095) / 4096 * 4096;
  if (arena->used > arena->size)
    fail_msg("the arena has %zu bytes: %zu are asked for", arena->size, arena->used);
  return start;
}
