/* The counters that forward kernels take their tiles from, without a memset before each launch. */
#ifndef FA3_SRC_CUDA_TILE_COUNTER_H
#define FA3_SRC_CUDA_TILE_COUNTER_H

#include "cuda/context.h"

/* The counter that the kernel keeps for the launches of the scope's stream, or for those of a call
 * that is captured, whose graph may be launched into any stream; it is zero whenever one of them
 * begins. Null where there is none: in a context that is not the device's primary one, for streams
 * beyond the first thousand or so that the process ever used, on all devices, and for calls beyond
 * the first thirty thousand that it captured. In scope. */
unsigned *cuda_tile_counter(const struct cuda_scope *scope, const struct kernel *kernel);

#endif
