/* What a command prints with --json. */
#ifndef FA3_CLI_JSON_H
#define FA3_CLI_JSON_H

#include <yyjson.h>

/* A new document with an object as its root, which is returned. */
yyjson_mut_val *json_begin(yyjson_mut_doc **document);

/* Prints the document and frees it. */
int json_print(yyjson_mut_doc *document);

#endif
