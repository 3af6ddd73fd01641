/* Random calls of fa3_quantize and their check against the definition in fa3.h in double precision:
 * scales, nearest codes, what the rotation, the mean and rotary embedding do before, what is not
 * written. */
#ifndef FA3_TESTS_QUANTIZE_TRIAL_H
#define FA3_TESTS_QUANTIZE_TRIAL_H

#include "buffer.h"
#include "e4m3.h"
#include "fa3.h"
#include "rng.h"

enum { QUANTIZE_POISON = 0x5a, QUANTIZE_MOST_BATCH = 300, QUANTIZE_MOST_ROWS = 2500 };

/* A call, and what the header says of it. */
struct quantize_trial {
  fa3_quantize_args args;          /* of the CPU */
  int64_t batch, rows, heads, dim; /* rows of a dense batch, or of all */
  bool packed;
  int32_t starts[QUANTIZE_MOST_BATCH + 1], used[QUANTIZE_MOST_BATCH];
  float *cos, *sin; /* what the tables hold */
  int32_t *positions;
  struct buffer input, codes, scale; /* codes and scale hold QUANTIZE_POISON */
  struct buffer cos_table, sin_table;
};

/* Sequences have up to `longest` rows, QUANTIZE_MOST_ROWS at most. */
void quantize_trial_make(struct quantize_trial *trial, struct rng *rng, int64_t longest);
/* After the call. */
void quantize_trial_check(const struct quantize_trial *trial);
void quantize_trial_free(struct quantize_trial *trial);

#endif
