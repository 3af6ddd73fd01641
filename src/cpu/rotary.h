/* Rotary embedding (RoFormer, arXiv 2104.09864). */
#ifndef FA3_CPU_ROTARY_H
#define FA3_CPU_ROTARY_H

#include "problem.h"

/* A head of head_dim elements, the first of them turned by the angles of its row's position; each
 * is rounded once. `to` may be `from` where they have one dtype. */
void turn_head(const struct problem *problem, const char *from, fa3_dtype from_dtype,
               int64_t position, char *to, fa3_dtype to_dtype);

/* As FA3_ROTATE has it: what is turned is rounded to `dtype`, that of `from`. Where the tables have
 * it too, and 16 bits, a pair (a, b) becomes a cos - r(b sin) and b cos + r(a sin), each rounded
 * once; r rounds too. */
void turn_head_before_rotation(const struct problem *problem, const char *from, fa3_dtype dtype,
                               int64_t position, float *to);

#endif
