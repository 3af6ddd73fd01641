/* Structs that cross the API: the caller's may be older (shorter) or newer (longer) than ours. */
#ifndef FA3_SRC_STRUCTS_H
#define FA3_SRC_STRUCTS_H

#include "fa3.h"

/* Copies a caller's struct, which begins with its size, into ours. `oldest` is the size that its
 * first version had, `known` ours. */
fa3_status struct_read(const char *name, const void *theirs, void *ours, size_t oldest,
                       size_t known);

/* Hands our struct to the caller, whose struct_size stays as it was set. */
fa3_status struct_write(const char *name, void *theirs, const void *ours, size_t oldest,
                        size_t known);

#endif
