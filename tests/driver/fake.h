/* What the parts of the fake driver share. */
#ifndef FA3_TESTS_DRIVER_FAKE_H
#define FA3_TESTS_DRIVER_FAKE_H

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

/* Exported as fake_watch: `watcher` sees every launch; null: nobody does. */
typedef void fake_watcher(const struct fake_launch *launch);

/* Exported as fake_kernel_name: a function that the driver was asked for, of any cubin; null behind
 * the last. */

/* What a kernel does: it adds 1 to the first byte of all memory. */
void fake_launch(void);

/* A function of fake_memory.c, or null. */
typedef void (*fake_function)(void);
fake_function fake_memory_function(const char *name);

/* Memory and events that nobody has given back. */
int fake_memory_left(void);

#endif
