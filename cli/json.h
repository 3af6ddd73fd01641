/* What a command prints with --json. */
#ifndef FA3_CLI_JSON_H
#define FA3_CLI_JSON_H

#include <yyjson.h>

/* Prints the document and frees it. */
int json_print(yyjson_mut_doc *document);

#endif
