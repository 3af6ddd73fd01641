/* A call cut into smaller calls, each a view of the same tensors, so that long work can show how
 * far it is. */
#ifndef FA3_CLI_SLICE_H
#define FA3_CLI_SLICE_H

#include "library.h"

/* Sequences [batch, batch_end) and the query heads of key heads [head, head_end). */
struct slice {
  int64_t batch;
  int64_t batch_end;
  int64_t head;
  int64_t head_end;
};

/* All that there is to cut; one batch if the call can't be cut between its sequences. */
struct slice slice_whole(const struct call *call);

/* The call of a slice; only the phase and the arguments of `cut` are written. */
void slice_call(const struct call *call, const struct slice *slice, struct call *cut);

#endif
