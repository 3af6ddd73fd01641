#include "slice.h"

#include <stdbool.h>

static bool present(const fa3_tensor *tensor) {
  return tensor->rank != 0; /* without elements its data may be null */
}

static int32_t length_at(const fa3_tensor *lengths, int64_t index) {
  return ((const int32_t *)lengths->data)[index];
}

/* The address of element `index`; null stays null, which a tensor without elements may be. */
static void *element(const fa3_tensor *tensor, int64_t index) {
  if (!tensor->data) return NULL;
  return (char *)tensor->data + (size_t)index * fa3_dtype_size(tensor->dtype);
}

int64_t slice_batch(const fa3_forward_args *args) {
  if (args->query.rank == 4) return args->query.shape[0];
  return args->cu_seqlens_q.shape[0] - 1;
}

struct slice_sequence slice_sequence(const fa3_forward_args *args, int64_t batch) {
  struct slice_sequence sequence = {.batch_q = batch, .batch_k = batch};
  sequence.rows = args->query.shape[1];
  if (args->query.rank == 3) {
    sequence.batch_q = 0;
    sequence.first_row = length_at(&args->cu_seqlens_q, batch);
    sequence.rows = length_at(&args->cu_seqlens_q, batch + 1) - sequence.first_row;
  }
  if (present(&args->seqused_q)) sequence.rows = length_at(&args->seqused_q, batch);

  sequence.keys = args->key.shape[1];
  if (args->key.rank == 3) {
    sequence.batch_k = 0;
    sequence.first_key = length_at(&args->cu_seqlens_k, batch);
    sequence.keys = length_at(&args->cu_seqlens_k, batch + 1) - sequence.first_key;
  }
  if (present(&args->cache_batch_index))
    sequence.batch_k = length_at(&args->cache_batch_index, batch);
  if (present(&args->seqused_k)) sequence.keys = length_at(&args->seqused_k, batch);
  if (present(&args->leftpad_k)) {
    sequence.first_key += length_at(&args->leftpad_k, batch);
    sequence.keys -= length_at(&args->leftpad_k, batch);
  }
  sequence.diagonal = present(&args->diagonal) ? ((const int64_t *)args->diagonal.data)[batch]
                                               : sequence.keys - sequence.rows;
  return sequence;
}

static int64_t clamp(int64_t key, int64_t keys) {
  return key < 0 ? 0 : key > keys ? keys : key;
}

/* A window's side, unbounded if it is -1: far above any seqlen and any valid diagonal, far below
 * overflow when added to them. */
static int64_t side(int64_t window) {
  const int64_t unbounded = INT64_MAX / 4;
  return window < 0 || window > unbounded ? unbounded : window;
}

/* Keys that a row sees. */
static int64_t visible_keys(const fa3_forward_args *args, const struct slice_sequence *sequence,
                            int64_t row) {
  bool causal = args->flags & FA3_CAUSAL;
  bool window = args->flags & FA3_WINDOW;
  int64_t own = row + sequence->diagonal;
  int64_t left = side(window ? args->window_left : -1);
  int64_t right = causal ? 0 : side(window ? args->window_right : -1);
  int64_t begin = clamp(own - left, sequence->keys);
  int64_t end = clamp(own + right + 1, sequence->keys);
  return end > begin ? end - begin : 0;
}

double slice_flops(const fa3_forward_args *args, const struct slice_sequence *sequence,
                   int64_t begin, int64_t end) {
  double per_key = 2 * (double)(args->query.shape[args->query.rank - 1] +
                                args->value.shape[args->value.rank - 1]);
  if (!(args->flags & (FA3_CAUSAL | FA3_WINDOW)))
    return per_key * (double)(end - begin) * (double)sequence->keys;
  double keys = 0;
  for (int64_t row = begin; row < end; row++) keys += (double)visible_keys(args, sequence, row);
  return per_key * keys;
}

/* Rows and heads of a (batch, rows, heads, head_dim) or packed tensor, as a batch of one. */
static fa3_tensor part(const fa3_tensor *tensor, int64_t batch, int64_t row, int64_t rows,
                       int64_t head, int64_t heads) {
  const int64_t *stride = tensor->strides + tensor->rank - 3;
  int64_t offset = row * stride[0] + head * stride[1];
  if (tensor->rank == 4) offset += batch * tensor->strides[0];
  return (fa3_tensor){.data = element(tensor, offset),
                      .dtype = tensor->dtype,
                      .rank = 4,
                      .shape = {1, rows, heads, tensor->shape[tensor->rank - 1]},
                      .strides = {0, stride[0], stride[1], tensor->strides[tensor->rank - 1]}};
}

void slice_rows(const fa3_forward_args *args, const struct slice_sequence *sequence,
                int64_t head_begin, int64_t head_end, int64_t row_begin, int64_t row_end,
                struct slice *slice) {
  static const fa3_tensor absent;
  int64_t heads_k = args->key.shape[args->key.rank - 2];
  int64_t group = args->query.shape[args->query.rank - 2] / heads_k;
  int64_t head = head_begin * group;
  int64_t heads = (head_end - head_begin) * group;
  int64_t row = sequence->first_row + row_begin;
  int64_t rows = row_end - row_begin;
  fa3_forward_args *cut = &slice->args;
  *cut = *args;
  cut->query = part(&args->query, sequence->batch_q, row, rows, head, heads);
  cut->output = part(&args->output, sequence->batch_q, row, rows, head, heads);
  cut->key = part(&args->key, sequence->batch_k, sequence->first_key, sequence->keys, head_begin,
                  head_end - head_begin);
  cut->value = part(&args->value, sequence->batch_k, sequence->first_key, sequence->keys,
                    head_begin, head_end - head_begin);
  if (present(&args->lse)) {
    const int64_t *stride = args->lse.strides + args->lse.rank - 2;
    int64_t offset = head * stride[0] + row * stride[1];
    if (args->lse.rank == 3) offset += sequence->batch_q * args->lse.strides[0];
    cut->lse = (fa3_tensor){.data = element(&args->lse, offset),
                            .dtype = FA3_FLOAT32,
                            .rank = 3,
                            .shape = {1, heads, rows},
                            .strides = {0, stride[0], stride[1]}};
  }
  if (present(&args->sink)) {
    cut->sink.data = element(&args->sink, head * args->sink.strides[0]);
    cut->sink.shape[0] = heads;
  }
  cut->cu_seqlens_q = cut->cu_seqlens_k = absent;
  cut->seqused_q = cut->seqused_k = absent;
  cut->leftpad_k = cut->cache_batch_index = absent;
  cut->max_seqlen_q = cut->max_seqlen_k = 0;
  if (args->flags & (FA3_CAUSAL | FA3_WINDOW)) {
    slice->diagonal = sequence->diagonal + row_begin;
    cut->diagonal = fa3_vector(&slice->diagonal, FA3_INT64, 1);
  }
}

/* Entries [begin, begin + count) of a dimension. */
static void keep(fa3_tensor *tensor, int dimension, int64_t begin, int64_t count) {
  if (!present(tensor)) return;
  tensor->data = element(tensor, begin * tensor->strides[dimension]);
  tensor->shape[dimension] = count;
}

void slice_heads(const fa3_backward_args *args, int64_t begin, int64_t end,
                 fa3_backward_args *cut) {
  const int64_t group =
      args->query.shape[args->query.rank - 2] / args->key.shape[args->key.rank - 2];
  *cut = *args;
  fa3_tensor *const queries[] = {&cut->query,      &cut->output, &cut->grad_output,
                                 &cut->grad_query, &cut->lse,    &cut->grad_lse};
  fa3_tensor *const keys[] = {&cut->key, &cut->value, &cut->grad_key, &cut->grad_value};
  for (size_t i = 0; i < sizeof queries / sizeof queries[0]; i++)
    keep(queries[i], queries[i]->rank - 2, begin * group, (end - begin) * group);
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
    keep(keys[i], keys[i]->rank - 2, begin, end - begin);
  keep(&cut->sink, 0, begin * group, (end - begin) * group);
  keep(&cut->grad_sink, 0, begin * group, (end - begin) * group);
}

static void skip_lengths(fa3_tensor *lengths, int64_t begin, int64_t count) {
  if (!present(lengths)) return;
  lengths->data = element(lengths, begin);
  lengths->shape[0] = count;
}

/* Outermost entries [begin, begin + count) of a tensor: of the batch, or packed rows. */
static void skip_outer(fa3_tensor *tensor, int64_t begin, int64_t count) {
  tensor->data = element(tensor, begin * tensor->strides[0]);
  tensor->shape[0] = count;
}

/* cu_seqlens of sequences [begin, begin + count), from 0 on. */
static void rebase(fa3_tensor *cu_seqlens, int64_t begin, int64_t count, int32_t *starts) {
  for (int64_t b = 0; b <= count; b++)
    starts[b] = length_at(cu_seqlens, begin + b) - length_at(cu_seqlens, begin);
  *cu_seqlens = fa3_vector(starts, FA3_INT32, count + 1);
}

void slice_sequences(const fa3_forward_args *args, int64_t begin, int64_t end, int32_t *starts_q,
                     int32_t *starts_k, fa3_forward_args *cut) {
  int64_t count = end - begin;
  int64_t first_q = begin;
  int64_t count_q = count;
  int64_t first_k = begin;
  int64_t count_k = count;
  *cut = *args;
  if (args->query.rank == 3) {
    first_q = length_at(&args->cu_seqlens_q, begin);
    count_q = length_at(&args->cu_seqlens_q, end) - first_q;
    rebase(&cut->cu_seqlens_q, begin, count, starts_q);
  }
  if (args->key.rank == 3) {
    first_k = length_at(&args->cu_seqlens_k, begin);
    count_k = length_at(&args->cu_seqlens_k, end) - first_k;
    rebase(&cut->cu_seqlens_k, begin, count, starts_k);
  }
  skip_outer(&cut->query, first_q, count_q);
  skip_outer(&cut->output, first_q, count_q);
  if (!present(&args->cache_batch_index)) {
    skip_outer(&cut->key, first_k, count_k);
    skip_outer(&cut->value, first_k, count_k);
  }
  if (present(&args->lse) && args->lse.rank == 3) skip_outer(&cut->lse, first_q, count_q);
  if (present(&args->lse) && args->lse.rank == 2) {
    cut->lse.data = element(&args->lse, first_q * args->lse.strides[1]);
    cut->lse.shape[1] = count_q;
  }
  skip_lengths(&cut->seqused_q, begin, count);
  skip_lengths(&cut->seqused_k, begin, count);
  skip_lengths(&cut->leftpad_k, begin, count);
  skip_lengths(&cut->cache_batch_index, begin, count);
  skip_lengths(&cut->diagonal, begin, count);
}
