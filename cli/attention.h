/* A forward call with its workspace, and in parts if that lets long work show how far it is. */
#ifndef FA3_CLI_ATTENTION_H
#define FA3_CLI_ATTENTION_H

#include "fa3.h"

/* Grows the workspace as needed, and calls the library. `args` owns it: free(args->workspace). */
fa3_status attention_call(fa3_forward_args *args);

/* The same with a progress bar, where there is a terminal to draw it on. The arguments have been
 * checked, lengths included. */
fa3_status attention_run(fa3_forward_args *args);

/* Arithmetic of a whole call. */
double attention_flops(const fa3_forward_args *args);

#endif
