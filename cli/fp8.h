/* --fp8: query, key and value become E4M3 codes before the attention. */
#ifndef FA3_CLI_FP8_H
#define FA3_CLI_FP8_H

#include "coded.h"
#include "operands.h"

#define FP8_HELP                                                                               \
  "Make E4M3 codes of query, key and value first, as fa3 quantize does, with a scale for 128 " \
  "rows "                                                                                      \
  "of a head; rotate: rotate query and key before that"

/* What --fp8 may be followed by; null is the option alone. False for anything else. */
bool fp8_parse(const char *text, struct coding *coding);

/* Puts codes and scales, yet to be made, in the place of query, key and value, which become the
 * originals. */
int fp8_prepare(const struct coding *coding, struct operands *operands);

/* Makes them, on the device that was chosen. */
int fp8_quantize(const struct operands *operands);

#endif
