/* What the parts of the fake driver share. */
#ifndef FA3_TESTS_DRIVER_FAKE_H
#define FA3_TESTS_DRIVER_FAKE_H

#include <stdint.h>
#include <string.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  NOT_FOUND = 500,
  UNKNOWN = 999
};

/* UNKNOWN if FAKE_CUDA_FAILING names the function. */
int fake_failing(const char *function);

/* A number from the environment. */
long fake_number(const char *name, long otherwise);

/* A launch, as the driver was asked for it. */
struct fake_launch {
  const char *function;
  const void *cubin;
  const void *params; /* the kernel's one parameter, as long as the launch takes */
  void *stream;
  unsigned grid[3];
  unsigned block[3];
  unsigned cluster; /* blocks, along x; 0: as the kernel is compiled */
  unsigned shared_bytes;
  unsigned shared_limit; /* what the function was allowed */
  int dependent;         /* with programmatic stream serialization */
};

#define FAKE_EXPORT __attribute__((visibility("default")))

/* `watcher` sees every launch; null: nobody does. */
typedef void fake_watcher(const struct fake_launch *launch);
FAKE_EXPORT void fake_watch(fake_watcher *watcher);

/* A function that the driver was asked for, of any cubin; null behind the last. */
FAKE_EXPORT const char *fake_kernel_name(int index);

/* Whether the thread's context and capture mode are as a call must leave them. */
FAKE_EXPORT int fake_thread_is_clean(void);

/* Copies the parameters of a launch of that function. */
static inline void fake_keep(const struct fake_launch *launch, const char *function, void *params,
                             size_t size) {
  if (!strcmp(launch->function, function)) memcpy(params, launch->params, size);
}

/* Where tensor number n lies; nothing reads it. */
static inline void *place(int n) {
  return (void *)((uintptr_t)n << 32);
}

/* What a kernel does: it adds 1 to the first byte of all memory. */
void fake_launch(void);

/* A function of fake_memory.c, or null. */
typedef void (*fake_function)(void);
fake_function fake_memory_function(const char *name);

/* Memory and events that nobody has given back. */
int fake_memory_left(void);

#endif
