#include "json.h"

#include <stdio.h>

#include "failure.h"

yyjson_mut_val *json_begin(yyjson_mut_doc **document) {
  *document = yyjson_mut_doc_new(NULL);
  yyjson_mut_val *root = yyjson_mut_obj(*document);
  yyjson_mut_doc_set_root(*document, root);
  return root;
}

int json_print(yyjson_mut_doc *document) {
  const yyjson_write_flag flags = YYJSON_WRITE_PRETTY_TWO_SPACES | YYJSON_WRITE_NEWLINE_AT_END;
  const bool written = yyjson_mut_write_fp(stdout, document, flags, NULL, NULL);
  yyjson_mut_doc_free(document);
  return written ? 0 : fail(EXIT_OUTPUT, "standard output: not all was written");
}
