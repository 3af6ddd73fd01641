#include "device.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "failure.h"
#include "numbers.h"

enum { KEY_DEVICE = 0x400, KEY_THREADS };

static const struct argp_option options[] = {
    {.doc = "Device:", .group = 5},
    {.name = "device",
     .key = KEY_DEVICE,
     .arg = "cpu|cuda[:N]|auto",
     .doc = "Where to compute; auto, the default, is the CPU. This program puts no files on a GPU "
            "yet, so cuda is refused, with what the GPU lacks if it could not be used anyway"},
    {.name = "threads",
     .key = KEY_THREADS,
     .arg = "N",
     .doc = "CPU threads (default: what OpenMP would use)"},
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
      return 0;
    case KEY_THREADS:
      if (!parse_integer(arg, 1, INT32_MAX, &threads))
        argp_error(state, "--threads %s: expected a number of 1 or more", arg);
      device->num_threads = (int32_t)threads;
      return 0;
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

int device_choose(const struct device_options *chosen, fa3_device *device) {
  char name[32];
  fa3_device_info info = {.struct_size = sizeof info};
  /* Automatic is the CPU: this program's tensors are in the host's memory, which a GPU does not
   * take. */
  *device = chosen->device;
  fa3_status status = fa3_prepare(*device);
  if (status)
    return fail(status == FA3_INVALID_ENVIRONMENT ? EXIT_USAGE : EXIT_UNSUPPORTED,
                "--device %s: %s", device_name(*device, name), fa3_last_error());
  if (device->type != FA3_CPU)
    return fail(EXIT_UNSUPPORTED,
                "--device %s: libfa3 can use it, but this program computes on the CPU only",
                device_name(*device, name));
  if (chosen->automatic && fa3_get_device_info(*device, &info) == FA3_OK)
    (void)fprintf(stderr, "fa3: using %s (%s, %s)\n", device_name(*device, name), info.name,
                  info.level);
  return 0;
}
