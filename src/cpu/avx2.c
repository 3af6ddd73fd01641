/* AVX2, FMA and F16C: float32 arithmetic for every dtype. */
#include "routines.h"
#include "vector_avx2.h"
#include "float_routines.h"

const struct routines avx2_routines = FLOAT_ROUTINES;
