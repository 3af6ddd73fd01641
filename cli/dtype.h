/* How options and tables call the dtypes. */
#ifndef FA3_CLI_DTYPE_H
#define FA3_CLI_DTYPE_H

#include "fa3.h"

/* "fp32", "fp16", "bf16", "e4m3"; "?" for others. */
const char *dtype_name(fa3_dtype dtype);

/* Of those that numbers can be converted to: e4m3 is not, as its scales would be missing. 0 if
 * there is none of that name. */
fa3_dtype dtype_from_name(const char *name);

#endif
