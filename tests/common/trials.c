#include "trials.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static double worst[FA3_BFLOAT16 + 1];
static char under_way[TRIALS_TEXT + 64]; /* empty between trials */

static void print_under_way(void) {
  if (!under_way[0]) return;
  if (write(STDOUT_FILENO, under_way, strlen(under_way)) < 0 || write(STDOUT_FILENO, "\n", 1) < 0)
    _exit(1);
}

/* Whoever ends a test that takes too long is told what it was at. */
static void stop(int signal) {
  print_under_way();
  _exit(128 + signal);
}

void trials_run(void (*run)(uint64_t number), int first, int step, int count) {
  (void)signal(SIGTERM, stop);
  const char *only = getenv("FA3_TEST_TRIAL");
  if (only)
    run(strtoull(only, NULL, 0));
  else
    for (int number = first; number < count; number += step) run((uint64_t)number);
  printf("largest error as a fraction of its bound: float32 %.3f, float16 %.3f, bfloat16 %.3f\n",
         worst[FA3_FLOAT32], worst[FA3_FLOAT16], worst[FA3_BFLOAT16]);
}

char *trials_begin(uint64_t number) {
  const int length = snprintf(under_way, sizeof under_way, "FA3_TEST_TRIAL=%" PRIu64 ": ", number);
  return under_way + length;
}

void trials_end(fa3_dtype dtype, double ratio) {
  if (ratio > worst[dtype]) worst[dtype] = ratio;
  under_way[0] = 0;
}

int trials_print(void **state) {
  (void)state;
  (void)fflush(stdout);
  print_under_way();
  return 0;
}
