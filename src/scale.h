/* What the codes of FP8 operands are multiplied by. */
#ifndef FA3_SRC_SCALE_H
#define FA3_SRC_SCALE_H

#include "problem.h"

/* The scales of a problem whose other tensors have been read, from its phase's struct. An absent
 * one is 1. */
fa3_status read_scales(const void *args, struct problem *problem);

/* The scale of a row of a sequence; `row` counts from the sequence's first in memory. */
float query_scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                     int64_t row);
float key_scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                   int64_t row);
float value_scale_of(const struct problem *problem, const struct sequence *sequence, int64_t head,
                     int64_t row);

/* Where it is, or null where there is none. */
float *key_scale_at(const struct problem *problem, const struct sequence *sequence, int64_t head,
                    int64_t row);
float *value_scale_at(const struct problem *problem, const struct sequence *sequence, int64_t head,
                      int64_t row);

/* Where a call writes that of a row. */
float *codes_scale_at(const struct problem *problem, const struct sequence *sequence, int64_t head,
                      int64_t row);

#endif
