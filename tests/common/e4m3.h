/* E4M3 and the rotation that goes before it, by their definitions in fa3.h, in double precision. */
#ifndef FA3_TESTS_E4M3_H
#define FA3_TESTS_E4M3_H

#include <stdint.h>

enum { E4M3_MOST_DIM = 256 };

double e4m3_value(int code);

/* A head of `width` elements as FA3_ROTATE makes it. */
void rotate_head(uint64_t seed, int width, double *x);

#endif
