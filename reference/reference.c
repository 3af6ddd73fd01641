#include "reference.h"

#include "half.h"

#include <math.h>
#include <stdbool.h>

double reference_load(const fa3_tensor *tensor, int64_t index) {
  switch (tensor->dtype) {
    case FA3_FLOAT32:
      return ((const float *)tensor->data)[index];
    case FA3_FLOAT16:
      return float_from_half(((const uint16_t *)tensor->data)[index]);
    case FA3_BFLOAT16:
      return float_from_bfloat(((const uint16_t *)tensor->data)[index]);
    case FA3_INT32:
      return ((const int32_t *)tensor->data)[index];
    case FA3_INT64:
      return (double)((const int64_t *)tensor->data)[index];
    default:
      return NAN;
  }
}

static int32_t length_at(const fa3_tensor *lengths, int64_t index) {
  return ((const int32_t *)lengths->data)[index];
}

static bool present(const fa3_tensor *tensor) {
  return tensor->data != NULL;
}

/* Index of (batch, row, head, 0), where a packed tensor's row counts from its first sequence. */
static int64_t element(const fa3_tensor *tensor, int64_t batch, int64_t row, int64_t head) {
  const int64_t *stride = tensor->strides;
  if (tensor->rank == 3) return row * stride[0] + head * stride[1];
  return batch * stride[0] + row * stride[1] + head * stride[2];
}

static int64_t first_row(const fa3_tensor *cu_seqlens, int64_t batch) {
  return present(cu_seqlens) ? length_at(cu_seqlens, batch) : 0;
}

static int64_t used_rows(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens,
                         const fa3_tensor *seqused, int64_t batch) {
  if (present(seqused)) return length_at(seqused, batch);
  if (present(cu_seqlens)) return length_at(cu_seqlens, batch + 1) - length_at(cu_seqlens, batch);
  return tensor->shape[1];
}

int64_t reference_seqlen_q(const fa3_forward_args *args, int64_t batch) {
  return used_rows(&args->query, &args->cu_seqlens_q, &args->seqused_q, batch);
}

int64_t reference_output_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                               int64_t row) {
  return element(&args->output, batch, first_row(&args->cu_seqlens_q, batch) + row, head);
}

int64_t reference_lse_index(const fa3_forward_args *args, int64_t batch, int64_t head,
                            int64_t row) {
  const int64_t *stride = args->lse.strides;
  if (args->lse.rank == 2)
    return head * stride[0] + (first_row(&args->cu_seqlens_q, batch) + row) * stride[1];
  return batch * stride[0] + head * stride[1] + row * stride[2];
}

/* One query row and the keys of its sequence. */
struct row {
  const fa3_forward_args *args;
  int64_t query;   /* index of its first element */
  int64_t batch_k; /* where key and value rows are */
  int64_t head_k;
  int64_t row_k;
  int64_t seqlen_k;
  long double center; /* i + diagonal; a long double holds every int64 and their sums */
  double scale;
};

static struct row row_of(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t i) {
  const fa3_tensor *query = &args->query;
  const fa3_tensor *key = &args->key;
  int64_t leftpad = present(&args->leftpad_k) ? length_at(&args->leftpad_k, batch) : 0;
  int64_t seqlen_q = reference_seqlen_q(args, batch);
  int64_t heads_q = query->shape[query->rank - 2];
  int64_t heads_k = key->shape[key->rank - 2];

  struct row row = {.args = args};
  row.query = element(query, batch, first_row(&args->cu_seqlens_q, batch) + i, head);
  row.batch_k =
      present(&args->cache_batch_index) ? length_at(&args->cache_batch_index, batch) : batch;
  row.head_k = head / (heads_q / heads_k);
  row.row_k = first_row(&args->cu_seqlens_k, batch) + leftpad;
  row.seqlen_k = used_rows(key, &args->cu_seqlens_k, &args->seqused_k, batch) - leftpad;
  row.center = (long double)i;
  row.center += present(&args->diagonal) ? ((const int64_t *)args->diagonal.data)[batch]
                                         : row.seqlen_k - seqlen_q;
  row.scale = args->flags & FA3_SCALE ? (double)args->softmax_scale
                                      : 1 / sqrt((double)query->shape[query->rank - 1]);
  return row;
}

static bool sees(const struct row *row, int64_t j) {
  const fa3_forward_args *args = row->args;
  bool causal = args->flags & FA3_CAUSAL;
  bool window = args->flags & FA3_WINDOW;
  if (causal && !((long double)j <= row->center)) return false;
  if (!window) return true;
  if (args->window_left != -1 && !((long double)j >= row->center - args->window_left)) return false;
  if (causal || args->window_right == -1) return true;
  return (long double)j <= row->center + args->window_right;
}

static double score(const struct row *row, int64_t j) {
  const fa3_tensor *query = &row->args->query;
  const fa3_tensor *key = &row->args->key;
  int64_t first = element(key, row->batch_k, row->row_k + j, row->head_k);
  double cap = row->args->softcap;
  double sum = 0;
  for (int64_t d = 0; d < query->shape[query->rank - 1]; d++)
    sum += reference_load(query, row->query + d) * reference_load(key, first + d);
  sum *= row->scale;
  return cap > 0 ? cap * tanh(sum / cap) : sum;
}

void reference_row(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t row,
                   double *output, double *lse) {
  const struct row r = row_of(args, batch, head, row);
  const fa3_tensor *value = &args->value;
  int64_t value_head_dim = value->shape[value->rank - 1];
  double sink =
      present(&args->sink) ? reference_load(&args->sink, head * args->sink.strides[0]) : -INFINITY;

  double max = sink; /* subtracted from every score: exp() then can't overflow */
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!sees(&r, j)) continue;
    double x = score(&r, j);
    if (!(x <= max)) max = x; /* NaN too, and it stays */
    if (isnan(max)) break;
  }

  for (int64_t d = 0; d < value_head_dim; d++) output[d] = 0;
  *lse = -INFINITY;
  if (max == -INFINITY) return;

  double sum = exp(sink - max);
  for (int64_t j = 0; j < r.seqlen_k; j++) {
    if (!sees(&r, j)) continue;
    double weight = exp(score(&r, j) - max);
    int64_t first = element(value, r.batch_k, r.row_k + j, r.head_k);
    sum += weight;
    for (int64_t d = 0; d < value_head_dim; d++)
      output[d] += weight * reference_load(value, first + d);
  }
  for (int64_t d = 0; d < value_head_dim; d++) output[d] /= sum;
  *lse = max + log(sum);
}
