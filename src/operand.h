/* From the tensors of an argument struct to a problem's, by the rules of tensors.def. */
#ifndef FA3_SRC_OPERAND_H
#define FA3_SRC_OPERAND_H

#include "problem.h"

/* Reads and checks the tensors of the problem's phase: presence, dtypes, shapes against each other,
 * strides. Fills in the problem's tensors, its extents, and the features that tensors ask for. */
fa3_status read_tensors(const void *args, struct problem *problem);

#endif
