#include "append.h"

#include <string.h>

#include "cache.h"
#include "integer.h"
#include "processors.h"
#include "rotary.h"
#include "threads.h"

/* A thread's task; fewer rows are not worth waking one. */
enum { ROWS_OF_TASK = 16 };

static int32_t threads_of(const struct problem *problem, int64_t tasks) {
  const int32_t threads = problem->num_threads ? problem->num_threads : default_threads();
  return (int32_t)larger(smaller(smaller(threads, MOST_THREADS), tasks), 1);
}

static void append_row(const struct problem *problem, const struct sequence *sequence,
                       int64_t row) {
  const bool turned = problem->rotary_cos.dtype;
  const int64_t at = sequence->row_q + row, key = sequence->mask.seqlen_k + row;
  const int64_t position = turned ? problem_position(problem, sequence, row) : 0;
  for (int64_t head = 0; head < problem->heads_k; head++) {
    const char *from = element(&problem->new_key, sequence->batch_q, at, head);
    char *to = cache_row(&problem->key, sequence, key, head);
    if (turned)
      turn_head(problem, from, problem->new_key.dtype, position, to, problem->key.dtype);
    else
      memcpy(to, from, (size_t)(problem->head_dim * element_size(&problem->key)));
    memcpy(cache_row(&problem->value, sequence, key, head),
           element(&problem->new_value, sequence->batch_q, at, head),
           (size_t)(problem->value_head_dim * element_size(&problem->value)));
  }
  for (int64_t head = 0; head < problem->query.heads; head++)
    turn_head(problem, element(&problem->query, sequence->batch_q, at, head), problem->query.dtype,
              position, element(&problem->rotated_query, sequence->batch_q, at, head),
              problem->rotated_query.dtype);
}

struct append_call {
  const struct problem *problem;
  int64_t parts; /* of the longest sequence */
};

static void append_part(void *argument, int64_t task, int32_t place) {
  const struct append_call *call = argument;
  const struct sequence sequence = problem_sequence(call->problem, task / call->parts);
  const int64_t first = task % call->parts * ROWS_OF_TASK;
  (void)place;
  for (int64_t row = first; row < smaller(sequence.seqlen_q, first + ROWS_OF_TASK); row++)
    append_row(call->problem, &sequence, row);
}

void cpu_append(const struct problem *problem) {
  int64_t longest = 0;
  for (int64_t batch = 0; batch < problem->batch; batch++)
    longest = larger(longest, problem_sequence(problem, batch).seqlen_q);
  struct append_call call = {problem, divide_up(longest, ROWS_OF_TASK)};
  const int64_t tasks = problem->batch * call.parts;
  if (tasks) threads_for(threads_of(problem, tasks), tasks, append_part, &call);
}
