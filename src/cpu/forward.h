/* The tile loop, on any level's routines. */
#ifndef FA3_CPU_FORWARD_H
#define FA3_CPU_FORWARD_H

#include "plan.h"
#include "problem.h"
#include "routines.h"

void cpu_plan_forward(const struct problem *problem, const struct routines *routines,
                      struct cpu_plan *plan);
void cpu_forward(const struct problem *problem, const struct routines *routines,
                 const struct cpu_plan *plan, void *workspace);

#endif
