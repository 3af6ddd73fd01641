#include "trials.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static double worst[FA3_BFLOAT16 + 1];
static char under_way[TRIALS_TEXT]; /* empty between trials */
static uint64_t under_way_number;

void trials_run(void (*run)(uint64_t number), int first, int step, int count) {
  const char *only = getenv("FA3_TEST_TRIAL");
  if (only)
    run(strtoull(only, NULL, 0));
  else
    for (int number = first; number < count; number += step) run((uint64_t)number);
  printf("largest error as a fraction of its bound: float32 %.3f, float16 %.3f, bfloat16 %.3f\n",
         worst[FA3_FLOAT32], worst[FA3_FLOAT16], worst[FA3_BFLOAT16]);
}

char *trials_begin(uint64_t number) {
  under_way_number = number;
  return under_way;
}

void trials_end(fa3_dtype dtype, double ratio) {
  if (ratio > worst[dtype]) worst[dtype] = ratio;
  under_way[0] = 0;
}

int trials_print(void **state) {
  (void)state;
  if (under_way[0]) printf("FA3_TEST_TRIAL=%" PRIu64 ": %s\n", under_way_number, under_way);
  return 0;
}
