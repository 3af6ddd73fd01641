/* The CUDA engine: a Hopper GPU, by the compiled kernels of kernels/variants.def. */
#include "engine.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cuda/append.h"
#include "cuda/backward.h"
#include "cuda/check.h"
#include "cuda/context.h"
#include "cuda/decode_append.h"
#include "cuda/device.h"
#include "cuda/forward.h"
#include "cuda/kernels.h"
#include "cuda/quantize.h"
#include "cuda/sequences.h"
#include "error.h"
#include "integer.h"
#include "supports.h"

static fa3_status prepare(int32_t index) {
  const struct cuda_device *device;
  return cuda_device_get(index, &device);
}

static int32_t kernel_count(void) {
  int32_t count = 0;
  for (int32_t k = 0; k < KERNELS; k++) count += kernels[k].fatbin && kernels[k].kind->phase;
  return count;
}

/* Its function, its tile, and what else of its row in variants.def tells it from others. */
static void name_kernel(const struct kernel *kernel, char *name, size_t size) {
  const struct {
    const char *key;
    int32_t value;
  } features[] = {{"pages", kernel->pages},
                  {"head_scales", kernel->head_scales},
                  {"small_tiles", kernel->small_tiles},
                  {"most_keys", kernel->most_keys},
                  {"transposed", kernel->transposed},
                  {"unpacked", kernel->unpacked},
                  {"by_head", kernel->by_head},
                  {"last_keys", kernel->last_keys},
                  {"diagonal", kernel->diagonal},
                  {"heads", kernel->heads},
                  {"warps", kernel->warps}};
  int at =
      snprintf(name, size, "%s %dx%d", kernel->kind->entries[0], kernel->tile_q, kernel->tile_k);
  for (size_t f = 0; f < sizeof features / sizeof *features && at < (int)size; f++) {
    const size_t left = size - (size_t)at;
    const int value = features[f].value;
    if (value == 1) at += snprintf(name + at, left, " %s", features[f].key);
    if (value > 1) at += snprintf(name + at, left, " %s=%d", features[f].key, value);
  }
}

static void kernel_info(int32_t index, fa3_kernel_info *info) {
  const struct kernel *kernel = kernels;
  for (; index > 0 || !kernel->kind->phase; kernel++) index -= kernel->kind->phase != 0;
  name_kernel(kernel, info->name, sizeof info->name);
  info->phase = kernel->kind->phase;
  info->dtype = kernel->dtype;
  info->head_dim = kernel->head_dim;
  info->value_head_dim = kernel->value_head_dim;
  /* Whether any GPU of this machine runs them. Every kernel that is usable is also used. */
  for (int32_t d = 0; d < cuda_device_count() && !info->usable; d++) {
    fa3_device_info device = {0};
    info->usable = cuda_device_check(d) == FA3_OK && cuda_device_info(d, &device) == FA3_OK &&
                   !strcmp(device.level, kernel->architecture);
  }
  info->selected = info->usable;
}

/* What is done for each phase. */
static const struct phase {
  fa3_status (*supports)(const fa3_capability *capability);
  fa3_status (*plan)(const struct problem *problem, const struct cuda_facts *facts,
                     struct cuda_plan *plan);
  fa3_status (*launch)(const struct cuda_scope *scope, const struct problem *problem,
                       const struct cuda_plan *plan, char *workspace);
} phases[] = {[FA3_FORWARD] = {supports_forward, plan_forward, launch_forward},
              [FA3_BACKWARD] = {supports_backward, plan_backward, launch_backward},
              [FA3_QUANTIZE] = {supports_quantize, plan_quantize, launch_quantize},
              [FA3_APPEND] = {supports_append, plan_append, launch_append},
              [FA3_COMBINE] = {supports_combine, plan_combine, launch_combine}};
enum { PHASES = sizeof phases / sizeof *phases };

static fa3_status supports(const fa3_capability *capability) {
  if (!kernels_compiled())
    return set_error(FA3_UNSUPPORTED,
                     "this build of libfa3 has no CUDA kernels (it was made without nvcc)");
  if (capability->phase >= PHASES || !phases[capability->phase].plan)
    return set_error(FA3_UNSUPPORTED, "phase is %" PRId32 " (%s): no CUDA kernel does that",
                     capability->phase, arguments_of(capability->phase)->name);
  return phases[capability->phase].supports(capability);
}

/* What struct plan holds for this engine: where the call runs, and how. */
struct engine_plan {
  struct cuda_scope scope;
  struct cuda_plan plan;
};
_Static_assert(sizeof(struct engine_plan) <= ENGINE_PLAN_SIZE, "the engine's plan");

static fa3_status plan(const struct problem *problem, struct plan *plan) {
  struct engine_plan *ours = (struct engine_plan *)plan->of_engine;
  const struct cuda_device *device;
  TRY(cuda_device_get(problem->device.index, &device));
  TRY(cuda_scope_find(device, problem->stream, &ours->scope));
  const int most = ours->scope.multiprocessors;
  ours->scope.multiprocessors =
      (int)larger(ours->scope.multiprocessors - (int64_t)problem->reserved_multiprocessors, 1);
  const struct cuda_facts facts = {.architecture = device->architecture,
                                   .multiprocessors = ours->scope.multiprocessors,
                                   .most_multiprocessors = most,
                                   .bandwidth = device->bandwidth};
  TRY(phases[problem->phase].plan(problem, &facts, &ours->plan));
  plan->workspace_size = with_alignment(ours->plan.workspace_size);
  return FA3_OK;
}

static bool takes_append(const struct problem *forward, const struct plan *plan,
                         const struct problem *append) {
  const struct engine_plan *ours = (const struct engine_plan *)plan->of_engine;
  return decode_takes_append(forward, &ours->plan, append);
}

/* In scope: memory that a kernel may touch. */
static fa3_status check(const struct problem *problem, const struct engine_plan *ours,
                        char *workspace) {
  TRY(cuda_check_memory(&ours->scope, problem, workspace));
  return ours->scope.device->checks ? cuda_check_contents(&ours->scope, problem) : FA3_OK;
}

/* In scope. */
static fa3_status launch(const struct problem *problem, const struct engine_plan *ours) {
  char *workspace = ours->plan.workspace_size ? problem->workspace : NULL;
  if (problem->append) TRY(check(problem->append, ours, NULL));
  TRY(check(problem, ours, workspace));
  workspace = align_workspace(workspace);
  const struct staging *staging = &ours->plan.staging;
  struct problem staged;
  if (staging->count == 0 || problem->batch == 0)
    return phases[problem->phase].launch(&ours->scope, problem, &ours->plan, workspace);
  TRY(stage(&ours->scope, problem, staging, workspace, &staged));
  staged.appended = 0; /* copies are what was queued last, and wait for it */
  TRY(phases[problem->phase].launch(&ours->scope, &staged, &ours->plan, workspace));
  return unstage(&ours->scope, problem, staging, &staged);
}

static fa3_status run(const struct problem *problem, const struct plan *plan) {
  struct engine_plan ours = *(const struct engine_plan *)plan->of_engine;
  TRY(cuda_scope_enter(&ours.scope));
  fa3_status status = launch(problem, &ours);
  cuda_scope_leave(&ours.scope);
  return status;
}

const struct engine cuda_engine = {
    .name = "cuda",
    .device_type = FA3_CUDA,
    .device_count = cuda_device_count,
    .device_info = cuda_device_info,
    .prepare = prepare,
    .features = SEQUENCE_FEATURES | FA3_FEATURE_GROUPED_HEADS | FA3_FEATURE_CAUSAL |
                FA3_FEATURE_WINDOW | FA3_FEATURE_SOFTCAP | FA3_FEATURE_SINK | FA3_FEATURE_LSE |
                FA3_FEATURE_GRAD_LSE | FA3_FEATURE_ACCUMULATE | FA3_FEATURE_DETERMINISTIC |
                FA3_FEATURE_PAGE_TABLE,
    .supports = supports,
    .kernel_count = kernel_count,
    .kernel_info = kernel_info,
    .plan = plan,
    .takes_append = takes_append,
    .run = run,
};
