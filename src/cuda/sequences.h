/* The sequences of a problem, as its kernels take them. What is indexed by a sequence and a row has
 * room for no more rows than there are, whatever the caller bounds a packed one by. */
#ifndef FA3_SRC_CUDA_SEQUENCES_H
#define FA3_SRC_CUDA_SEQUENCES_H

#include "integer.h"
#include "kernels/sequence.h"
#include "problem.h"

/* What is handed over below. */
#define SEQUENCE_FEATURES                                                          \
  (FA3_FEATURE_VARLEN_QUERY | FA3_FEATURE_VARLEN_KEY | FA3_FEATURE_SEQUSED_QUERY | \
   FA3_FEATURE_SEQUSED_KEY | FA3_FEATURE_LEFTPAD_KEY | FA3_FEATURE_BATCH_INDEX |   \
   FA3_FEATURE_DIAGONAL)

/* Queries of the longest sequence, or more: no more than there are rows. */
static inline int64_t longest_query(const struct problem *problem) {
  return smaller(problem->max_seqlen_q, problem->rows_q);
}

/* Keys of the longest sequence, likewise. */
static inline int64_t longest_key(const struct problem *problem) {
  return smaller(problem->max_seqlen_k, problem->rows_k);
}

static inline fa3_sequences make_sequences(const struct problem *problem) {
  return (fa3_sequences){.cu_seqlens_q = problem->cu_seqlens_q,
                         .cu_seqlens_k = problem->cu_seqlens_k,
                         .used_q = problem->seqused_q,
                         .used_k = problem->seqused_k,
                         .leftpad_k = problem->leftpad_k,
                         .batch_index_k = problem->cache_batch_index,
                         .diagonal = problem->diagonal,
                         .page_table = (const int32_t *)(const void *)problem->page_table.data,
                         .page_table_stride = problem->page_table.stride_batch,
                         .seqlen_q = (int)longest_query(problem),
                         .seqlen_k = (int)smaller(problem->max_seqlen_k, INT32_MAX),
                         .window_left = problem->window_left,
                         .window_right = problem->window_right};
}

static inline bool has_pages(const struct problem *problem) {
  return problem->features & FA3_FEATURE_PAGE_TABLE;
}

/* Whether a sequence may have fewer queries, or keys, than the tensors have rows for it. */
static inline bool queries_vary(const struct problem *problem) {
  return problem->cu_seqlens_q || problem->seqused_q;
}

static inline bool keys_vary(const struct problem *problem) {
  return problem->cu_seqlens_k || problem->seqused_k;
}

/* Whether nothing in memory says where sequences are, but for their pages. */
static inline bool lengths_known(const struct problem *problem) {
  const fa3_sequences all = make_sequences(problem);
  return !all.cu_seqlens_q && !all.cu_seqlens_k && !all.used_q && !all.used_k && !all.leftpad_k &&
         !all.batch_index_k && !all.diagonal;
}

/* Rows of queries, as a share of what sequences as long as the longest would have: less than 1
 * where lengths are packed. */
static inline double filled_share(const struct problem *problem) {
  const double all = (double)longest_query(problem) * (double)problem->batch;
  return problem->cu_seqlens_q && all > 0 ? (double)problem->rows_q / all : 1;
}

#endif
