#include "bench_report.h"

#include <inttypes.h>
#include <stdio.h>

#include "device.h"
#include "dtype.h"
#include "failure.h"
#include "json.h"

void report_begin(struct report *report, fa3_device device) {
  char name[32];
  fa3_device_info info = {.struct_size = sizeof info};
  (void)fa3_get_device_info(device, &info);
  int32_t units = report->num_threads ? report->num_threads : info.units;
  (void)device_name(device, name);
  (void)snprintf(report->title, sizeof report->title, "fa3 %s, %s%s (%s): TFLOP/s", fa3_version(),
                 report->backward ? "backward pass on " : "", info.name, info.level);
  if (!report->json) {
    printf("fa3 %s on %s (%s, %s), %" PRId32 " %s; %s%smedian of %" PRId64
           " runs on the same tensors\n\n",
           fa3_version(), name, info.name, info.level, units,
           device.type == FA3_CPU ? "threads" : "SMs",
           report->backward ? "backward pass, "
           : report->decode ? "one query of each sequence, "
                            : "",
           report->deterministic ? "deterministic, " : "", report->repeat);
    if (report->decode)
      printf("%-5s %5s %7s %5s %7s %8s %5s %10s %7s %8s %8s %6s\n", "cache", "batch", "keys",
             "heads", "heads_k", "head_dim", "page", "median us", "spread", "GB/s", "read",
             "ratio");
    else
      printf("%-5s %5s %6s %5s %7s %8s %6s %11s %7s %8s\n", "dtype", "batch", "seqlen", "heads",
             "heads_k", "head_dim", "causal", "median ms", "spread", "TFLOP/s");
    return;
  }
  yyjson_mut_val *root = json_begin(&report->document);
  yyjson_mut_obj_add_str(report->document, root, "version", fa3_version());
  yyjson_mut_obj_add_strcpy(report->document, root, "device", name);
  yyjson_mut_obj_add_strcpy(report->document, root, "name", info.name);
  yyjson_mut_obj_add_strcpy(report->document, root, "level", info.level);
  yyjson_mut_obj_add_int(report->document, root, "units", units);
  yyjson_mut_obj_add_int(report->document, root, "repeat", report->repeat);
  yyjson_mut_obj_add_str(report->document, root, "phase",
                         report->backward ? "backward"
                         : report->decode ? "decode"
                                          : "forward");
  yyjson_mut_obj_add_bool(report->document, root, "deterministic_asked", report->deterministic);
  report->results = yyjson_mut_obj_add_arr(report->document, root, "results");
}

/* Of a decode call: the cache's bytes in a second, beside those of a plain read. */
static void print_decode(const struct bench_cell *cell, const struct bench_times *times) {
  const double bytes = bench_cache_bytes(cell);
  char page[24] = "-", read[16] = "-", ratio[16] = "-";
  if (cell->page_size) (void)snprintf(page, sizeof page, "%" PRId64, cell->page_size);
  if (times->read > 0) {
    (void)snprintf(read, sizeof read, "%.2f", bytes / times->read * 1e-9);
    (void)snprintf(ratio, sizeof ratio, "%.2f", times->read_ratio);
  }
  printf("%-5s %5" PRId64 " %7" PRId64 " %5" PRId64 " %7" PRId64 " %8" PRId64
         " %5s %10.1f %6.1f%% %8.2f %8s %6s\n",
         dtype_name(cell->cache_dtype), cell->batch, cell->keys, cell->heads, cell->heads_k,
         cell->head_dim, page, times->median * 1e6,
         (times->upper - times->lower) / times->median * 100, bytes / times->median * 1e-9, read,
         ratio);
  (void)fflush(stdout);
}

static void add_decode(yyjson_mut_doc *document, yyjson_mut_val *entry,
                       const struct bench_cell *cell, const struct bench_times *times) {
  const double bytes = bench_cache_bytes(cell);
  yyjson_mut_obj_add_str(document, entry, "cache_dtype", dtype_name(cell->cache_dtype));
  yyjson_mut_obj_add_int(document, entry, "keys", cell->keys);
  yyjson_mut_obj_add_int(document, entry, "page_size", cell->page_size);
  yyjson_mut_obj_add_real(document, entry, "bytes", bytes);
  yyjson_mut_obj_add_real(document, entry, "gigabytes_per_second", bytes / times->median * 1e-9);
  if (times->read <= 0) return;
  yyjson_mut_obj_add_real(document, entry, "read_seconds_median", times->read);
  yyjson_mut_obj_add_real(document, entry, "read_gigabytes_per_second", bytes / times->read * 1e-9);
  yyjson_mut_obj_add_real(document, entry, "ratio_to_read", times->read_ratio);
}

void report_cell(struct report *report, const struct bench_cell *cell,
                 const struct bench_times *times) {
  double tflops = bench_flops(cell) / times->median * 1e-12;
  struct bench_bar *bar = &report->bars[report->bar_count++];
  (void)snprintf(bar->label, sizeof bar->label, "%s, head dim %" PRId64 ", seqlen %" PRId64 "%s",
                 dtype_name(cell->dtype), cell->head_dim, cell->seqlen,
                 cell->causal ? ", causal" : "");
  bar->tflops = tflops;
  double spread = (times->upper - times->lower) / times->median;
  if (!report->json && report->decode) {
    print_decode(cell, times);
    return;
  }
  if (!report->json) {
    printf("%-5s %5" PRId64 " %6" PRId64 " %5" PRId64 " %7" PRId64 " %8" PRId64
           " %6s %11.3f %6.1f%% %8.3f\n",
           dtype_name(cell->dtype), cell->batch, cell->seqlen, cell->heads, cell->heads_k,
           cell->head_dim, cell->causal ? "yes" : "no", times->median * 1e3, spread * 100, tflops);
    (void)fflush(stdout);
    return;
  }
  yyjson_mut_doc *document = report->document;
  yyjson_mut_val *entry = yyjson_mut_arr_add_obj(document, report->results);
  yyjson_mut_obj_add_str(document, entry, "dtype", dtype_name(cell->dtype));
  yyjson_mut_obj_add_int(document, entry, "batch", cell->batch);
  yyjson_mut_obj_add_int(document, entry, "seqlen", cell->seqlen);
  yyjson_mut_obj_add_int(document, entry, "heads", cell->heads);
  yyjson_mut_obj_add_int(document, entry, "heads_k", cell->heads_k);
  yyjson_mut_obj_add_int(document, entry, "head_dim", cell->head_dim);
  yyjson_mut_obj_add_bool(document, entry, "causal", cell->causal);
  yyjson_mut_obj_add_real(document, entry, "flops", bench_flops(cell));
  yyjson_mut_obj_add_int(document, entry, "calls_per_run", times->calls);
  yyjson_mut_obj_add_real(document, entry, "seconds_min", times->min);
  yyjson_mut_obj_add_real(document, entry, "seconds_lower_quartile", times->lower);
  yyjson_mut_obj_add_real(document, entry, "seconds_median", times->median);
  yyjson_mut_obj_add_real(document, entry, "seconds_upper_quartile", times->upper);
  yyjson_mut_obj_add_real(document, entry, "seconds_max", times->max);
  yyjson_mut_obj_add_real(document, entry, "tflops", tflops);
  if (report->decode) add_decode(document, entry, cell, times);
}

static int draw_plot(struct report *report) {
  TRY(bench_plot_write(&report->plot, report->title, report->bars, report->bar_count));
  return output_file_commit(&report->plot);
}

int report_end(struct report *report) {
  if (report->plot.path) TRY(draw_plot(report));
  if (!report->json) {
    printf("\neach result was checked against float64 on a sample of rows: within its bound\n");
    return 0;
  }
  const int code = json_print(report->document);
  report->document = NULL;
  return code;
}
