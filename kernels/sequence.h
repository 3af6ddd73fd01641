/* Where a sequence of the batch lies, and what its queries see: plain C, for host and device. */
#ifndef FA3_SEQUENCE_H
#define FA3_SEQUENCE_H

#include "mask.h"

/* The sequences of a batch, as the host hands them to a kernel. */
typedef struct {
  const int *cu_seqlens_q, *cu_seqlens_k; /* batch + 1 entries, or null */
  const int *used_q, *used_k;             /* lengths, or null */
  const int *leftpad_k;                   /* keys to skip at a sequence's start, or null */
  const int *batch_index_k;  /* the batch entry of key and value of each sequence, or null */
  const int64_t *diagonal;   /* the key that query 0 stands at, or null: keys - queries */
  int seqlen_q, seqlen_k;    /* the lengths where the arrays are null, else the most there may be */
  const int *page_table;     /* the pages of key and value of each sequence, or null */
  int64_t page_table_stride; /* from a sequence's first page to the next one's */
  int64_t window_left, window_right; /* FA3_NO_LIMIT: none */
} fa3_sequences;

/* One of them: entries of the tensors' batch dimension and its first rows there. With a page table
 * key_batch is the sequence itself, and key_row counts through its pages. */
typedef struct {
  int query_batch, key_batch;
  int query_row, key_row;
  fa3_mask mask;
} fa3_sequence;

/* What its lengths say, with no more keys than the host has planned for: a length that is too large
 * leads nowhere else. */
FA3_SHARED fa3_sequence fa3_read_sequence(const fa3_sequences *all, int b) {
  fa3_sequence one;
  one.query_batch = all->cu_seqlens_q ? 0 : b;
  one.key_batch = all->batch_index_k ? all->batch_index_k[b] : all->cu_seqlens_k ? 0 : b;
  one.query_row = all->cu_seqlens_q ? all->cu_seqlens_q[b] : 0;
  one.key_row = all->cu_seqlens_k ? all->cu_seqlens_k[b] : 0;
  const int queries = all->used_q         ? all->used_q[b]
                      : all->cu_seqlens_q ? all->cu_seqlens_q[b + 1] - one.query_row
                                          : all->seqlen_q;
  int keys = all->used_k         ? all->used_k[b]
             : all->cu_seqlens_k ? all->cu_seqlens_k[b + 1] - one.key_row
                                 : all->seqlen_k;
  if (keys > all->seqlen_k) keys = all->seqlen_k;
  if (all->leftpad_k) {
    one.key_row += all->leftpad_k[b];
    keys -= all->leftpad_k[b];
  }
  const int64_t diagonal = all->diagonal ? all->diagonal[b] : keys - queries;
  one.mask = fa3_make_mask(queries, keys, diagonal, all->window_left, all->window_right);
  return one;
}

/* The same, with no more queries either. */
FA3_SHARED fa3_sequence fa3_find_sequence(const fa3_sequences *all, int b) {
  fa3_sequence one = fa3_read_sequence(all, b);
  if (one.mask.queries > all->seqlen_q) one.mask.queries = all->seqlen_q;
  return one;
}

/* The entry of the page table for this page of a sequence, counted from its first. */
FA3_SHARED const int *fa3_find_page(const fa3_sequences *all, const fa3_sequence *one, int page) {
  return all->page_table + (int64_t)one->key_batch * all->page_table_stride + page;
}

#endif
