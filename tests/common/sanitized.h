/* Whether a sanitizer watches. It makes a test many times slower, and looks for faults of memory
 * and threads, not for the last digit: fewer rows are then compared with the reference, which takes
 * most of the time. */
#ifndef FA3_TESTS_SANITIZED_H
#define FA3_TESTS_SANITIZED_H

#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FA3_SANITIZED
#endif
#endif

#ifdef FA3_SANITIZED
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

#endif
