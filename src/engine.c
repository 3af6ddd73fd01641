#include "engine.h"

#include <string.h>

#include "error.h"
#include "structs.h"

enum { ENGINES = 2 };
static const struct engine *const engines[ENGINES] = {&cpu_engine, &cuda_engine};

static const struct engine *find_engine(fa3_device_type type) {
  for (int e = 0; e < ENGINES; e++)
    if (engines[e]->device_type == type) return engines[e];
  return NULL;
}

const struct engine *engine_for(fa3_device_type type) {
  const struct engine *engine = find_engine(type);
  if (!engine)
    set_error(FA3_INVALID_DEVICE, "device.type is %d: expected FA3_CPU (0) or FA3_CUDA (1)", type);
  return engine;
}

int32_t fa3_device_count(fa3_device_type type) {
  const struct engine *engine = find_engine(type);
  const struct error_message before = error_keep();
  int32_t count = engine ? engine->device_count() : 0;
  error_put_back(&before);
  return count;
}

/* The engine, if the device's index can be one. */
static fa3_status find_device(fa3_device device, const struct engine **engine) {
  *engine = engine_for(device.type);
  if (!*engine) return FA3_INVALID_DEVICE;
  if (device.index < 0)
    return set_error(FA3_INVALID_DEVICE, "device.index is %d: it can't be negative", device.index);
  return FA3_OK;
}

fa3_status fa3_prepare(fa3_device device) {
  const struct engine *engine;
  fa3_status status = find_device(device, &engine);
  return status ? status : engine->prepare(device.index);
}

fa3_status fa3_get_device_info(fa3_device device, fa3_device_info *info) {
  const struct engine *engine;
  TRY(find_device(device, &engine));
  fa3_device_info ours = {0};
  const struct error_message before = error_keep();
  TRY(engine->device_info(device.index, &ours));
  error_put_back(&before);
  return struct_write("info", info, &ours, sizeof ours, sizeof ours);
}

int32_t fa3_kernel_count(void) {
  int32_t count = 0;
  for (int e = 0; e < ENGINES; e++) count += engines[e]->kernel_count();
  return count;
}

fa3_status fa3_get_kernel_info(int32_t index, fa3_kernel_info *info) {
  int32_t row = index;
  for (int e = 0; row >= 0 && e < ENGINES; e++) {
    int32_t count = engines[e]->kernel_count();
    if (row < count) {
      fa3_kernel_info ours = {0};
      const struct error_message before = error_keep();
      engines[e]->kernel_info(row, &ours);
      error_put_back(&before);
      strncpy(ours.engine, engines[e]->name, sizeof ours.engine - 1);
      return struct_write("info", info, &ours, sizeof ours, sizeof ours);
    }
    row -= count;
  }
  return set_error(FA3_INVALID_INDEX, "index is %d: expected 0 to %d", index,
                   fa3_kernel_count() - 1);
}

/* What a call of a phase can ask for. */
static fa3_features features_of(fa3_phase phase) {
  fa3_features features = 0;
  if (find_argument(phase, TENSOR_query)) features |= FA3_FEATURE_GROUPED_HEADS;
  if (phase == FA3_FORWARD || phase == FA3_BACKWARD)
    features |= FA3_FEATURE_CAUSAL | FA3_FEATURE_WINDOW | FA3_FEATURE_SOFTCAP;
  if (phase == FA3_BACKWARD) features |= FA3_FEATURE_ACCUMULATE | FA3_FEATURE_DETERMINISTIC;
  const struct argument_struct *list = arguments_of(phase);
  for (int i = 0; i < list->count; i++) features |= tensor_rows[list->arguments[i].tensor].feature;
  return features;
}

/* A feature's name: that of the tensor that asks for it, where there is one. */
static const char *feature_name(fa3_features feature) {
  for (int t = 0; t < TENSORS; t++)
    if (tensor_rows[t].feature == feature) return tensor_rows[t].name;
  return "this option";
}

fa3_status engine_supports(const struct engine *engine, const fa3_capability *capability) {
  const fa3_features lacking = capability->features & ~engine->features;
  if (lacking)
    return set_error(FA3_UNSUPPORTED, "the %s engine does not take %s (features 0x%llx)",
                     engine->name, feature_name(lacking & -lacking), (unsigned long long)lacking);
  return engine->supports(capability);
}

fa3_status fa3_supports(const fa3_capability *capability) {
  fa3_capability wanted;
  TRY(struct_read("capability", capability, &wanted, sizeof wanted, sizeof wanted));
  const struct engine *engine;
  TRY(find_device(wanted.device, &engine));
  if (!arguments_of(wanted.phase))
    return set_error(FA3_UNSUPPORTED,
                     "phase is %d: expected FA3_FORWARD (1), FA3_BACKWARD (2), FA3_QUANTIZE (4), "
                     "FA3_APPEND (5) or FA3_COMBINE (6)",
                     wanted.phase);
  const fa3_features unknown = wanted.features & ~features_of(wanted.phase);
  if (unknown)
    return set_error(FA3_UNSUPPORTED,
                     "features has bits 0x%llx that the %s pass of libfa3 " FA3_VERSION
                     " does not have",
                     (unsigned long long)unknown, arguments_of(wanted.phase)->name);
  return engine_supports(engine, &wanted);
}
