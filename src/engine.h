/* The seam between the API and what computes: one table of functions per engine. */
#ifndef FA3_SRC_ENGINE_H
#define FA3_SRC_ENGINE_H

#include "fa3.h"
#include "problem.h"

/* How one call will run: decided once, from the problem and what the engine knows of the device.
 * But for the workspace that it takes it is the engine's own. */
enum { ENGINE_PLAN_SIZE = 1024 };
struct plan {
  size_t workspace_size;
  _Alignas(16) unsigned char of_engine[ENGINE_PLAN_SIZE];
};

struct engine {
  const char *name;
  fa3_device_type device_type;

  int32_t (*device_count)(void);
  fa3_status (*device_info)(int32_t index, fa3_device_info *info); /* info is zeroed */
  fa3_status (*prepare)(int32_t index);

  /* What a call may ask for at all; a feature that is not here is refused. */
  fa3_features features;
  /* The table of what it can do; `capability` has known enum values and features from above. */
  fa3_status (*supports)(const fa3_capability *capability);
  int32_t (*kernel_count)(void);
  void (*kernel_info)(int32_t index, fa3_kernel_info *info); /* info is zeroed, index valid */

  /* Queues nothing, and reads no tensor. Called only with what `supports` takes. */
  fa3_status (*plan)(const struct problem *problem, struct plan *plan);
  /* Whether `run` of such a forward call takes an append with it, as its problem's `append`. Null:
   * it never does. */
  bool (*takes_append)(const struct problem *forward, const struct plan *plan,
                       const struct problem *append);
  /* The problem's workspace holds plan->workspace_size bytes, of any alignment. */
  fa3_status (*run)(const struct problem *problem, const struct plan *plan);
};

extern const struct engine cpu_engine;
extern const struct engine cuda_engine;

/* Whether an engine does what a call asks for, with known enum values. */
fa3_status engine_supports(const struct engine *engine, const fa3_capability *capability);

/* The engine of a device type; null and an error for an unknown type. */
const struct engine *engine_for(fa3_device_type type);

#endif
