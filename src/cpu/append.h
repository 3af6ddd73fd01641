/* Keys and values written into a cache, and partial results put together: little work, of memory
 * alone, on any processor. */
#ifndef FA3_CPU_APPEND_H
#define FA3_CPU_APPEND_H

#include "problem.h"

void cpu_append(const struct problem *problem);
void cpu_combine(const struct problem *problem);

#endif
