#include "append.h"

#include <string.h>

#include "cache.h"
#include "codes.h"
#include "head_dim.h"
#include "integer.h"
#include "rotary.h"
#include "scale.h"
#include "threads.h"
#include "work.h"

/* A thread's task; fewer rows are not worth waking one. */
enum { ROWS_OF_TASK = 16 };

/* A head of `width` numbers as codes: of the scale that is there, or of one of its own, which is
 * written. */
static void write_codes(const float *numbers, int64_t width, float *scale, bool of_its_own,
                        char *codes) {
  if (of_its_own) *scale = scale_for(largest_of_row(numbers, width, 0));
  const float divisor = scale && *scale != 0 ? *scale : 1; /* times 0 every code is 0 */
  encode_row(numbers, width, divisor, codes);
}

/* A new row's head, into a cache of codes. */
static void quantise_head(const struct problem *problem, const struct sequence *sequence,
                          int64_t row, int64_t head, int64_t position) {
  const int64_t at = sequence->row_q + row, key = sequence->mask.seqlen_k + row;
  const int64_t row_k = sequence->leftpad + key;
  const char *new_key = element(&problem->new_key, sequence->batch_q, at, head);
  const char *new_value = element(&problem->new_value, sequence->batch_q, at, head);
  const fa3_dtype dtype = problem->new_key.dtype;
  float numbers[LARGEST_HEAD_DIM];
  if (problem->rotary_cos.dtype)
    turn_head(problem, new_key, dtype, position, (char *)numbers, FA3_FLOAT32);
  else
    for (int64_t i = 0; i < problem->head_dim; i++) numbers[i] = load_element(new_key, dtype, i);
  write_codes(numbers, problem->head_dim, key_scale_at(problem, sequence, head, row_k),
              problem->key_scale_rows == 1, cache_row(&problem->key, sequence, key, head));
  for (int64_t i = 0; i < problem->value_head_dim; i++)
    numbers[i] = load_element(new_value, dtype, i);
  write_codes(numbers, problem->value_head_dim, value_scale_at(problem, sequence, head, row_k),
              problem->value_scale_rows == 1, cache_row(&problem->value, sequence, key, head));
}

static void append_row(const struct problem *problem, const struct sequence *sequence,
                       int64_t row) {
  const bool turned = problem->rotary_cos.dtype;
  const int64_t at = sequence->row_q + row, key = sequence->mask.seqlen_k + row;
  const int64_t position = turned ? problem_position(problem, sequence, row) : 0;
  const bool quantised =
      problem->key.dtype == FA3_FLOAT8_E4M3 && problem->new_key.dtype != FA3_FLOAT8_E4M3;
  for (int64_t head = 0; head < problem->heads_k; head++) {
    if (quantised) {
      quantise_head(problem, sequence, row, head, position);
      continue;
    }
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

static void append_part(void *argument, int64_t task, int32_t seat) {
  const struct append_call *call = argument;
  const struct sequence sequence = problem_sequence(call->problem, task / call->parts);
  const int64_t first = task % call->parts * ROWS_OF_TASK;
  (void)seat;
  for (int64_t row = first; row < smaller(sequence.seqlen_q, first + ROWS_OF_TASK); row++)
    append_row(call->problem, &sequence, row);
}

void cpu_append(const struct problem *problem) {
  struct append_call call = {problem, divide_up(work_longest_query(problem), ROWS_OF_TASK)};
  const int64_t tasks = problem->batch * call.parts;
  threads_for(work_task_threads(problem, tasks), tasks, append_part, &call);
}
