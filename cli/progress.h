/* A bar on stderr with an estimate of the time left, if that is a terminal. */
#ifndef FA3_CLI_PROGRESS_H
#define FA3_CLI_PROGRESS_H

#include <stdbool.h>

struct progress {
  bool shown; /* false: every function below does nothing */
  const char *label;
  double total;
  double done;
  double start; /* seconds */
  double drawn;
};

/* A monotonic clock, in seconds. */
double seconds_now(void);

void progress_begin(struct progress *progress, const char *label, double total);
void progress_add(struct progress *progress, double amount);
/* Wipes the bar, so that something else can be printed; the next progress_add draws it again. */
void progress_clear(struct progress *progress);

#endif
