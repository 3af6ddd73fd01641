/* The level for any processor. */
#include "routines.h"
#include "vector_plain.h"
#include "float_routines.h"

const struct routines plain_routines = FLOAT_ROUTINES;
