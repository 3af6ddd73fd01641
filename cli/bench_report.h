/* What `fa3 bench` prints and draws of its cells. */
#ifndef FA3_CLI_BENCH_REPORT_H
#define FA3_CLI_BENCH_REPORT_H

#include <yyjson.h>

#include "bench_cell.h"
#include "bench_plot.h"

enum { MAX_LIST = 16, MAX_DTYPES = 4 };

struct report {
  bool json;
  bool decode;
  bool backward;
  bool deterministic;
  int64_t repeat;
  int32_t num_threads; /* 0: the default */
  yyjson_mut_doc *document;
  yyjson_mut_val *results;
  struct output_file plot;
  char title[320];
  struct bench_bar bars[MAX_LIST * MAX_LIST * MAX_DTYPES];
  size_t bar_count;
};

/* The fields up to num_threads are set, and the plot is begun if there is to be one. */
void report_begin(struct report *report, fa3_device device);
void report_cell(struct report *report, const struct bench_cell *cell,
                 const struct bench_times *times);
int report_end(struct report *report);

#endif
