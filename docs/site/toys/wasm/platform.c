/* The library in a page: one thread, no GPU, no environment. In place of threads.c, processors.c
 * and src/cuda/. */
#include <pthread.h>
#include <stdlib.h>

#include "cpu/processors.h"
#include "cpu/threads.h"
#include "engine.h"
#include "error.h"

int pthread_once(pthread_once_t *once, void (*routine)(void)) {
  if (!*once) routine();
  *once = 1;
  return 0;
}

void threads_for(int32_t threads, int64_t tasks, task_work *work, void *argument) {
  (void)threads;
  for (int64_t task = 0; task < tasks; task++) work(argument, task, 0);
}

void threads_wait(const atomic_llong *value, long long wanted) {
  (void)value; /* earlier tasks are done */
  (void)wanted;
}

bool threads_crowded(void) {
  return false;
}

int32_t default_threads(void) {
  return 1;
}

static int32_t no_devices(void) {
  return 0;
}

static fa3_status no_device(int32_t index) {
  return set_error(FA3_NO_DRIVER, "device.type is FA3_CUDA, index %d: a page has no GPU", index);
}

static fa3_status no_device_info(int32_t index, fa3_device_info *info) {
  (void)info;
  return no_device(index);
}

static fa3_status no_support(const fa3_capability *capability) {
  return no_device(capability->device.index);
}

const struct engine cuda_engine = {
    .name = "cuda",
    .device_type = FA3_CUDA,
    .device_count = no_devices,
    .prepare = no_device,
    .device_info = no_device_info,
    .supports = no_support,
    .kernel_count = no_devices,
};

char *getenv(const char *name) {
  (void)name;
  return NULL;
}
