#include "work.h"

#include "element.h"
#include "integer.h"
#include "processors.h"
#include "threads.h"

/* A share of 5 to 10 microseconds: a thread that comes too late costs little. */
static const double least_multiply_adds = 5e5;

/* About 2 milliseconds of a thread with AVX-512. */
static const double short_multiply_adds = 1e8;

/* What arranging a tile of keys and values costs, as rows of queries. */
static const double arranging_rows = 16;

static double multiply_adds(const struct problem *problem, double queries, double keys) {
  const double rows = queries * (double)group_size(problem);
  if (rows == 0) return 0;
  return (rows + arranging_rows) * keys * (double)problem->heads_k *
         (double)(problem->head_dim + problem->value_head_dim);
}

struct work work_of(const struct problem *problem) {
  struct work work = {0};
  const bool alike = problem_sequences_alike(problem);
  const int64_t different = alike ? smaller(problem->batch, 1) : problem->batch;
  for (int64_t batch = 0; batch < different; batch++) {
    const struct sequence sequence = problem_sequence(problem, batch);
    const struct key_range seen = mask_visible(&sequence.mask, 0, larger(sequence.seqlen_q - 1, 0));
    work.longest_q = larger(work.longest_q, sequence.seqlen_q);
    work.longest_k = larger(work.longest_k, sequence.mask.seqlen_k);
    work.multiply_adds +=
        multiply_adds(problem, (double)sequence.seqlen_q, (double)(seen.end - seen.begin));
  }
  if (alike) work.multiply_adds *= (double)problem->batch;
  return work;
}

int64_t work_longest_query(const struct problem *problem) {
  int64_t longest = 0;
  for (int64_t batch = 0; batch < problem->batch; batch++)
    longest = larger(longest, problem_sequence(problem, batch).seqlen_q);
  return longest;
}

/* The most that the caller allows. */
static int32_t threads_allowed(const struct problem *problem) {
  const int32_t asked = problem->num_threads ? problem->num_threads : default_threads();
  return (int32_t)smaller(asked, MOST_THREADS);
}

static int32_t threads_worth(double multiply_adds, int32_t most) {
  const double worth = multiply_adds / least_multiply_adds;
  return worth < most ? (int32_t)larger((int64_t)worth, 1) : most;
}

int32_t work_most_threads(const struct problem *problem) {
  const bool packed_q = problem->features & FA3_FEATURE_VARLEN_QUERY;
  const bool packed_k = problem->features & FA3_FEATURE_VARLEN_KEY;
  const double sequences = packed_q && packed_k ? 1 : (double)problem->batch;
  return threads_worth(
      sequences * multiply_adds(problem, (double)problem->rows_q, (double)problem->rows_k),
      threads_allowed(problem));
}

int32_t work_threads(const struct work *work, int32_t most) {
  return threads_worth(work->multiply_adds, most);
}

bool work_is_short(const struct work *work) {
  return work->multiply_adds < short_multiply_adds;
}

int32_t work_task_threads(const struct problem *problem, int64_t tasks) {
  return (int32_t)larger(smaller(threads_allowed(problem), tasks), 1);
}
