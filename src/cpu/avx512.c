/* AVX-512: float32 arithmetic for every dtype. AVX512-FP16 is not used: it accumulates in
 * float16, and both products accumulate in float32 here. */
#include "routines.h"
#include "vector_avx512.h"
#include "float_routines.h"

void avx512_few_rows(const struct few_rows_step *step) {
  few_rows(step);
}

void avx512_few_order(float *row, int64_t width, fa3_dtype dtype, bool back) {
  few_order(row, width, dtype, back);
}

const struct routines avx512_routines = FLOAT_ROUTINES;
