#include "device.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cuda.h"
#include "failure.h"
#include "library.h"
#include "numbers.h"

enum { KEY_DEVICE = 0x400, KEY_THREADS, MOST_THREADS = 1024 };

static const struct argp_option options[] = {
    {.doc = "Device:", .group = 6},
    {.name = "device",
     .key = KEY_DEVICE,
     .arg = "cpu|cuda[:N]|auto",
     .doc = "Where to compute; auto, the default, is the first GPU that can do it, else the CPU"},
    {.name = "threads",
     .key = KEY_THREADS,
     .arg = "N",
     .doc = "Compute on the CPU, on so many threads at most (default: its processors)"},
    {0}};

static bool parse_device(const char *text, struct device_options *device) {
  static const char cuda[] = "cuda:";
  int64_t index = 0;
  device->automatic = strcmp(text, "auto") == 0;
  device->device = (fa3_device){FA3_CPU, 0};
  if (device->automatic || strcmp(text, "cpu") == 0) return true;
  device->device.type = FA3_CUDA;
  if (strcmp(text, "cuda") == 0) return true;
  if (strncmp(text, cuda, strlen(cuda)) != 0 ||
      !parse_integer(text + strlen(cuda), 0, INT32_MAX, &index))
    return false;
  device->device.index = (int32_t)index;
  return true;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct device_options *device = state->input;
  int64_t threads;
  switch (key) {
    case ARGP_KEY_INIT:
      device->automatic = true;
      return 0;
    case KEY_DEVICE:
      if (!parse_device(arg, device))
        argp_error(state, "--device %s: expected cpu, cuda, cuda:N or auto", arg);
      device->given = true;
      return 0;
    case KEY_THREADS:
      if (!parse_integer(arg, 1, MOST_THREADS, &threads))
        argp_error(state, "--threads %s: expected a number from 1 to %d", arg, MOST_THREADS);
      device->num_threads = (int32_t)threads;
      device->given = true;
      return 0;
    case ARGP_KEY_ARG: /* what takes a device takes options alone */
      argp_error(state, "'%s' is no option: expected options alone", arg);
      return EINVAL;
    case ARGP_KEY_END:
      if (device->num_threads && device->device.type == FA3_CUDA)
        argp_error(state, "--threads is for the CPU");
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

const struct argp device_argp = {.options = options, .parser = parse};

const char *device_name(fa3_device device, char buffer[32]) {
  if (device.type == FA3_CPU)
    (void)snprintf(buffer, 32, "cpu");
  else
    (void)snprintf(buffer, 32, "cuda:%" PRId32, device.index);
  return buffer;
}

static int fail_on(fa3_device device, fa3_status status) {
  char name[32];
  return fail(library_exit_code(status), "--device %s: %s", device_name(device, name),
              library_message());
}

int device_check(const struct device_options *chosen) {
  if (chosen->automatic) return 0;
  fa3_status status = fa3_prepare(chosen->device);
  return status ? fail_on(chosen->device, status) : 0;
}

/* The first GPU that takes the call; if there are GPUs and none does, why the first one does not.
 */
static bool find_gpu(device_takes takes, const void *call, fa3_device *device, char *reason,
                     size_t size) {
  int32_t count = fa3_device_count(FA3_CUDA);
  for (int32_t i = 0; i < count; i++) {
    char name[32];
    *device = (fa3_device){FA3_CUDA, i};
    /* In this order: to prepare a GPU takes time. */
    if (!takes(*device, call) && !fa3_prepare(*device)) {
      *reason = '\0';
      return true;
    }
    if (i == 0)
      (void)snprintf(reason, size, ", not %s: %s", device_name(*device, name), library_message());
  }
  return false;
}

static int choose_automatically(const struct device_options *chosen, device_takes takes,
                                const void *call, fa3_device *device) {
  char name[32];
  char reason[512] = "";
  fa3_device_info info = {.struct_size = sizeof info};
  if (chosen->num_threads || !find_gpu(takes, call, device, reason, sizeof reason)) {
    *device = (fa3_device){FA3_CPU, 0};
    fa3_status status = fa3_prepare(*device);
    if (!status) status = takes(*device, call);
    if (status) return fail(library_exit_code(status), "%s", library_message());
  }
  (void)fa3_get_device_info(*device, &info);
  (void)fprintf(stderr, "fa3: using %s (%s, %s)%s\n", device_name(*device, name), info.name,
                info.level, reason);
  return 0;
}

int device_choose(const struct device_options *chosen, device_takes takes, const void *call,
                  fa3_device *device) {
  *device = chosen->device;
  if (chosen->automatic) {
    TRY(choose_automatically(chosen, takes, call, device));
  } else {
    TRY(device_check(chosen));
    fa3_status status = takes(*device, call);
    if (status) return fail_on(*device, status);
  }
  return device->type == FA3_CUDA ? cuda_open(device->index) : 0;
}
