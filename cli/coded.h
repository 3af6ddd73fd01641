/* Tensors that become E4M3 codes and their scales. */
#ifndef FA3_CLI_CODED_H
#define FA3_CLI_CODED_H

#include "operands.h"

enum { SCALE_PER_SEQUENCE = 0, SCALE_PER_TENSOR = -1 };

struct coding {
  int64_t rows;       /* that share a scale, or one of the above */
  bool rotate;        /* query and key */
  bool subtract_mean; /* of the key */
  uint64_t seed;      /* of the rotation */
};

/* Puts codes and scales, yet to be made, in the place of query, key or value, which becomes one of
 * the originals. */
int coded_add(const struct coding *coding, enum tensor tensor, struct operands *operands);

/* Makes them, on the device that was chosen. */
int coded_run(const struct operands *operands);

/* Puts query, key and value as they were before they became codes in the place of those that
 * `operands`, a copy, has: those of a .safetensors file, which have to have their shapes, or with a
 * null file those of coded_add. Whatever comes of it, coded_free_originals frees them. */
int coded_read_originals(const struct attention_options *options, const char *file,
                         struct operands *operands);
void coded_free_originals(struct operands *operands);

#endif
