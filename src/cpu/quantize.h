/* Rows that become E4M3 codes and scales. */
#ifndef FA3_CPU_QUANTIZE_H
#define FA3_CPU_QUANTIZE_H

#include "problem.h"

/* Refuses what cpu_quantize does not take. */
fa3_status cpu_supports_quantize(const fa3_capability *capability);
void cpu_quantize(const struct problem *problem);

#endif
