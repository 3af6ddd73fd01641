/* Checks of one tensor descriptor; each names the tensor and the field in its message. */
#ifndef FA3_SRC_VALIDATE_H
#define FA3_SRC_VALIDATE_H

#include <stdbool.h>

#include "fa3.h"

/* No extent is above this, so that sums of positions can't overflow. */
#define MAX_EXTENT ((int64_t)1 << 48)

/* An optional tensor that was not given: all zero. */
bool tensor_absent(const fa3_tensor *tensor);

/* Of queries, keys, values. */
bool dtype_is_float(fa3_dtype dtype);

/* Of what is computed: any of those but E4M3. */
bool dtype_is_wide(fa3_dtype dtype);

/* Rank, reserved fields, extents, strides, and that no offset overflows. */
fa3_status check_tensor(const char *name, const fa3_tensor *tensor, int32_t rank);

/* The same where the last dimension may have any stride too. */
fa3_status check_strided_tensor(const char *name, const fa3_tensor *tensor, int32_t rank);

/* That no two elements of an output share memory. */
fa3_status check_output_strides(const char *name, const fa3_tensor *tensor);

/* "FA3_FLOAT16", or "no dtype". */
const char *dtype_name(fa3_dtype dtype);

fa3_status check_float(const char *name, const fa3_tensor *tensor);
fa3_status check_wide(const char *name, const fa3_tensor *tensor);
fa3_status check_dtype(const char *name, const fa3_tensor *tensor, fa3_dtype expected);

/* The dtype of another tensor, `whose` it is called; or, of what is computed, float32. */
fa3_status check_same_dtype(const char *name, const fa3_tensor *tensor, const char *whose,
                            fa3_dtype expected);
fa3_status check_computed_dtype(const char *name, const fa3_tensor *tensor, const char *whose,
                                fa3_dtype expected);

/* Present and aligned to its element, unless there are no elements. */
fa3_status check_pointer(const char *name, const void *data, fa3_dtype dtype, bool empty);

#endif
