/* Where the work runs: --device and --threads, the same for every command that computes. */
#ifndef FA3_CLI_DEVICE_H
#define FA3_CLI_DEVICE_H

#include <argp.h>
#include <stdbool.h>

#include "fa3.h"

struct device_options {
  bool given;     /* one of the two */
  bool automatic; /* set by default */
  fa3_device device;
  int32_t num_threads;
};

/* A child of a command's argp; its input is a struct device_options. */
extern const struct argp device_argp;

/* Fails for a device that was asked for and can't be used, before anything else is done. */
int device_check(const struct device_options *chosen);

/* The device to make a call on, ready for use: the one that was asked for, or, chosen
 * automatically, the first GPU that can be used and takes the call, else the CPU; that one is named
 * on stderr. `takes` answers for the call: fa3_forward_workspace's status on a device. */
typedef fa3_status (*device_takes)(fa3_device device, const void *call);
int device_choose(const struct device_options *chosen, device_takes takes, const void *call,
                  fa3_device *device);

/* "cpu" or "cuda:1". */
const char *device_name(fa3_device device, char buffer[32]);

#endif
