/* Rows picked at random, spread evenly over all that a batch of sequences has. */
#ifndef FA3_CLI_SAMPLING_H
#define FA3_CLI_SAMPLING_H

#include <stdint.h>

struct sampling {
  int64_t batch;
  int64_t heads;
  void *context; /* of the functions */
  int64_t (*rows)(const void *context, int64_t batch);
  void (*visit)(void *context, int64_t batch, int64_t head, int64_t row);
};

/* Rows of all sequences, in all heads. */
int64_t sampling_total(const struct sampling *sampling);

/* On as many threads as there are processors: visits are at the same time and in any order.
 * Visits `count` rows, one at random of each of as many equal shares; all if `count` is no less.
 * Draws a progress bar if `label` is not null. */
void sampling_visit(const struct sampling *sampling, int64_t count, uint64_t seed,
                    const char *label);

#endif
