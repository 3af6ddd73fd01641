/* Rows of E4M3 codes and their scales as float32, which every level computes in. */
#ifndef FA3_CPU_CODES_H
#define FA3_CPU_CODES_H

#include "problem.h"

/* `width` codes times their scale; NaN where that is not finite. */
void decode_row(const char *codes, int64_t width, float scale, float *values);

/* The least scale that holds values up to `largest`. A normal number, so that its inverse is
 * finite. */
float scale_for(float largest);

/* The largest magnitude of the row's finite values, or `largest`. */
float largest_of_row(const float *values, int64_t width, float largest);

/* `width` values divided by their scale, to the nearest code. What is beyond 448 becomes 448, an
 * infinity NaN. */
void encode_row(const float *restrict values, int64_t width, float scale, char *restrict codes);

#endif
