/* Where the work runs: --device and --threads, the same for every command that computes. */
#ifndef FA3_CLI_DEVICE_H
#define FA3_CLI_DEVICE_H

#include <argp.h>
#include <stdbool.h>

#include "fa3.h"

struct device_options {
  bool automatic; /* set by default */
  fa3_device device;
  int32_t num_threads;
};

/* A child of a command's argp; its input is a struct device_options. */
extern const struct argp device_argp;

/* The device that was chosen, ready for use. One chosen automatically (the first
 * GPU that can be used, else the CPU) is named on stderr. */
int device_choose(const struct device_options *chosen, fa3_device *device);

/* "cpu" or "cuda:1". */
const char *device_name(fa3_device device, char buffer[32]);

#endif
