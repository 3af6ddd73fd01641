/* Calls of the library, with a workspace that grows as needed. */
#ifndef FA3_CLI_LIBRARY_H
#define FA3_CLI_LIBRARY_H

#include "fa3.h"
#include "tensors.h"

/* A call of either pass, or of fa3_quantize. Its workspace, in the memory of the arguments' device,
 * is library_run's.
 */
struct call {
  fa3_phase phase;
  union {
    fa3_forward_args forward;
    fa3_backward_args backward;
    fa3_quantize_args quantize;
  } args;
  void *workspace;
  size_t workspace_size;
};

fa3_device call_device(const struct call *call);
void call_set_device(struct call *call, fa3_device device, int32_t num_threads);

/* Whether the call's device takes it, and with how large a workspace. */
fa3_status library_check(const struct call *call, size_t *bytes);

/* On a GPU the work is queued, no more. */
int library_run(struct call *call);
void library_free_workspace(struct call *call);

/* fa3_last_error in the words of the options: fp16 for FA3_FLOAT16 and its number, and so on. Until
 * the next call. */
const char *library_message(void);

/* The exit code of a status that is not FA3_OK. */
int library_exit_code(fa3_status status);

#endif
