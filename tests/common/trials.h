/* A test's loop over random trials, each by its number: FA3_TEST_SEED repeats a run, FA3_TEST_TRIAL
 * one trial of it. */
#ifndef FA3_TESTS_TRIALS_H
#define FA3_TESTS_TRIALS_H

#include <stdint.h>

#include "fa3.h"

/* Runs trials first, first + step, ... below `count`, or FA3_TEST_TRIAL's alone, and prints the
 * largest errors. SIGTERM prints the trial that is under way and ends the process. */
void trials_run(void (*run)(uint64_t number), int first, int step, int count);

/* A run begins with it, and describes the trial where it says: TRIALS_TEXT bytes. */
enum { TRIALS_TEXT = 800 };
char *trials_begin(uint64_t number);

/* And ends with its largest error as a fraction of the bound. */
void trials_end(fa3_dtype dtype, double ratio);

/* A teardown: prints the trial that has begun and not ended. */
int trials_print(void **state);

#endif
