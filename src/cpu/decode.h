/* Sequences of few queries, on any level's routines: bound by the memory that holds the keys. */
#ifndef FA3_CPU_DECODE_H
#define FA3_CPU_DECODE_H

#include <stdbool.h>

#include "engine.h"
#include "routines.h"

/* Whether a sequence goes this way: the tile loop is for the others. */
bool decodes(const struct problem *problem, int64_t seqlen_q);

/* Bytes of workspace for threads and the results of parts of sequences; never fewer when an extent
 * grows. */
size_t decode_workspace(const struct problem *problem, int32_t threads);

/* All sequences of the batch that go this way, on at most the threads that the workspace is for. */
void cpu_decode(const struct problem *problem, const struct routines *routines, int32_t threads,
                void *workspace);

#endif
