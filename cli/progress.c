#include "progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { CELLS = 30 };
static const double first_drawing = 0.5; /* what takes less needs no bar */
static const double interval = 0.1;

double seconds_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void progress_begin(struct progress *progress, const char *label, double total) {
  *progress = (struct progress){.shown = isatty(STDERR_FILENO) && total > 0,
                                .label = label,
                                .total = total,
                                .start = seconds_now()};
}

void progress_add(struct progress *progress, double amount) {
  static const char cells[] = "##############################..............................";
  if (!progress->shown) return;
  progress->done += amount;
  double now = seconds_now();
  double elapsed = now - progress->start;
  double fraction = progress->done / progress->total;
  if (elapsed < first_drawing || now - progress->drawn < interval) return;
  progress->drawn = now;
  if (fraction > 1) fraction = 1;
  int filled = (int)(fraction * CELLS);
  long left = fraction > 0 ? (long)(elapsed / fraction - elapsed + 0.5) : 0;
  (void)fprintf(stderr, "\r%s [%.*s] %3d%%, %ld:%02ld left ", progress->label, CELLS,
                cells + CELLS - filled, (int)(fraction * 100), left / 60, left % 60);
  (void)fflush(stderr);
}

void progress_clear(struct progress *progress) {
  if (!progress->shown || progress->drawn == 0) return;
  (void)fprintf(stderr, "\r%79s\r", "");
  (void)fflush(stderr);
  progress->drawn = 0;
}
