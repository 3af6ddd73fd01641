/* What every call does before and after its arguments are read: engine, plan, workspace. */
#ifndef FA3_SRC_CALL_H
#define FA3_SRC_CALL_H

#include "engine.h"

/* The engine that takes the problem, ready, and how it will run. */
fa3_status plan_call(const struct problem *problem, const struct engine **engine,
                     struct plan *plan);

fa3_status check_workspace(const struct plan *plan, const void *workspace, size_t size);

#endif
