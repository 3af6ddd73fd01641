/* Attention on the device that the arguments name, from host memory to host memory. */
#ifndef FA3_CLI_ATTENTION_H
#define FA3_CLI_ATTENTION_H

#include "fa3.h"

/* The arguments have been checked, lengths included, and have no workspace. On the CPU long work is
 * done in parts, with a progress bar, where there is a terminal to draw it on. */
int attention_run(const fa3_forward_args *args);

/* The gradients, likewise. */
int attention_run_backward(const fa3_backward_args *args);

/* Arithmetic of a whole forward call. */
double attention_flops(const fa3_forward_args *args);

#endif
