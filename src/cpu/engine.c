/* The CPU's table in the engine seam. */
#include "engine.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "append.h"
#include "backward.h"
#include "error.h"
#include "forward.h"
#include "head_dim.h"
#include "level.h"
#include "processors.h"
#include "quantize.h"
#include "supports.h"
#include "validate.h"

/* E4M3, the last, is for the forward pass alone. */
static const fa3_dtype dtypes[] = {FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16, FA3_FLOAT8_E4M3};
enum { FORWARD_DTYPES = sizeof dtypes / sizeof *dtypes, BACKWARD_DTYPES = FORWARD_DTYPES - 1 };

static int32_t device_count(void) {
  return 1;
}

static fa3_status check_index(int32_t index) {
  if (index == 0) return FA3_OK;
  return set_error(FA3_INVALID_DEVICE, "device.index is %d: the CPU is device 0", index);
}

static fa3_status prepare(int32_t index) {
  TRY(check_index(index));
  return cpu_level() ? FA3_OK : FA3_INVALID_ENVIRONMENT;
}

/* What Linux calls the processor, or "CPU". */
static void processor_name(char *name, size_t size) {
  snprintf(name, size, "CPU");
  FILE *file = fopen("/proc/cpuinfo", "r");
  if (!file) return;
  char line[256];
  while (fgets(line, sizeof line, file)) {
    char *value = strstr(line, ": ");
    if (!value || strncmp(line, "model name", 10) != 0) continue;
    value[strcspn(value, "\n")] = 0;
    snprintf(name, size, "%s", value + 2);
    break;
  }
  (void)fclose(file);
}

static fa3_status device_info(int32_t index, fa3_device_info *info) {
  TRY(check_index(index));
  const struct level *level = cpu_level();
  processor_name(info->name, sizeof info->name);
  snprintf(info->level, sizeof info->level, "%s", level ? level->name : "");
  info->units = default_threads();
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages > 0 && page > 0) info->memory_bytes = (uint64_t)pages * (uint64_t)page;
  return FA3_OK;
}

static bool is_output_dtype(fa3_dtype dtype, fa3_dtype of) {
  if (of == FA3_FLOAT8_E4M3) return dtype_is_wide(dtype);
  return dtype == of || dtype == FA3_FLOAT32;
}

static fa3_status supports(const fa3_capability *capability) {
  const fa3_dtype dtype = capability->query_dtype, cached = capability->key_dtype;
  const bool backward = capability->phase == FA3_BACKWARD;
  if (capability->phase == FA3_APPEND) return supports_append(capability);
  if (capability->phase == FA3_COMBINE) return supports_combine(capability);
  if (capability->phase == FA3_QUANTIZE) return supports_quantize(capability);
  if (!(backward ? dtype_is_wide(dtype) : dtype_is_float(dtype)))
    return set_error(FA3_UNSUPPORTED,
                     "query_dtype is %d (%s): expected FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16%s",
                     dtype, dtype_name(dtype), backward ? "" : ", or FA3_FLOAT8_E4M3");
  const bool codes = !backward && cached == FA3_FLOAT8_E4M3;
  if ((cached != dtype && !codes) || capability->value_dtype != cached)
    return set_error(FA3_UNSUPPORTED,
                     "key_dtype is %s and value_dtype is %s: expected query's, %s%s, for both",
                     dtype_name(cached), dtype_name(capability->value_dtype), dtype_name(dtype),
                     backward ? "" : " or FA3_FLOAT8_E4M3");
  if (!is_output_dtype(capability->output_dtype, dtype))
    return set_error(FA3_UNSUPPORTED, "output_dtype is %s: expected %s",
                     dtype_name(capability->output_dtype),
                     dtype == FA3_FLOAT8_E4M3 ? "FA3_FLOAT32, FA3_FLOAT16 or FA3_BFLOAT16"
                                              : "query's or FA3_FLOAT32");
  return supports_head_dims(capability);
}

static int32_t kernel_count(void) {
  return (FORWARD_DTYPES + BACKWARD_DTYPES) * cpu_level_count;
}

static void kernel_info(int32_t index, fa3_kernel_info *info) {
  const bool backward = index >= FORWARD_DTYPES * cpu_level_count;
  if (backward) index -= FORWARD_DTYPES * cpu_level_count;
  const int count = backward ? BACKWARD_DTYPES : FORWARD_DTYPES;
  const struct level *level = &cpu_levels[index / count];
  snprintf(info->name, sizeof info->name, "%s", level->name);
  info->phase = backward ? FA3_BACKWARD : FA3_FORWARD;
  info->dtype = dtypes[index % count];
  info->head_dim = LARGEST_HEAD_DIM;
  info->value_head_dim = LARGEST_HEAD_DIM;
  info->usable = level->usable();
  info->selected = cpu_level() == level;
}

/* Gradients are computed in words of grad_output's dtype: a float32 one has more than bfloat16
 * words hold. Likewise the forward pass on a cache of FP8 codes and scales. */
static const struct routines *routines_for(const struct level *level,
                                           const struct problem *problem) {
  const bool backward = problem->phase == FA3_BACKWARD;
  return level_routines(level, backward ? problem->grad_output.dtype : problem->key.dtype);
}

/* Few queries are computed with as they are, and the scales of codes apart: bfloat16 holds a code.
 */
static const struct routines *few_routines(const struct level *level,
                                           const struct problem *problem) {
  const bool codes = problem->query.dtype == FA3_FLOAT8_E4M3;
  return level_routines(level, codes ? FA3_BFLOAT16 : problem->query.dtype);
}

_Static_assert(sizeof(struct cpu_plan) <= ENGINE_PLAN_SIZE, "the engine's plan");

/* These phases have no plan, and run on any processor. */
static void (*const without_plan[])(const struct problem *problem) = {
    [FA3_QUANTIZE] = cpu_quantize, [FA3_APPEND] = cpu_append, [FA3_COMBINE] = cpu_combine};

static fa3_status plan(const struct problem *problem, struct plan *plan) {
  plan->workspace_size = 0;
  if (without_plan[problem->phase]) return FA3_OK;
  const struct level *level = cpu_level();
  if (!level) return FA3_INVALID_ENVIRONMENT;
  const struct routines *routines = routines_for(level, problem);
  struct cpu_plan *ours = (struct cpu_plan *)plan->of_engine;
  if (problem->phase == FA3_BACKWARD)
    TRY(cpu_plan_backward(problem, routines, ours));
  else
    cpu_plan_forward(problem, routines, level_routines(level, problem->output.dtype), ours);
  plan->workspace_size = ours->workspace_size;
  return FA3_OK;
}

static fa3_status run(const struct problem *problem, const struct plan *plan) {
  if (without_plan[problem->phase]) {
    without_plan[problem->phase](problem);
    return FA3_OK;
  }
  const struct level *level = cpu_level();
  if (!level) return FA3_INVALID_ENVIRONMENT;
  const struct routines *routines = routines_for(level, problem);
  const struct cpu_plan *ours = (const struct cpu_plan *)plan->of_engine;
  if (problem->phase == FA3_BACKWARD)
    cpu_backward(problem, routines, ours, problem->workspace);
  else
    cpu_forward(problem, routines, few_routines(level, problem),
                level_routines(level, problem->output.dtype), ours, problem->workspace);
  return FA3_OK;
}

const struct engine cpu_engine = {
    .name = "cpu",
    .device_type = FA3_CPU,
    .device_count = device_count,
    .device_info = device_info,
    .prepare = prepare,
    .features = ~(fa3_features)0, /* all that a problem can say */
    .supports = supports,
    .kernel_count = kernel_count,
    .kernel_info = kernel_info,
    .plan = plan,
    .run = run,
};
