/* The tile loop, on any level's routines. */
#ifndef FA3_CPU_FORWARD_H
#define FA3_CPU_FORWARD_H

#include "engine.h"
#include "routines.h"

void cpu_plan(const struct problem *problem, const struct routines *routines, struct plan *plan);
void cpu_forward(const struct problem *problem, const struct routines *routines,
                 const struct plan *plan, void *workspace);

#endif
