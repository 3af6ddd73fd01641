/* Rows of E4M3 codes and their scales as float32, which every level computes in. */
#ifndef FA3_CPU_CODES_H
#define FA3_CPU_CODES_H

#include "problem.h"

/* `width` codes times their scale. */
void decode_row(const char *codes, int64_t width, float scale, float *values);

#endif
