/* cmocka with the headers that it needs. */
#ifndef FA3_TESTS_TEST_H
#define FA3_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* What CTest takes as "skipped" (SKIP_RETURN_CODE). */
enum { TEST_SKIPPED = 77 };

#endif
