/* --fp8: query, key and value become E4M3 codes before the attention. */
#ifndef FA3_CLI_FP8_H
#define FA3_CLI_FP8_H

#include <argp.h>

#include "coded.h"

struct fp8_options {
  bool given;
  struct coding coding;
};

/* A child of a command's argp; its input is a struct fp8_options. */
extern const struct argp fp8_argp;

/* Puts codes and scales, yet to be made, in the place of query, key and value. */
int fp8_prepare(const struct coding *coding, struct operands *operands);

#endif
