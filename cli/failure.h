/* How every part of the program fails: one line of text, and the exit code that goes with it. */
#ifndef FA3_CLI_FAILURE_H
#define FA3_CLI_FAILURE_H

/* Exit codes, as in the manual page. */
enum {
  EXIT_DIFFERS = 1,     /* an output is further from the reference than its bound */
  EXIT_USAGE = 2,       /* wrong options */
  EXIT_INPUT = 3,       /* an input can't be read, is malformed, or does not match the others */
  EXIT_OUTPUT = 4,      /* an output can't be written */
  EXIT_UNSUPPORTED = 5, /* this machine, build or engine can't do it */
  EXIT_FAILED = 6,      /* it failed while running */
  EXIT_NO_BOUND = 7     /* no output is wrong, but there are values without a bound */
};

/* Keeps the text for failure_text and returns `code`. %m is errno's message. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The last failure's text. Control characters, which names in a file may hold, show as '?'. */
const char *failure_text(void);

/* Returns from the calling function if `call` failed. */
#define TRY(call)                  \
  do {                             \
    int try_code = (call);         \
    if (try_code) return try_code; \
  } while (0)

#endif
