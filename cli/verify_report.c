#include "verify_report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "failure.h"
#include "json.h"

struct verify_report verify_report_begin(bool json) {
  struct verify_report report = {0};
  if (!json) return report;
  report.root = json_begin(&report.document);
  yyjson_mut_obj_add_str(report.document, report.root, "version", fa3_version());
  report.tensors = yyjson_mut_obj_add_arr(report.document, report.root, "tensors");
  return report;
}

void verify_report_device(const struct verify_report *report, const char *device,
                          const fa3_device_info *info) {
  if (!report->document) {
    printf("computed on %s (%s, %s)\n", device, info->name, info->level);
    return;
  }
  yyjson_mut_obj_add_strcpy(report->document, report->root, "device", device);
  yyjson_mut_obj_add_strcpy(report->document, report->root, "name", info->name);
  yyjson_mut_obj_add_strcpy(report->document, report->root, "level", info->level);
}

void verify_report_rows(const struct verify_report *report, int64_t rows, int64_t total,
                        uint64_t seed) {
  if (!report->document) {
    printf("rows     %" PRId64 " of %" PRId64 " checked against float64 (seed %" PRIu64 ")\n", rows,
           total, seed);
    return;
  }
  yyjson_mut_obj_add_int(report->document, report->root, "rows", rows);
  yyjson_mut_obj_add_int(report->document, report->root, "rows_in_all", total);
  yyjson_mut_obj_add_uint(report->document, report->root, "seed", seed);
}

static double rms_of(const struct error_statistics *statistics) {
  return statistics->count ? sqrt(statistics->sum_squares / (double)statistics->count) : 0;
}

static void print_tensor(const char *name, const struct error_statistics *statistics) {
  const int64_t *at = statistics->worst.at;
  printf("%-8s %" PRId64 " values: max error %.3g, rms %.3g\n", name, statistics->count,
         statistics->max_error, rms_of(statistics));
  if (statistics->any_bound)
    printf("         %s its bound: error %.3g of %.3g at batch %" PRId64 ", row %" PRId64
           ", head %" PRId64 ", column %" PRId64 "\n",
           statistics->outside ? "first beyond" : "closest to", statistics->worst.error,
           statistics->worst.bound, at[0], at[1], at[2], at[3]);
  if (statistics->nan)
    printf("         %" PRId64 " values are NaN, as they should be\n", statistics->nan);
  if (statistics->unbounded)
    printf("         %" PRId64 " more have no bound\n", statistics->unbounded);
}

/* JSON has no infinity and no NaN: null. */
static void add_real(yyjson_mut_doc *document, yyjson_mut_val *object, const char *name,
                     double value) {
  if (isfinite(value))
    yyjson_mut_obj_add_real(document, object, name, value);
  else
    yyjson_mut_obj_add_null(document, object, name);
}

void verify_report_tensor(const struct verify_report *report, const char *name,
                          const struct error_statistics *statistics) {
  yyjson_mut_doc *document = report->document;
  if (!document) {
    print_tensor(name, statistics);
    return;
  }
  yyjson_mut_val *entry = yyjson_mut_arr_add_obj(document, report->tensors);
  yyjson_mut_obj_add_strcpy(document, entry, "tensor", name);
  yyjson_mut_obj_add_int(document, entry, "values", statistics->count);
  yyjson_mut_obj_add_int(document, entry, "beyond_bound", statistics->outside);
  yyjson_mut_obj_add_int(document, entry, "without_bound", statistics->unbounded);
  yyjson_mut_obj_add_int(document, entry, "nan", statistics->nan);
  add_real(document, entry, "max_error", statistics->max_error);
  add_real(document, entry, "rms_error", rms_of(statistics));
  if (!statistics->any_bound) return;
  yyjson_mut_val *worst = yyjson_mut_obj_add_obj(document, entry, "closest_to_bound");
  static const char *const places[] = {"batch", "row", "head", "column"};
  for (int i = 0; i < 4; i++)
    yyjson_mut_obj_add_int(document, worst, places[i], statistics->worst.at[i]);
  add_real(document, worst, "value", statistics->worst.value);
  add_real(document, worst, "expected", statistics->worst.expected);
  add_real(document, worst, "error", statistics->worst.error);
  add_real(document, worst, "bound", statistics->worst.bound);
}

void verify_report_originals(const struct verify_report *report,
                             const struct error_statistics *statistics) {
  if (!report->document) {
    printf("output   beside that of the originals: max error %.3g, rms %.3g\n",
           statistics->max_error, rms_of(statistics));
    return;
  }
  yyjson_mut_val *entry = yyjson_mut_obj_add_obj(report->document, report->root, "originals");
  add_real(report->document, entry, "max_error", statistics->max_error);
  add_real(report->document, entry, "rms_error", rms_of(statistics));
}

int verify_report_end(struct verify_report *report, int code) {
  const bool none = code == EXIT_NO_BOUND;
  if (!report->document) {
    printf("verdict  %s\n", none   ? "none: not every value has a bound"
                            : code ? "WRONG"
                                   : "correct: every value checked is within its bound");
    return code;
  }
  yyjson_mut_obj_add_str(report->document, report->root, "verdict",
                         none   ? "none"
                         : code ? "wrong"
                                : "correct");
  if (code) yyjson_mut_obj_add_strcpy(report->document, report->root, "reason", failure_text());
  const int failed = json_print(report->document);
  report->document = NULL;
  return failed ? failed : code;
}
