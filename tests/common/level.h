/* The processor level that a test runs at, from FA3_CPU_LEVEL. */
#ifndef FA3_TESTS_LEVEL_H
#define FA3_TESTS_LEVEL_H

#include <stdbool.h>

/* The engine has such a level, and this machine can run it. */
bool level_usable(const char *level);

/* Leaves the program with TEST_SKIPPED if FA3_CPU_LEVEL is set to a level that this machine can't
 * run; fails if the engine does not then run at that level. */
void level_require(void);

#endif
