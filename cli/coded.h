/* Tensors that become E4M3 codes and their scales. */
#ifndef FA3_CLI_CODED_H
#define FA3_CLI_CODED_H

#include "library.h"
#include "loaded_tensor.h"

enum { SCALE_PER_SEQUENCE = 0, SCALE_PER_TENSOR = -1 };

struct coding {
  int64_t rows; /* that share a scale, or one of the above */
  bool rotate;
  bool subtract_mean;
  uint64_t seed; /* of the rotation */
};

struct coded {
  struct loaded_tensor codes;
  struct loaded_tensor scale;
  struct call call; /* makes them */
};

/* Makes room for the codes of a tensor, and the call. `view` is the tensor as the library takes it,
 * `starts` (batch + 1) where its sequences begin if it is packed, else without a dimension. */
int coded_make(const struct loaded_tensor *tensor, const fa3_tensor *view, const fa3_tensor *starts,
               const struct coding *coding, struct coded *coded);

#endif
