#include "dtype.h"

#include <string.h>

static const struct {
  const char *name;
  const char *long_name; /* NumPy's and PyTorch's */
  fa3_dtype dtype;
} dtypes[] = {{"fp32", "float32", FA3_FLOAT32},
              {"fp16", "float16", FA3_FLOAT16},
              {"bf16", "bfloat16", FA3_BFLOAT16}};
enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

const char *dtype_name(fa3_dtype dtype) {
  for (int i = 0; i < DTYPES; i++)
    if (dtypes[i].dtype == dtype) return dtypes[i].name;
  return dtype == FA3_FLOAT8_E4M3 ? "e4m3" : "?";
}

fa3_dtype dtype_from_name(const char *name) {
  for (int i = 0; i < DTYPES; i++)
    if (strcmp(dtypes[i].name, name) == 0 || strcmp(dtypes[i].long_name, name) == 0)
      return dtypes[i].dtype;
  return 0;
}
