/* What fa3 verify says of what it compared, as text or as JSON. */
#ifndef FA3_CLI_VERIFY_REPORT_H
#define FA3_CLI_VERIFY_REPORT_H

#include <yyjson.h>

#include "comparison.h"

struct verify_report {
  yyjson_mut_doc *document; /* null: text */
  yyjson_mut_val *root;
  yyjson_mut_val *tensors;
};

struct verify_report verify_report_begin(bool json);
void verify_report_device(const struct verify_report *report, const char *device,
                          const fa3_device_info *info);
void verify_report_rows(const struct verify_report *report, int64_t rows, int64_t total,
                        uint64_t seed);
void verify_report_tensor(const struct verify_report *report, const char *name,
                          const struct error_statistics *statistics);

/* Of the output beside what the tensors before they were quantised give. */
void verify_report_originals(const struct verify_report *report,
                             const struct error_statistics *statistics);

/* The verdict by the exit code, whose text is failure_text's, and the end. Returns the code. */
int verify_report_end(struct verify_report *report, int code);

#endif
