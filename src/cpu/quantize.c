#include "quantize.h"

#include <math.h>

#include "codes.h"
#include "element.h"
#include "error.h"
#include "head_dim.h"
#include "rotary.h"
#include "scale.h"
#include "signs.h"
#include "threads.h"
#include "validate.h"
#include "work.h"

/* At least; fewer are not worth waking a thread. */
enum { ROWS_OF_TASK = 16 };

struct quantize_call {
  const struct problem *problem;
  int64_t part_rows; /* of a task */
  int64_t parts;     /* of the longest sequence */
  float factors[LARGEST_HEAD_DIM];
  float scale;                 /* of the whole tensor, or 0 */
  float largest[MOST_THREADS]; /* that each thread has seen, where the tensor has one scale */
};

/* Of the Hadamard transform that begins where so many elements are left. */
static int64_t transform_size(int64_t left) {
  int64_t size = 1;
  while (2 * size <= left) size *= 2;
  return size;
}

/* The signs come with what makes the transform orthonormal. */
static void set_factors(const struct problem *problem, float *factors) {
  uint64_t signs = 0;
  int64_t end = 0, size = 0;
  for (int64_t d = 0; d < problem->head_dim; d++) {
    if (d % 64 == 0) signs = random_signs(problem->seed, (uint64_t)d / 64);
    if (d == end) end += size = transform_size(problem->head_dim - d);
    const float factor = (float)(1 / sqrt((double)size));
    factors[d] = signs >> d % 64 & 1 ? -factor : factor;
  }
}

static void transform(float *x, int64_t size) {
  for (int64_t half = 1; half < size; half *= 2)
    for (int64_t first = 0; first < size; first += 2 * half)
      for (int64_t i = first; i < first + half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}

static void rotate(const float *factors, int64_t width, float *x) {
  for (int64_t d = 0; d < width; d++) x[d] *= factors[d];
  for (int64_t d = 0; d < width; d += transform_size(width - d))
    transform(x + d, transform_size(width - d));
}

/* A head of a row, with rotary embedding. */
static void read_head(const struct problem *problem, const struct sequence *sequence, int64_t head,
                      int64_t row, float *x) {
  const fa3_dtype dtype = problem->input.dtype;
  const char *from = element(&problem->input, sequence->batch_q, sequence->row_q + row, head);
  if (problem->rotary_cos.dtype) {
    const int64_t position = problem_position(problem, sequence, row);
    if (problem->rotate)
      turn_head_before_rotation(problem, from, dtype, position, x);
    else
      turn_head(problem, from, dtype, position, (char *)x, FA3_FLOAT32);
    return;
  }
  for (int64_t d = 0; d < problem->head_dim; d++) x[d] = load_element(from, dtype, d);
}

/* What is taken off every row: zeros where that was not asked for. */
static void set_mean(const struct problem *problem, const struct sequence *sequence, int64_t head,
                     float *mean) {
  const int64_t rows = problem->subtract_mean ? sequence->seqlen_q : 0;
  double sums[LARGEST_HEAD_DIM] = {0};
  float x[LARGEST_HEAD_DIM];
  for (int64_t row = 0; row < rows; row++) {
    read_head(problem, sequence, head, row, x);
    for (int64_t d = 0; d < problem->head_dim; d++) sums[d] += (double)x[d];
  }
  for (int64_t d = 0; d < problem->head_dim; d++)
    mean[d] = rows ? (float)(sums[d] / (double)rows) : 0;
}

/* What is quantised. */
static void prepare_head(const struct quantize_call *call, const struct sequence *sequence,
                         int64_t head, int64_t row, const float *mean, float *x) {
  const struct problem *problem = call->problem;
  read_head(problem, sequence, head, row, x);
  if (problem->subtract_mean)
    for (int64_t d = 0; d < problem->head_dim; d++) x[d] -= mean[d];
  if (problem->rotate) rotate(call->factors, problem->head_dim, x);
}

/* A head of some rows of a sequence. */
struct part {
  struct sequence sequence;
  int64_t head;
  int64_t first;
  int64_t last; /* and one */
  float mean[LARGEST_HEAD_DIM];
};

static void make_part(const struct quantize_call *call, int64_t task, struct part *part) {
  const struct problem *problem = call->problem;
  const int64_t of_batch = task / call->parts;
  part->sequence = problem_sequence(problem, of_batch / problem->heads_q);
  part->head = of_batch % problem->heads_q;
  part->first = task % call->parts * call->part_rows;
  part->last = smaller(part->first + call->part_rows, part->sequence.seqlen_q);
  if (part->first < part->last) set_mean(problem, &part->sequence, part->head, part->mean);
}

static float find_largest(const struct quantize_call *call, const struct part *part, int64_t first,
                          int64_t last) {
  float x[LARGEST_HEAD_DIM], largest = 0;
  for (int64_t row = first; row < last; row++) {
    prepare_head(call, &part->sequence, part->head, row, part->mean, x);
    largest = largest_of_row(x, call->problem->head_dim, largest);
  }
  return largest;
}

/* For the one scale of the tensor. */
static void measure_part(void *argument, int64_t task, int32_t seat) {
  struct quantize_call *call = argument;
  struct part part;
  make_part(call, task, &part);
  call->largest[seat] =
      fmaxf(call->largest[seat], find_largest(call, &part, part.first, part.last));
}

/* Rows that share a scale. */
static void quantize_rows(const struct quantize_call *call, const struct part *part, int64_t first,
                          int64_t last) {
  const struct problem *problem = call->problem;
  const struct operand *codes = &problem->codes;
  float x[LARGEST_HEAD_DIM];
  float scale = call->scale;
  if (scale == 0) {
    scale = scale_for(find_largest(call, part, first, last));
    *codes_scale_at(problem, &part->sequence, part->head, first) = scale;
  }
  for (int64_t row = first; row < last; row++) {
    prepare_head(call, &part->sequence, part->head, row, part->mean, x);
    encode_row(x, problem->head_dim, scale,
               element(codes, part->sequence.batch_q, part->sequence.row_q + row, part->head));
  }
}

static void quantize_part(void *argument, int64_t task, int32_t seat) {
  const struct quantize_call *call = argument;
  const int64_t rows = call->problem->codes_scale_rows;
  struct part part;
  (void)seat;
  make_part(call, task, &part);
  const int64_t step = rows ? smaller(rows, call->part_rows) : call->part_rows;
  for (int64_t row = part.first; row < part.last; row += step)
    quantize_rows(call, &part, row, smaller(row + step, part.last));
}

/* With a mean, and with a scale of a whole sequence, a task is one head's rows of that sequence. */
static int64_t rows_of_part(const struct problem *problem, bool one_scale, int64_t longest) {
  const int64_t rows = problem->codes_scale_rows;
  if (problem->subtract_mean || (!rows && !one_scale)) return longest;
  return round_up(ROWS_OF_TASK, smaller(larger(rows, 1), longest));
}

void cpu_quantize(const struct problem *problem) {
  struct quantize_call call = {.problem = problem};
  const struct operand *scale = &problem->codes_scale;
  const bool one_scale = !problem->codes_scale_rows && scale->batch == 1 && scale->heads == 1;
  const int64_t longest = has_elements(&problem->input) ? work_longest_query(problem) : 0;
  if (!longest) return;
  call.part_rows = rows_of_part(problem, one_scale, longest);
  call.parts = divide_up(longest, call.part_rows);
  if (problem->rotate) set_factors(problem, call.factors);
  const int64_t tasks = problem->batch * problem->heads_q * call.parts;
  const int32_t threads = work_task_threads(problem, tasks);
  if (one_scale) {
    threads_for(threads, tasks, measure_part, &call);
    float largest = 0;
    for (int32_t seat = 0; seat < threads; seat++) largest = fmaxf(largest, call.largest[seat]);
    call.scale = *(float *)(void *)scale->data = scale_for(largest);
  }
  threads_for(threads, tasks, quantize_part, &call);
}
