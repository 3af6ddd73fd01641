/* FA3_CHECK_DEVICE: lengths and pages that are a GPU's are looked at before a kernel reads them. */
#ifndef FA3_SRC_CUDA_CHECK_H
#define FA3_SRC_CUDA_CHECK_H

#include "cuda/context.h"

/* In scope: waits for the stream, and says of the contents of lengths, pages and positions what the
 * CPU engine does. */
fa3_status cuda_check_contents(const struct cuda_scope *scope, const struct problem *problem);

#endif
