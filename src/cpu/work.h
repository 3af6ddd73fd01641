/* How much there is to do, and on how many threads it is worth doing. */
#ifndef FA3_CPU_WORK_H
#define FA3_CPU_WORK_H

#include "problem.h"

/* What all sequences of a batch ask for. */
struct work {
  int64_t longest_q;
  int64_t longest_k;
  double multiply_adds; /* of the forward pass, at most */
};

/* Reads the lengths. */
struct work work_of(const struct problem *problem);

/* The longest sequence of queries, or of new rows. */
int64_t work_longest_query(const struct problem *problem);

/* As many threads as the call allows and a problem of this size can be worth, whatever the lengths
 * say; never fewer when an extent grows. */
int32_t work_most_threads(const struct problem *problem);

/* As many of them as have enough to do. */
int32_t work_threads(const struct work *work, int32_t most);

/* Whether its caller may do all of it where threads are crowded. */
bool work_is_short(const struct work *work);

/* Of a call of so many tasks that are each worth a thread: at least 1. */
int32_t work_task_threads(const struct problem *problem, int64_t tasks);

#endif
