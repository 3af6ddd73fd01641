/* From tensor descriptors to operands, with the checks of what an operand can be. */
#ifndef FA3_SRC_OPERAND_H
#define FA3_SRC_OPERAND_H

#include "problem.h"

/* Rank 4 is (batch, row, head, dim); rank 3, packed, is (row, head, dim). */
struct operand make_operand(const fa3_tensor *tensor);

/* Dtype, rank, and that there are heads and dims. `lengths` is the argument that packs it. */
fa3_status check_operand(const char *name, const fa3_tensor *tensor, bool packed,
                         const char *lengths);

/* A float per query row, laid out as lse is: (batch, heads_q, seqlen_q), or (heads_q, total_q). */
fa3_status read_row_values(const char *name, const fa3_tensor *tensor,
                           const struct problem *problem, struct operand *operand);

/* A vector with a number per query head: float32 or query's dtype. */
fa3_status read_head_values(const char *name, const fa3_tensor *tensor,
                            const struct problem *problem, struct operand *operand);

#endif
