/* A call on the device that its arguments name, from host memory to host memory. */
#ifndef FA3_CLI_ATTENTION_H
#define FA3_CLI_ATTENTION_H

#include "library.h"

/* The arguments have been checked, lengths included. On the CPU long work is done in parts, with a
 * progress bar, where there is a terminal to draw it on. */
int attention_run(const struct call *call);

#endif
