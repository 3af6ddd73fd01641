/* Integers: lengths, starts, diagonals, pages. */
#ifndef FA3_CLI_LENGTHS_H
#define FA3_CLI_LENGTHS_H

#include "loaded_tensor.h"

/* `source` is a list such as 0,5,9 or a tensor of int32 or int64; what is read is `dtype`, one of
 * the two. `option` is a list's name in messages. */
int lengths_read(const char *source, const struct source_rules *rules, const char *const *names,
                 const char *option, fa3_dtype dtype, struct loaded_tensor *lengths);

/* The longest of the packed sequences, but 1 at least: what fa3_forward_args has no other way to
 * know on a GPU. 0 if there are no starts. They have been checked. */
int64_t lengths_longest(const fa3_tensor *starts);

#endif
