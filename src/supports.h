/* What calls may ask for, where all engines take the same. */
#ifndef FA3_SRC_SUPPORTS_H
#define FA3_SRC_SUPPORTS_H

#include "fa3.h"

/* FA3_UNSUPPORTED, with the reason, for what no engine takes. */
fa3_status supports_quantize(const fa3_capability *capability);
fa3_status supports_append(const fa3_capability *capability);
fa3_status supports_combine(const fa3_capability *capability);

/* Of attention, and of a cache of E4M3: head dims in steps of 8, of E4M3 of 16. */
fa3_status supports_head_dims(const fa3_capability *capability);

#endif
