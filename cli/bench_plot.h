/* A benchmark's speeds as a picture. */
#ifndef FA3_CLI_BENCH_PLOT_H
#define FA3_CLI_BENCH_PLOT_H

#include <stddef.h>

#include "output_file.h"

struct bench_bar {
  char label[64];
  double tflops;
};

/* An SVG with a bar for each, its name on the left and its value on the right. */
int bench_plot_write(const struct output_file *file, const char *title,
                     const struct bench_bar *bars, size_t count);

#endif
