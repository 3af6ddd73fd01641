#include "cuda/decode_append.h"

#include "cuda/append.h"
#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "kernels/decode_params.h"

static bool same_operand(const struct operand *a, const struct operand *b) {
  return a->data == b->data && a->dtype == b->dtype && a->batch == b->batch && a->rows == b->rows &&
         a->heads == b->heads && a->dim == b->dim && a->stride_batch == b->stride_batch &&
         a->stride_row == b->stride_row && a->stride_head == b->stride_head;
}

/* Whether both calls have the same sequences, of which the append says how many keys there are
 * before it, and attention how many behind it. */
static bool same_sequences(const struct problem *forward, const struct problem *append) {
  return forward->batch == append->batch && longest_query(forward) == longest_query(append) &&
         forward->cu_seqlens_q == append->cu_seqlens_q && forward->seqused_q == append->seqused_q &&
         !forward->cu_seqlens_k && forward->seqused_k && forward->leftpad_k == append->leftpad_k &&
         forward->cache_batch_index == append->cache_batch_index &&
         same_operand(&forward->page_table, &append->page_table) &&
         same_operand(&forward->key, &append->key) && same_operand(&forward->value, &append->value);
}

/* Memory, from its first byte to its last. */
struct extent {
  uintptr_t begin, end;
};

static struct extent extent_of(const struct operand *operand) {
  if (!has_elements(operand)) return (struct extent){0};
  const int64_t last = (operand->batch - 1) * operand->stride_batch +
                       (operand->rows - 1) * operand->stride_row +
                       (operand->heads - 1) * operand->stride_head + operand->dim;
  const uintptr_t begin = (uintptr_t)operand->data;
  return (struct extent){begin, begin + (uintptr_t)last * fa3_dtype_size(operand->dtype)};
}

static bool apart(const struct operand *a, const struct operand *b) {
  const struct extent first = extent_of(a), second = extent_of(b);
  return first.begin >= second.end || second.begin >= first.end;
}

/* Whether results lie elsewhere than all that the append reads, and what it makes of queries: some
 * clusters have theirs before others begin. */
static bool results_apart(const struct problem *forward, const struct problem *append) {
  static const enum tensor read[] = {TENSOR_new_key,      TENSOR_new_value,  TENSOR_query,
                                     TENSOR_rotary_cos,   TENSOR_rotary_sin, TENSOR_positions,
                                     TENSOR_rotated_query};
  for (size_t i = 0; i < sizeof read / sizeof *read; i++) {
    const struct operand *one = problem_operand(append, read[i]);
    if (!apart(&forward->output, one) || !apart(&forward->lse, one)) return false;
  }
  return true;
}

bool decode_takes_append(const struct problem *forward, const struct cuda_plan *plan,
                         const struct problem *append) {
  const struct decode_plan *decode = &plan->decode;
  if (!plan->decodes || plan->staging.count || append->new_key.dtype != append->key.dtype ||
      !append_takes_words(append) || !same_sequences(forward, append) ||
      problem_shares_new_rows(append))
    return false;
  /* So keys have 16 bits. A block has all of a sequence's rows of a key head. */
  if (!FA3_DECODE_MAY_APPEND(decode->kernel->tile_q, decode->kernel->head_dim) || decode->blocks ||
      (forward->split_keys && decode->combine) || decode->row_tiles != 1)
    return false;
  const struct operand *turned = &append->rotated_query;
  /* Blocks of a cluster wait for each other before they write over queries, clusters do not. */
  if (decode->splits > decode->cluster && !apart(turned, &append->query)) return false;
  return (!turned->dtype || same_operand(turned, &forward->query)) &&
         results_apart(forward, append);
}
