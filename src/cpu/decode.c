/* Flash decode (FlashAttention's online softmax, split along the keys): a sequence of few queries
 * is cut into parts of its keys that threads take one by one, and the parts' results are put
 * together by their log-sum-exp. */
#include "decode.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "cache.h"
#include "integer.h"
#include "row_end.h"
#include "threads.h"

enum {
  FEW_ROWS = 16,      /* queries times heads of a group: with more, packing keys pays */
  WANTED_PARTS = 128, /* of all heads of all sequences */
  LEAST_PART = 4 * FEW_KEYS,
  MOST_WIDTH = 256, /* the largest head dim */
};

bool decodes(const struct problem *problem, int64_t seqlen_q) {
  return seqlen_q * group_size(problem) <= FEW_ROWS && problem->key.dtype != FA3_FLOAT8_E4M3;
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

size_t decode_workspace(const struct problem *problem) {
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
  return (size_t)bytes;
}

struct decode_call {
  const struct problem *problem;
  const struct routines *routines;
  int64_t part_keys;
  int64_t parts; /* of a head of the longest sequence */
  float *results;
};

/* The rows of one key head of a sequence, and what is summed of them. */
struct few {
  const struct problem *problem;
  const struct routines *routines;
  struct sequence sequence;
  int64_t head_k;
  int64_t rows;
  int64_t output_stride;
  float maximum[FEW_ROWS];
  float sum[FEW_ROWS];
  float output[FEW_ROWS * MOST_WIDTH] __attribute__((aligned(64)));
};

static int64_t few_query(const struct few *few, int64_t row) {
  return row / group_size(few->problem);
}

static int64_t few_head(const struct few *few, int64_t row) {
  const int64_t group = group_size(few->problem);
  return few->head_k * group + row % group;
}

static void begin_rows(struct few *few) {
  few->output_stride = round_up(few->problem->value_head_dim, few->routines->vector);
  for (int64_t row = 0; row < few->rows; row++) {
    few->maximum[row] = -INFINITY;
    few->sum[row] = 0;
  }
  memset(few->output, 0, (size_t)(few->rows * few->output_stride) * sizeof *few->output);
}

static void find_rows_of(const struct few *few, const struct operand *operand, int64_t key,
                         int64_t count, const char **rows) {
  for (int64_t k = 0; k < count; k++)
    rows[k] = cache_row(operand, &few->sequence, key + k, few->head_k);
}

/* The rows with keys [begin, end) of the sequence. */
static void attend_keys(struct few *few, int64_t begin, int64_t end) {
  const struct problem *problem = few->problem;
  const int64_t stride = round_up(problem->head_dim, few->routines->vector);
  float queries[FEW_ROWS * MOST_WIDTH] __attribute__((aligned(64)));
  float scores[FEW_ROWS * FEW_KEYS] __attribute__((aligned(64)));
  struct key_range seen[FEW_ROWS];
  const char *keys[FEW_KEYS], *values[FEW_KEYS], *next_keys[FEW_KEYS];
  const float sign = problem->scale > 0 ? 1.0f : problem->scale < 0 ? -1.0f : 0.0f;
  memset(queries, 0, (size_t)(few->rows * stride) * sizeof *queries);
  for (int64_t row = 0; row < few->rows; row++) {
    const char *query = element(&problem->query, few->sequence.batch_q,
                                few->sequence.row_q + few_query(few, row), few_head(few, row));
    for (int64_t i = 0; i < problem->head_dim; i++)
      queries[row * stride + i] = sign * load_element(query, problem->query.dtype, i);
  }
  find_rows_of(few, &problem->key, begin, smaller(FEW_KEYS, end - begin), next_keys);
  for (int64_t key = begin; key < end; key += FEW_KEYS) {
    const int64_t count = smaller(FEW_KEYS, end - key);
    const int64_t next_count = smaller(FEW_KEYS, end - key - count);
    memcpy(keys, next_keys, sizeof keys);
    find_rows_of(few, &problem->value, key, count, values);
    find_rows_of(few, &problem->key, key + count, next_count, next_keys);
    for (int64_t row = 0; row < few->rows; row++) {
      const struct key_range all = mask_row(&few->sequence.mask, few_query(few, row));
      seen[row].begin = smaller(larger(all.begin - key, 0), count);
      seen[row].end = larger(smaller(all.end - key, count), seen[row].begin);
    }
    few->routines->few_rows(&(struct few_rows_step){
        .rows = few->rows,
        .count = count,
        .head_dim = problem->head_dim,
        .value_head_dim = problem->value_head_dim,
        .dtype = problem->key.dtype,
        .keys = keys,
        .values = values,
        .next_keys = next_keys,
        .next_count = next_count,
        .queries = queries,
        .query_stride = stride,
        .seen = seen,
        .scale = sign == 0 ? 1.0f : fabsf(problem->scale),
        .softcap = problem->softcap,
        .scores = scores,
        .maximum = few->maximum,
        .sum = few->sum,
        .output = few->output,
        .output_stride = few->output_stride,
    });
  }
}

/* Of a score, after the cap. */
static float score_scale(const struct problem *problem) {
  return problem->softcap > 0 || problem->scale == 0 ? 1.0f : fabsf(problem->scale);
}

static void store_rows(const struct few *few) {
  const struct problem *problem = few->problem;
  for (int64_t row = 0; row < few->rows; row++) {
    const int64_t at = few->sequence.row_q + few_query(few, row), head = few_head(few, row);
    char *output = element(&problem->output, few->sequence.batch_q, at, head);
    const float sink = problem->sink.data ? load_head_value(&problem->sink, head) : -INFINITY;
    const struct row_end end =
        end_row(few->maximum[row] * score_scale(problem), few->sum[row], sink);
    if (few->sum[row] == 0 && end.factor == 0) /* no key: zero bits are 0 in every dtype */
      memset(output, 0, (size_t)(problem->value_head_dim * element_size(&problem->output)));
    else
      few->routines->store_row(few->output + row * few->output_stride, problem->value_head_dim,
                               end.factor, problem->output.dtype, output);
    if (problem->lse.data)
      *(float *)(void *)element(&problem->lse, few->sequence.batch_q, at, head) = end.lse;
  }
}

/* Where a part leaves its result: the rows' maxima, their sums, their outputs. */
static float *result_of(const struct decode_call *call, int64_t pair, int64_t part) {
  return call->results + (pair * call->parts + part) * result_floats(call->problem);
}

static void leave_result(const struct few *few, float *result) {
  const int64_t width = few->problem->value_head_dim;
  memcpy(result, few->maximum, sizeof few->maximum);
  memcpy(result + FEW_ROWS, few->sum, sizeof few->sum);
  for (int64_t row = 0; row < few->rows; row++)
    memcpy(result + 2 * FEW_ROWS + row * width, few->output + row * few->output_stride,
           (size_t)width * sizeof *result);
}

static void add_result(struct few *few, const float *result) {
  const int64_t width = few->problem->value_head_dim;
  const float to_exponent = fminf(score_scale(few->problem) * 1.44269504f, FLT_MAX);
  for (int64_t row = 0; row < few->rows; row++) {
    const float maximum = result[row], sum = result[FEW_ROWS + row], last = few->maximum[row];
    const float *from = result + 2 * FEW_ROWS + row * width;
    float *output = few->output + row * few->output_stride;
    const float highest = last > maximum ? last : maximum;
    /* The difference of two infinities is none. */
    const float before = last == highest ? 1 : exp2f((last - highest) * to_exponent);
    const float here = maximum == highest ? 1 : exp2f((maximum - highest) * to_exponent);
    few->maximum[row] = highest;
    few->sum[row] = few->sum[row] * before + sum * here;
    for (int64_t i = 0; i < width; i++) output[i] = output[i] * before + from[i] * here;
  }
}

static bool find_rows(const struct decode_call *call, int64_t pair, struct few *few) {
  const struct problem *problem = call->problem;
  few->problem = problem;
  few->routines = call->routines;
  few->sequence = problem_sequence(problem, pair / problem->heads_k);
  few->head_k = pair % problem->heads_k;
  few->rows = few->sequence.seqlen_q * group_size(problem);
  return few->rows > 0 && decodes(problem, few->sequence.seqlen_q);
}

/* The keys that any row sees; parts are counted from the sequence's first. */
static struct key_range keys_of_part(const struct decode_call *call, const struct few *few,
                                     int64_t part) {
  const struct key_range visible = mask_visible(&few->sequence.mask, 0, few->sequence.seqlen_q - 1);
  const int64_t begin = part * call->part_keys;
  return (struct key_range){.begin = larger(visible.begin, begin),
                            .end = smaller(visible.end, begin + call->part_keys)};
}

static void run_part(void *argument, int64_t task, int32_t place) {
  const struct decode_call *call = argument;
  const int64_t pair = task / call->parts, part = task % call->parts;
  struct few few;
  (void)place;
  if (!find_rows(call, pair, &few)) return;
  const struct key_range keys = keys_of_part(call, &few, part);
  if (part > 0 && keys.begin >= keys.end) return;
  begin_rows(&few);
  if (keys.begin < keys.end) attend_keys(&few, keys.begin, keys.end);
  if (call->parts == 1)
    store_rows(&few);
  else
    leave_result(&few, result_of(call, pair, part));
}

static void run_merge(void *argument, int64_t pair, int32_t place) {
  const struct decode_call *call = argument;
  struct few few;
  (void)place;
  if (!find_rows(call, pair, &few)) return;
  begin_rows(&few);
  for (int64_t part = 0; part < call->parts; part++) {
    const struct key_range keys = keys_of_part(call, &few, part);
    if (part == 0 || keys.begin < keys.end) add_result(&few, result_of(call, pair, part));
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
  struct decode_call call = {.problem = problem,
                             .routines = routines,
                             .part_keys = part_keys(problem, longest_k),
                             .results = workspace};
  call.parts = larger(divide_up(longest_k, call.part_keys), 1);
  const int64_t pairs = problem->batch * problem->heads_k;
  threads_for(threads, pairs * call.parts, run_part, &call);
  if (call.parts > 1) threads_for(threads, pairs, run_merge, &call);
}
