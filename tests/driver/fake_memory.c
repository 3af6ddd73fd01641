/* The fake driver's memory, which is the host's, and its events, which count launches. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct block {
  struct block *next;
  size_t size;
  char *data;
};

struct event {
  int launches;
};

static struct block *blocks;
static int events;
static int launches;

static size_t available(void) {
  size_t bytes = (size_t)fake_number("FAKE_CUDA_MEMORY", 1L << 30);
  for (const struct block *block = blocks; block; block = block->next)
    bytes -= block->size < bytes ? block->size : bytes;
  return bytes;
}

static int32_t mem_alloc(uint64_t *pointer, size_t size) {
  if (fake_failing("cuMemAlloc")) return UNKNOWN;
  if (size == 0) return INVALID_VALUE;
  if (size > available()) return OUT_OF_MEMORY;
  struct block *block = malloc(sizeof *block);
  if (!block) abort();
  *block = (struct block){blocks, size, aligned_alloc(256, (size + 255) / 256 * 256)};
  if (!block->data) abort();
  blocks = block;
  *pointer = (uint64_t)block->data;
  return SUCCESS;
}

static int32_t mem_free(uint64_t pointer) {
  for (struct block **link = &blocks; *link; link = &(*link)->next) {
    struct block *block = *link;
    if ((uint64_t)block->data != pointer) continue;
    *link = block->next;
    free(block->data);
    free(block);
    return SUCCESS;
  }
  return INVALID_VALUE;
}

static int32_t mem_get_info(size_t *free_bytes, size_t *total) {
  *free_bytes = available();
  *total = (size_t)80 << 30;
  return SUCCESS;
}

/* Null unless all of it is inside one block. */
static char *find(uint64_t pointer, size_t size) {
  for (const struct block *block = blocks; block; block = block->next) {
    uint64_t offset = pointer - (uint64_t)block->data;
    if (offset <= block->size && size <= block->size - offset) return (char *)pointer;
  }
  return NULL;
}

static int32_t copy_to_device(uint64_t to, const void *from, size_t size) {
  char *memory = find(to, size);
  if (!memory) return INVALID_VALUE;
  memcpy(memory, from, size);
  return fake_failing("cuMemcpyHtoD");
}

static int32_t copy_to_host(void *to, uint64_t from, size_t size) {
  const char *memory = find(from, size);
  if (!memory) return INVALID_VALUE;
  memcpy(to, memory, size);
  return fake_failing("cuMemcpyDtoH");
}

static int32_t event_create(struct event **event, unsigned flags) {
  if (flags) return INVALID_VALUE;
  if (fake_failing("cuEventCreate")) return UNKNOWN;
  *event = calloc(1, sizeof **event);
  events += *event != NULL;
  return *event ? SUCCESS : OUT_OF_MEMORY;
}

static int32_t event_destroy(struct event *event) {
  free(event);
  events--;
  return SUCCESS;
}

static int32_t event_record(struct event *event, void *stream) {
  (void)stream;
  event->launches = launches;
  return fake_failing("cuEventRecord");
}

static int32_t event_synchronize(struct event *event) {
  (void)event;
  return fake_failing("cuEventSynchronize");
}

/* A launch takes half a millisecond. */
static int32_t event_elapsed_time(float *milliseconds, const struct event *start,
                                  const struct event *end) {
  *milliseconds = (float)(end->launches - start->launches) * 0.5F;
  return fake_failing("cuEventElapsedTime");
}

static int32_t context_synchronize(void) {
  return fake_failing("cuCtxSynchronize");
}

void fake_launch(void) {
  for (const struct block *block = blocks; block; block = block->next) block->data[0]++;
  launches++;
}

int fake_memory_left(void) {
  return blocks || events;
}

fake_function fake_memory_function(const char *name) {
  static const struct {
    const char *name;
    fake_function function;
  } functions[] = {
      {"cuMemAlloc", (fake_function)mem_alloc},
      {"cuMemFree", (fake_function)mem_free},
      {"cuMemGetInfo", (fake_function)mem_get_info},
      {"cuMemcpyHtoD", (fake_function)copy_to_device},
      {"cuMemcpyDtoH", (fake_function)copy_to_host},
      {"cuEventCreate", (fake_function)event_create},
      {"cuEventDestroy", (fake_function)event_destroy},
      {"cuEventRecord", (fake_function)event_record},
      {"cuEventSynchronize", (fake_function)event_synchronize},
      {"cuEventElapsedTime", (fake_function)event_elapsed_time},
      {"cuCtxSynchronize", (fake_function)context_synchronize},
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!strcmp(functions[i].name, name)) return functions[i].function;
  return NULL;
}
