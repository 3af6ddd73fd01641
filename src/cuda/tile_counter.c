#include "cuda/tile_counter.h"

#include <stdatomic.h>
#include <stdbool.h>

#include "kernels/forward_params.h"

/* The first counters belong to streams, the others to captured calls. */
enum { STREAM_COUNTERS = 1024, PROBES = 8 /* counters looked at before a stream goes without */ };

/* The streams that counters belong to: one more than a stream's ID, which the driver gives to no
 * other as long as the process lives; 0 where a counter is free. */
static atomic_uint_least64_t owners[STREAM_COUNTERS];

/* Counters of captured calls that are given out. None comes back: nobody tells when the last graph
 * that has the call is gone. */
static atomic_uint_least64_t captured = STREAM_COUNTERS;

static bool owned_by(atomic_uint_least64_t *owner, uint64_t id) {
  uint64_t seen = atomic_load_explicit(owner, memory_order_relaxed);
  if (seen == 0 && atomic_compare_exchange_strong(owner, &seen, id + 1)) return true;
  return seen == id + 1;
}

/* Below FA3_TILE_COUNTERS where there is one. */
static uint64_t counter_of_stream(uint64_t id) {
  for (uint64_t probe = 0; probe < PROBES; probe++) {
    const uint64_t counter = (id + probe) % STREAM_COUNTERS;
    if (owned_by(&owners[counter], id)) return counter;
  }
  return FA3_TILE_COUNTERS;
}

static uint64_t counter_of_capture(void) {
  return atomic_fetch_add_explicit(&captured, 1, memory_order_relaxed);
}

unsigned *cuda_tile_counter(const struct cuda_scope *scope, const struct kernel *kernel) {
  const struct cuda_driver *driver = scope->device->driver;
  int capturing = 0;
  uint64_t id = 0;
  CUdeviceptr counters = 0;
  if (!scope->primary || driver->cuStreamIsCapturing(scope->stream, &capturing) ||
      (!capturing && driver->cuStreamGetId(scope->stream, &id)) ||
      cuda_kernel_variable(driver, kernel, "tile_counters", &counters))
    return NULL;
  const uint64_t counter = capturing ? counter_of_capture() : counter_of_stream(id);
  return counter < FA3_TILE_COUNTERS ? (unsigned *)(void *)counters + counter : NULL;
}
