#include "progress.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
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

static int terminal_columns(void) {
  struct winsize size;
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

/* As wide as the terminal has room for beside the words, so that it stays in one line. */
static void draw(const struct progress *progress, double fraction, double elapsed) {
  static const char cells[] = "##############################..............................";
  const long left = fraction > 0 ? (long)(elapsed / fraction - elapsed + 0.5) : 0;
  char words[40];
  const int length = snprintf(words, sizeof words, "%3d%%, %ld:%02ld left", (int)(fraction * 100),
                              left / 60, left % 60);
  int count = terminal_columns() - (int)strlen(progress->label) - length - 5;
  if (count > CELLS) count = CELLS;
  if (count < 1) {
    (void)fprintf(stderr, "\r\033[K%s", words);
  } else {
    const int filled = (int)(fraction * count);
    (void)fprintf(stderr, "\r\033[K%s [%.*s] %s", progress->label, count, cells + CELLS - filled,
                  words);
  }
  (void)fflush(stderr);
}

void progress_add(struct progress *progress, double amount) {
  if (!progress->shown) return;
  progress->done += amount;
  const double now = seconds_now(), elapsed = now - progress->start;
  if (elapsed < first_drawing || now - progress->drawn < interval) return;
  progress->drawn = now;
  const double fraction = progress->done / progress->total;
  draw(progress, fraction > 1 ? 1 : fraction, elapsed);
}

void progress_clear(struct progress *progress) {
  if (!progress->shown || progress->drawn == 0) return;
  (void)fprintf(stderr, "\r\033[K");
  (void)fflush(stderr);
  progress->drawn = 0;
}
