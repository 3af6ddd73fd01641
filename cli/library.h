/* Calls of the library, with a workspace that grows as needed, in the memory of args->device. */
#ifndef FA3_CLI_LIBRARY_H
#define FA3_CLI_LIBRARY_H

#include "fa3.h"

/* On a GPU the work is queued, no more. The workspace is the caller's to give back. */
int library_forward(fa3_forward_args *args);
int library_backward(fa3_backward_args *args);
void library_free_workspace(fa3_device device, void *workspace);

/* fa3_last_error in the words of the options: fp16 for FA3_FLOAT16 and its number, and so on. Until
 * the next call. */
const char *library_message(void);

/* The exit code of a status that is not FA3_OK. */
int library_exit_code(fa3_status status);

#endif
