/* What a problem's data says: its pointers, and the lengths of its sequences. */
#include <inttypes.h>
#include <stdbool.h>

#include "error.h"
#include "integer.h"
#include "problem.h"
#include "validate.h"

/* Bound of `diagonal`'s contents, so that sums with a position stay far from
 * overflow. */
#define MAX_DIAGONAL ((int64_t)1 << 60)

static fa3_status check_cu_seqlens(const char *name, const int32_t *cu_seqlens, int64_t batch,
                                   int64_t total, int64_t max_seqlen) {
  if (cu_seqlens[0] != 0)
    return set_error(FA3_INVALID_LENGTHS, "%s[0] is %" PRId32 ": expected 0", name, cu_seqlens[0]);
  for (int64_t b = 0; b < batch; b++) {
    int64_t length = (int64_t)cu_seqlens[b + 1] - cu_seqlens[b];
    if (length < 0)
      return set_error(FA3_INVALID_LENGTHS,
                       "%s[%" PRId64 "] is %" PRId32 ": expected at least %s[%" PRId64
                       "] = %" PRId32,
                       name, b + 1, cu_seqlens[b + 1], name, b, cu_seqlens[b]);
    if (max_seqlen && length > max_seqlen)
      return set_error(FA3_INVALID_LENGTHS,
                       "%s makes sequence %" PRId64 " %" PRId64
                       " long: expected at most "
                       "max_seqlen_%c = %" PRId64,
                       name, b, length, name[11], max_seqlen);
  }
  if (cu_seqlens[batch] > total)
    return set_error(FA3_INVALID_LENGTHS,
                     "%s[%" PRId64 "] is %" PRId32 ": expected at most the %" PRId64 " packed rows",
                     name, batch, cu_seqlens[batch], total);
  return FA3_OK;
}

static fa3_status check_entry(const char *name, const int32_t *values, int64_t b, int64_t limit,
                              const char *what) {
  if (!values || (values[b] >= 0 && values[b] <= limit)) return FA3_OK;
  if (limit == 0)
    return set_error(FA3_INVALID_LENGTHS, "%s[%" PRId64 "] is %" PRId32 ": expected 0, %s", name, b,
                     values[b], what);
  return set_error(FA3_INVALID_LENGTHS,
                   "%s[%" PRId64 "] is %" PRId32 ": expected 0 to %" PRId64 ", %s", name, b,
                   values[b], limit, what);
}

/* Rows that sequence b has in memory, used or not. */
static int64_t allotted(const int32_t *cu_seqlens, int64_t rows, int64_t b) {
  return cu_seqlens ? (int64_t)cu_seqlens[b + 1] - cu_seqlens[b] : rows;
}

/* A sequence's row of the table. */
static const int32_t *pages_of(const struct problem *problem, int64_t b) {
  const int32_t *table = (const void *)problem->page_table.data; /* null too where it is empty */
  return table ? table + b * problem->page_table.stride_batch : NULL;
}

/* Of sequence b, whose used rows are given. */
static fa3_status check_pages(const struct problem *problem, int64_t b, int64_t used) {
  const int32_t *pages = pages_of(problem, b);
  if (!pages) return FA3_OK;
  for (int64_t i = 0; i * problem->key.rows < used; i++)
    if (pages[i] < 0 || pages[i] >= problem->batch_k)
      return set_error(FA3_INVALID_LENGTHS,
                       "page_table[%" PRId64 "][%" PRId64 "] is %" PRId32
                       ": expected one of key's %" PRId64 " pages",
                       b, i, pages[i], problem->batch_k);
  return FA3_OK;
}

/* That the position of each row that is turned is in the tables. */
static fa3_status check_positions(const struct problem *problem, int64_t b) {
  const struct sequence sequence = problem_sequence(problem, b);
  if (!problem->rotary_cos.dtype) return FA3_OK;
  for (int64_t i = 0; i < sequence.seqlen_q; i++) {
    const int64_t position = problem_position(problem, &sequence, i);
    if (position < 0 || position >= problem->rotary_cos.rows)
      return set_error(FA3_INVALID_LENGTHS,
                       "row %" PRId64 " of sequence %" PRId64 " is at position %" PRId64
                       ": expected one of rotary_cos' %" PRId64,
                       i, b, position, problem->rotary_cos.rows);
  }
  return FA3_OK;
}

fa3_status problem_check_lengths(const struct problem *problem) {
  const bool turned =
      problem->phase == FA3_QUANTIZE && problem->rotary_cos.dtype && has_elements(&problem->input);
  if (problem->cu_seqlens_q)
    TRY(check_cu_seqlens("cu_seqlens_q", problem->cu_seqlens_q, problem->batch, problem->rows_q,
                         problem->max_seqlen_q));
  if (problem->cu_seqlens_k)
    TRY(check_cu_seqlens("cu_seqlens_k", problem->cu_seqlens_k, problem->batch, problem->rows_k,
                         problem->max_seqlen_k));
  /* Of sequences that are all alike, however many, the first one stands for all. */
  const bool own_pages = has_elements(&problem->page_table) && problem->page_table.stride_batch;
  const bool alike = problem_sequences_alike(problem) && !turned && !own_pages &&
                     !(problem->features & FA3_FEATURE_BATCH_INDEX);
  for (int64_t b = 0; b < (alike ? smaller(problem->batch, 1) : problem->batch); b++) {
    TRY(check_entry("seqused_q", problem->seqused_q, b,
                    allotted(problem->cu_seqlens_q, problem->rows_q, b), "the sequence's rows"));
    const int64_t room = allotted(problem->cu_seqlens_k, problem->max_seqlen_k, b);
    int64_t used = room;
    TRY(check_entry("seqused_k", problem->seqused_k, b, used, "the sequence's rows"));
    if (problem->seqused_k) used = problem->seqused_k[b];
    TRY(check_entry("leftpad_k", problem->leftpad_k, b, used, "the sequence's used rows"));
    if (problem->phase == FA3_APPEND) {
      const int64_t added = problem_sequence(problem, b).seqlen_q;
      if (added > room - used)
        return set_error(FA3_INVALID_LENGTHS,
                         "seqused_k[%" PRId64 "] is %" PRId64 ": expected room for %" PRId64
                         " new rows in %" PRId64,
                         b, used, added, room);
      used += added;
      TRY(check_positions(problem, b));
    }
    if (turned) TRY(check_positions(problem, b));
    TRY(check_pages(problem, b, used));
    TRY(check_entry("cache_batch_index", problem->cache_batch_index, b, problem->batch_k - 1,
                    "an entry of key's batch"));
    if (problem->diagonal &&
        (problem->diagonal[b] > MAX_DIAGONAL || problem->diagonal[b] < -MAX_DIAGONAL))
      return set_error(FA3_INVALID_LENGTHS,
                       "diagonal[%" PRId64 "] is %" PRId64 ": expected at most 2^60 either way", b,
                       problem->diagonal[b]);
  }
  return FA3_OK;
}

fa3_status problem_check_data(const struct problem *problem) {
  for (int t = 0; t < TENSORS; t++) {
    const struct tensor_data tensor = problem_tensor(problem, (enum tensor)t);
    TRY(check_pointer(tensor.name, tensor.data, tensor.dtype, tensor.empty));
  }
  /* A GPU's lengths live where the host can't read them. */
  return problem->device.type == FA3_CPU ? problem_check_lengths(problem) : FA3_OK;
}

bool problem_sequences_alike(const struct problem *problem) {
  for (int t = 0; t < TENSORS; t++)
    if (tensor_rows[t].vector && t != TENSOR_cache_batch_index &&
        problem->features & tensor_rows[t].feature)
      return false;
  return true;
}

bool problem_shares_new_rows(const struct problem *append) {
  return append->batch > 1 && !append->separate_sequences &&
         append->features & (FA3_FEATURE_PAGE_TABLE | FA3_FEATURE_BATCH_INDEX);
}

int64_t problem_position(const struct problem *problem, const struct sequence *sequence,
                         int64_t row) {
  const struct operand *positions = &problem->positions;
  /* The keys that are there already are counted without padding. */
  if (!positions->dtype) return sequence->mask.seqlen_k + row;
  const int64_t index =
      sequence->batch_q * positions->stride_batch + (sequence->row_q + row) * positions->stride_row;
  return ((const int32_t *)(const void *)positions->data)[index];
}

struct sequence problem_sequence(const struct problem *problem, int64_t batch) {
  struct sequence sequence = {
      .batch_q = batch, .batch_k = batch, .pages = pages_of(problem, batch), .index = batch};
  if (problem->cu_seqlens_q) {
    sequence.row_q = problem->cu_seqlens_q[batch];
    sequence.batch_q = 0;
  }
  sequence.seqlen_q = problem->seqused_q ? problem->seqused_q[batch]
                                         : allotted(problem->cu_seqlens_q, problem->rows_q, batch);
  if (problem->cu_seqlens_k) {
    sequence.row_k = problem->cu_seqlens_k[batch];
    sequence.batch_k = 0;
  }
  if (problem->cache_batch_index) sequence.batch_k = problem->cache_batch_index[batch];
  int64_t seqlen_k = problem->seqused_k
                         ? problem->seqused_k[batch]
                         : allotted(problem->cu_seqlens_k, problem->max_seqlen_k, batch);
  if (problem->leftpad_k) {
    sequence.leftpad = problem->leftpad_k[batch];
    sequence.row_k += sequence.leftpad;
    seqlen_k -= problem->leftpad_k[batch];
  }
  sequence.mask = (struct mask){
      .diagonal = problem->diagonal ? problem->diagonal[batch] : seqlen_k - sequence.seqlen_q,
      .left = problem->window_left,
      .right = problem->window_right,
      .seqlen_k = seqlen_k};
  return sequence;
}
