/* Flash decode (FlashAttention's online softmax, split along the keys): a sequence of few queries
 * is cut into parts of its keys that threads take one by one, all heads of a part together, as its
 * memory lies; the parts' results are put together by their log-sum-exp. */
#include "decode.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "cache.h"
#include "codes.h"
#include "integer.h"
#include "row_end.h"
#include "scale.h"
#include "scratch.h"
#include "threads.h"

enum {
  FEW_ROWS = 16,      /* queries times heads of a group: with more, arranging keys pays */
  WANTED_PARTS = 128, /* of all heads of all sequences */
  LEAST_PART = 4 * FEW_KEYS,
  TASKS_OF_THREAD = 4 /* so that threads end at about the same time */
};

bool decodes(const struct problem *problem, int64_t seqlen_q) {
  return seqlen_q * group_size(problem) <= FEW_ROWS;
}

/* How a sequence is cut. It follows from the problem alone, whatever the number of threads; with
 * split_keys from the sequence alone. */
static int64_t part_keys(const struct problem *problem, int64_t longest_k) {
  if (problem->split_keys) return problem->split_keys;
  const int64_t heads = larger(problem->batch * problem->heads_k, 1);
  int64_t parts = larger(WANTED_PARTS / heads, 1);
  if (problem->num_splits) parts = smaller(parts, problem->num_splits);
  return larger(round_up(divide_up(longest_k, parts), FEW_KEYS), LEAST_PART);
}

/* Of a head of a sequence, at most. */
static int64_t most_parts(const struct problem *problem) {
  if (problem->split_keys)
    return larger(
        divide_up(longest_sequence(problem->max_seqlen_k, problem->rows_k), problem->split_keys),
        1);
  return WANTED_PARTS;
}

/* The result of a part: each row's maximum and sum, and its output times the sum. */
static int64_t result_floats(const struct problem *problem) {
  return FEW_ROWS * (2 + problem->value_head_dim);
}

/* What one thread works in: the rows of some heads. */
struct scratch {
  float *queries;
  float *query_scales;
  float *output;
  float *scores;
  float *key_scales;
  float *value_scales;
  float *maximum;
  float *sum;
};

/* Lays the scratch out at `base` (null to measure only); returns its size in bytes. */
static size_t scratch_layout(char *base, struct scratch *scratch) {
  const struct scratch_array arrays[] = {
      {&scratch->queries, MOST_ROWS * FEW_STRIDE},
      {&scratch->query_scales, MOST_ROWS},
      {&scratch->output, MOST_ROWS * FEW_STRIDE},
      {&scratch->scores, MOST_ROWS * FEW_KEYS},
      {&scratch->key_scales, MOST_ROWS * FEW_KEYS},
      {&scratch->value_scales, MOST_ROWS * FEW_KEYS},
      {&scratch->maximum, MOST_ROWS},
      {&scratch->sum, MOST_ROWS},
  };
  return lay_out(arrays, sizeof arrays / sizeof *arrays, base);
}

size_t decode_workspace(const struct problem *problem, int32_t threads) {
  struct scratch scratch;
  const size_t of_thread = scratch_layout(NULL, &scratch);
  /* Without split_keys no more than WANTED_PARTS of all heads; those with one part need none. */
  int64_t results = WANTED_PARTS;
  if (problem->split_keys &&
      (__builtin_mul_overflow(most_parts(problem), problem->batch, &results) ||
       __builtin_mul_overflow(results, problem->heads_k, &results)))
    return SIZE_MAX / 16;
  int64_t bytes;
  if (__builtin_mul_overflow(results, result_floats(problem) * (int64_t)sizeof(float), &bytes) ||
      bytes > INT64_MAX / 16)
    return SIZE_MAX / 16;
  return (size_t)bytes + of_thread * (size_t)threads + CACHE_LINE;
}

struct decode_call {
  const struct problem *problem;
  const struct routines *routines;
  int64_t part_keys;
  int64_t parts;  /* of a head of the longest sequence */
  int64_t ranges; /* of the heads that a task may take together */
  char *scratch;
  size_t scratch_size; /* of a thread */
  float *results;
};

/* The rows of some key heads of a sequence, and what is summed of them. */
struct few {
  const struct problem *problem;
  const struct routines *routines;
  struct sequence sequence;
  struct scratch scratch;
  int64_t head_k; /* the first */
  int64_t heads;
  int64_t rows; /* of each head */
};

static int64_t few_query(const struct few *few, int64_t row) {
  return row / group_size(few->problem);
}

/* The query head of a row of the few's head `head`. */
static int64_t few_head(const struct few *few, int64_t head, int64_t row) {
  const int64_t group = group_size(few->problem);
  return (few->head_k + head) * group + row % group;
}

static void begin_rows(struct few *few) {
  const int64_t rows = few->heads * few->rows;
  for (int64_t row = 0; row < rows; row++) {
    few->scratch.maximum[row] = -INFINITY;
    few->scratch.sum[row] = 0;
  }
  memset(few->scratch.output, 0, (size_t)(rows * FEW_STRIDE) * sizeof(float));
}

/* As decode_row takes it. */
static float finite_or_nan(float scale) {
  return isfinite(scale) ? scale : NAN;
}

/* The queries as float32 with the sign of the softmax's scale, or 0. Codes stay codes: their scale
 * is the row's. */
static void load_queries(const struct few *few) {
  const struct problem *problem = few->problem;
  const float sign = scale_sign(problem);
  for (int64_t at = 0; at < few->heads * few->rows; at++) {
    const int64_t row = at % few->rows, head = few_head(few, at / few->rows, row);
    const int64_t query = few_query(few, row);
    const char *from =
        element(&problem->query, few->sequence.batch_q, few->sequence.row_q + query, head);
    float *to = few->scratch.queries + at * FEW_STRIDE;
    memset(to, 0, FEW_STRIDE * sizeof *to);
    if (problem->query.dtype == FA3_FLOAT8_E4M3) {
      decode_row(from, problem->head_dim, 1, to);
      few->scratch.query_scales[at] =
          finite_or_nan(query_scale_of(problem, &few->sequence, head, query));
    } else {
      few->scratch.query_scales[at] = 1;
    }
    for (int64_t i = 0; i < problem->head_dim; i++)
      to[i] = sign * (problem->query.dtype == FA3_FLOAT8_E4M3
                          ? to[i]
                          : load_element(from, problem->query.dtype, i));
    few->routines->few_order(to, problem->head_dim, problem->key.dtype, false);
  }
}

typedef float *scale_at(const struct problem *problem, const struct sequence *sequence,
                        int64_t head, int64_t row);

/* What the codes of `count` keys, or values, from a row on are multiplied by in each head. Rows
 * that follow each other often have the same. */
static void find_scales(const struct few *few, scale_at *at, const struct operand *scale,
                        int64_t row, int64_t count, float *scales) {
  const float *first = at(few->problem, &few->sequence, few->head_k, row), *next = NULL;
  for (int64_t k = 0, end; k < count; k = end, first = next) {
    for (end = first ? k + 1 : count; end < count; end++) {
      next = at(few->problem, &few->sequence, few->head_k, row + end);
      if (next != first) break;
    }
    for (int64_t head = 0; head < few->heads; head++) {
      const float here =
          CODE_FACTOR * (first ? finite_or_nan(first[head * scale->stride_head]) : 1);
      for (int64_t i = k; i < end; i++) scales[head * FEW_KEYS + i] = here;
    }
  }
}

/* The rows with keys [begin, end) of the sequence. */
static void attend_keys(const struct few *few, int64_t begin, int64_t end) {
  const struct problem *problem = few->problem;
  const struct sequence *sequence = &few->sequence;
  const struct scratch *scratch = &few->scratch;
  const bool codes = problem->key.dtype == FA3_FLOAT8_E4M3;
  struct key_range seen[FEW_ROWS];
  const char *keys[FEW_KEYS + FEW_GROUP], *values[FEW_KEYS + FEW_GROUP];
  load_queries(few);
  for (int64_t key = begin; key < end; key += FEW_KEYS) {
    const int64_t count = smaller(FEW_KEYS, end - key);
    const int64_t named = count + FEW_GROUP, there = smaller(named, end - key);
    cache_rows(&problem->key, sequence, key, there, named, few->head_k, keys);
    cache_rows(&problem->value, sequence, key, there, named, few->head_k, values);
    if (codes) {
      const int64_t row = sequence->leftpad + key;
      find_scales(few, key_scale_at, &problem->key_scale, row, count, scratch->key_scales);
      find_scales(few, value_scale_at, &problem->value_scale, row, count, scratch->value_scales);
    }
    for (int64_t row = 0; row < few->rows; row++) {
      const struct key_range all = mask_row(&sequence->mask, few_query(few, row));
      seen[row].begin = smaller(larger(all.begin - key, 0), count);
      seen[row].end = larger(smaller(all.end - key, count), seen[row].begin);
    }
    few->routines->few_rows(&(struct few_rows_step){
        .heads = few->heads,
        .rows = few->rows,
        .count = count,
        .head_dim = problem->head_dim,
        .value_head_dim = problem->value_head_dim,
        .dtype = problem->key.dtype,
        .keys = keys,
        .values = values,
        .key_head_stride = problem->key.stride_head * element_size(&problem->key),
        .value_head_stride = problem->value.stride_head * element_size(&problem->value),
        .queries = scratch->queries,
        .query_scales = scratch->query_scales,
        .key_scales = codes ? scratch->key_scales : NULL,
        .value_scales = codes ? scratch->value_scales : NULL,
        .seen = seen,
        .scale = scale_size(problem),
        .softcap = problem->softcap,
        .scores = scratch->scores,
        .maximum = scratch->maximum,
        .sum = scratch->sum,
        .output = scratch->output,
    });
  }
}

static void order_outputs(const struct few *few) {
  for (int64_t row = 0; row < few->heads * few->rows; row++)
    few->routines->few_order(few->scratch.output + row * FEW_STRIDE, few->problem->value_head_dim,
                             few->problem->value.dtype, true);
}

static void store_rows(const struct few *few) {
  const struct problem *problem = few->problem;
  for (int64_t i = 0; i < few->heads * few->rows; i++) {
    const int64_t row = i % few->rows;
    store_row_end(problem, few->routines, &few->sequence, few_query(few, row),
                  few_head(few, i / few->rows, row), few->scratch.maximum[i], few->scratch.sum[i],
                  few->scratch.output + i * FEW_STRIDE);
  }
}

/* Where a part of a sequence's head leaves its result: the rows' maxima, their sums, their outputs.
 */
static float *result_of(const struct decode_call *call, int64_t batch, int64_t head_k,
                        int64_t part) {
  const int64_t pair = batch * call->problem->heads_k + head_k;
  return call->results + (pair * call->parts + part) * result_floats(call->problem);
}

static void leave_results(const struct decode_call *call, const struct few *few, int64_t part) {
  const int64_t width = few->problem->value_head_dim;
  for (int64_t head = 0; head < few->heads; head++) {
    float *result = result_of(call, few->sequence.index, few->head_k + head, part);
    for (int64_t row = 0; row < few->rows; row++) {
      const int64_t at = head * few->rows + row;
      result[row] = few->scratch.maximum[at];
      result[FEW_ROWS + row] = few->scratch.sum[at];
      memcpy(result + 2 * FEW_ROWS + row * width, few->scratch.output + at * FEW_STRIDE,
             (size_t)width * sizeof *result);
    }
  }
}

/* Of the few's one head: what the first part left, bit for bit (a negative zero added to a zero
 * would lose its sign). */
static void take_result(const struct few *few, const float *result) {
  const int64_t width = few->problem->value_head_dim;
  for (int64_t row = 0; row < few->rows; row++) {
    few->scratch.maximum[row] = result[row];
    few->scratch.sum[row] = result[FEW_ROWS + row];
    memcpy(few->scratch.output + row * FEW_STRIDE, result + 2 * FEW_ROWS + row * width,
           (size_t)width * sizeof *result);
  }
}

/* What another part left. */
static void add_result(const struct few *few, const float *result) {
  const int64_t width = few->problem->value_head_dim;
  const float to_exponent = fminf(score_scale(few->problem) * 1.44269504f, FLT_MAX);
  for (int64_t row = 0; row < few->rows; row++) {
    const float maximum = result[row], sum = result[FEW_ROWS + row];
    const float last = few->scratch.maximum[row];
    const float *from = result + 2 * FEW_ROWS + row * width;
    float *output = few->scratch.output + row * FEW_STRIDE;
    const float highest = last > maximum ? last : maximum;
    /* The difference of two infinities is none. */
    const float before = last == highest ? 1 : exp2f((last - highest) * to_exponent);
    const float here = maximum == highest ? 1 : exp2f((maximum - highest) * to_exponent);
    few->scratch.maximum[row] = highest;
    few->scratch.sum[row] = few->scratch.sum[row] * before + sum * here;
    for (int64_t i = 0; i < width; i++) output[i] = output[i] * before + from[i] * here;
  }
}

/* Some heads of a sequence, at most MOST_ROWS rows; whether there are rows that go this way. */
static bool find_rows(const struct decode_call *call, const struct sequence *sequence,
                      int64_t head_k, int64_t heads, int32_t seat, struct few *few) {
  const struct problem *problem = call->problem;
  *few = (struct few){.problem = problem,
                      .routines = call->routines,
                      .sequence = *sequence,
                      .head_k = head_k,
                      .rows = sequence->seqlen_q * group_size(problem)};
  if (few->rows == 0 || !decodes(problem, sequence->seqlen_q)) return false;
  few->heads = smaller(heads, MOST_ROWS / few->rows);
  scratch_layout(call->scratch + (size_t)seat * call->scratch_size, &few->scratch);
  begin_rows(few);
  return true;
}

/* The keys that any row sees; parts are counted from the sequence's first. */
static struct key_range keys_of_part(const struct decode_call *call,
                                     const struct sequence *sequence, int64_t part) {
  const struct key_range visible = mask_visible(&sequence->mask, 0, sequence->seqlen_q - 1);
  const int64_t begin = part * call->part_keys;
  return (struct key_range){.begin = larger(visible.begin, begin),
                            .end = smaller(visible.end, begin + call->part_keys)};
}

static void run_part(void *argument, int64_t task, int32_t seat) {
  const struct decode_call *call = argument;
  const int64_t heads_k = call->problem->heads_k, range = task % call->ranges;
  const int64_t part = task / call->ranges % call->parts;
  const struct sequence sequence =
      problem_sequence(call->problem, task / call->ranges / call->parts);
  const struct key_range keys = keys_of_part(call, &sequence, part);
  if (part > 0 && keys.begin >= keys.end) return;
  const int64_t end = (range + 1) * heads_k / call->ranges;
  struct few few;
  for (int64_t head = range * heads_k / call->ranges; head < end; head += few.heads) {
    if (!find_rows(call, &sequence, head, end - head, seat, &few)) return;
    if (keys.begin < keys.end) {
      attend_keys(&few, keys.begin, keys.end);
      order_outputs(&few);
    }
    if (call->parts == 1)
      store_rows(&few);
    else
      leave_results(call, &few, part);
  }
}

static void run_merge(void *argument, int64_t pair, int32_t seat) {
  const struct decode_call *call = argument;
  const int64_t heads_k = call->problem->heads_k;
  const struct sequence sequence = problem_sequence(call->problem, pair / heads_k);
  struct few few;
  if (!find_rows(call, &sequence, pair % heads_k, 1, seat, &few)) return;
  take_result(&few, result_of(call, sequence.index, few.head_k, 0));
  for (int64_t part = 1; part < call->parts; part++) {
    const struct key_range keys = keys_of_part(call, &sequence, part);
    if (keys.begin < keys.end) add_result(&few, result_of(call, sequence.index, few.head_k, part));
  }
  store_rows(&few);
}

void cpu_decode(const struct problem *problem, const struct routines *routines, int32_t threads,
                void *workspace) {
  int64_t longest_k = 0;
  bool any = false;
  for (int64_t batch = 0; batch < problem->batch; batch++) {
    const struct sequence sequence = problem_sequence(problem, batch);
    if (sequence.seqlen_q == 0 || !decodes(problem, sequence.seqlen_q)) continue;
    any = true;
    longest_k = larger(longest_k, sequence.mask.seqlen_k);
  }
  if (!any) return;
  struct scratch layout;
  struct decode_call call = {.problem = problem,
                             .routines = routines,
                             .part_keys = part_keys(problem, longest_k),
                             .scratch = first_line(workspace),
                             .scratch_size = scratch_layout(NULL, &layout)};
  call.results = (float *)(void *)(call.scratch + call.scratch_size * (size_t)threads);
  call.parts = larger(divide_up(longest_k, call.part_keys), 1);
  /* Fewer heads together where there would be too few tasks: what a row gives is the same. */
  const int64_t tasks = problem->batch * call.parts;
  call.ranges = smaller(threads == 1 ? 1 : larger(divide_up(TASKS_OF_THREAD * threads, tasks), 1),
                        problem->heads_k);
  threads_for(threads, tasks * call.ranges, run_part, &call);
  if (call.parts > 1) threads_for(threads, problem->batch * problem->heads_k, run_merge, &call);
}
