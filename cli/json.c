#include "json.h"

#include <stdio.h>

#include "failure.h"

int json_print(yyjson_mut_doc *document) {
  const yyjson_write_flag flags = YYJSON_WRITE_PRETTY_TWO_SPACES | YYJSON_WRITE_NEWLINE_AT_END;
  const bool written = yyjson_mut_write_fp(stdout, document, flags, NULL, NULL);
  yyjson_mut_doc_free(document);
  return written ? 0 : fail(EXIT_OUTPUT, "standard output: not all was written");
}
