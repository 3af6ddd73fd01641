/* Rows of the reference on several threads, which live for one call. */
#ifndef FA3_REFERENCE_PARALLEL_H
#define FA3_REFERENCE_PARALLEL_H

#include <stdint.h>

/* The processors that this process may run on. */
int32_t reference_threads(void);

/* Calls `work` once for each task of [0, tasks), started in their order, on up to that many
 * threads, the calling one among them: on it alone if no other can be created. */
void reference_for(int32_t threads, int64_t tasks, void (*work)(void *argument, int64_t task),
                   void *argument);

#endif
