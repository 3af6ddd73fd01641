/* AVX-512: float32 arithmetic for every dtype. AVX512-FP16 is not used: it accumulates in
 * float16, and both products accumulate in float32 here. */
#include "routines.h"
#include "vector_avx512.h"
#include "float_routines.h"

const struct routines avx512_routines = FLOAT_ROUTINES;
