/* Rows that become E4M3 codes and scales. */
#ifndef FA3_CPU_QUANTIZE_H
#define FA3_CPU_QUANTIZE_H

#include "problem.h"

void cpu_quantize(const struct problem *problem);

#endif
