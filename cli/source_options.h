/* How files are read: --in, --layout and --bf16, the same for every command that reads tensors. */
#ifndef FA3_CLI_SOURCE_OPTIONS_H
#define FA3_CLI_SOURCE_OPTIONS_H

#include <argp.h>

/* A child of a command's argp; its input is a struct source_rules. */
extern const struct argp source_argp;

#endif
