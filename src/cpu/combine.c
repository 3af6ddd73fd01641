#include <math.h>

#include "append.h"
#include "element.h"
#include "integer.h"
#include "threads.h"
#include "work.h"

enum {
  ROWS_OF_THREAD = 16, /* fewer are not worth waking one */
  BLOCK = 64           /* elements of a row that are summed together */
};

/* What a set counts for; where it has seen no key, nothing of it is read. */
static float weight_of(float lse, float top) {
  return lse == -INFINITY ? 0 : lse == top ? 1 : expf(lse - top);
}

static float partial_lse(const struct problem *problem, int64_t set, int64_t batch, int64_t row,
                         int64_t head) {
  const int64_t at = set * problem->output.batch + batch;
  return *(const float *)(const void *)element(&problem->partial_lse, at, row, head);
}

static void combine_row(const struct problem *problem, int64_t batch, int64_t row, int64_t head) {
  const int64_t sets = problem->partial_output.batch / problem->output.batch;
  const struct operand *output = &problem->output;
  char *to = element(output, batch, row, head);
  float top = -INFINITY, sum = 0;
  for (int64_t set = 0; set < sets; set++) {
    const float lse = partial_lse(problem, set, batch, row, head);
    if (!(lse <= top)) top = lse;
  }
  for (int64_t set = 0; set < sets; set++)
    sum += weight_of(partial_lse(problem, set, batch, row, head), top);
  for (int64_t first = 0; first < output->dim; first += BLOCK) {
    const int64_t width = smaller(BLOCK, output->dim - first);
    float x[BLOCK] = {0};
    for (int64_t set = 0; set < sets; set++) {
      const float weight = weight_of(partial_lse(problem, set, batch, row, head), top);
      const char *from = element(&problem->partial_output, set * output->batch + batch, row, head);
      if (weight == 0) continue;
      for (int64_t d = 0; d < width; d++)
        x[d] += weight * load_element(from, FA3_FLOAT32, first + d);
    }
    for (int64_t d = 0; d < width; d++)
      store_element(to, output->dtype, first + d, sum == 0 ? 0 : x[d] / sum);
  }
  if (problem->lse.dtype)
    *(float *)(void *)element(&problem->lse, batch, row, head) =
        sum == 0 ? -INFINITY : top + logf(sum);
}

/* All heads of a row. */
static void combine_heads(void *argument, int64_t task, int32_t seat) {
  const struct problem *problem = argument;
  (void)seat;
  for (int64_t head = 0; head < problem->heads_q; head++)
    combine_row(problem, task / problem->rows_q, task % problem->rows_q, head);
}

void cpu_combine(const struct problem *problem) {
  struct problem ours = *problem;
  const int64_t tasks = problem->output.batch * problem->rows_q;
  threads_for(work_task_threads(problem, tasks / ROWS_OF_THREAD), tasks, combine_heads, &ours);
}
