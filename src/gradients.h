/* The backward pass's arguments: what it shares with the forward pass, and the gradients. */
#ifndef FA3_SRC_GRADIENTS_H
#define FA3_SRC_GRADIENTS_H

#include "problem.h"

/* What both passes have, from a forward call's arguments or from those that stand for it. */
fa3_status read_attention(const fa3_forward_args *args, fa3_phase phase, struct problem *problem);

fa3_status read_gradients(const fa3_backward_args *args, struct problem *problem);

#endif
