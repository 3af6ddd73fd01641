/* The tile loop, on any level's routines. */
#ifndef FA3_CPU_FORWARD_H
#define FA3_CPU_FORWARD_H

#include "plan.h"
#include "problem.h"
#include "routines.h"

/* `few` are the routines that few queries take, `backward` those that a backward call after this
 * one takes. */
void cpu_plan_forward(const struct problem *problem, const struct routines *routines,
                      const struct routines *backward, struct cpu_plan *plan);
void cpu_forward(const struct problem *problem, const struct routines *routines,
                 const struct routines *few, const struct routines *backward,
                 const struct cpu_plan *plan, void *workspace);

#endif
