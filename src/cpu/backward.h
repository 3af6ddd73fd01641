/* The backward pass, on any level's routines. */
#ifndef FA3_CPU_BACKWARD_H
#define FA3_CPU_BACKWARD_H

#include "plan.h"
#include "problem.h"
#include "routines.h"

fa3_status cpu_plan_backward(const struct problem *problem, const struct routines *routines,
                             struct cpu_plan *plan);
void cpu_backward(const struct problem *problem, const struct routines *routines,
                  const struct cpu_plan *plan, void *workspace);

#endif
