#include "row.h"

#include <math.h>

#include "float8.h"
#include "half.h"
#include "reference.h"

double reference_load(const fa3_tensor *tensor, int64_t index) {
  double element;
  load_elements(tensor, index, 1, &element);
  return element;
}

void load_elements(const fa3_tensor *tensor, int64_t index, int64_t count, double *elements) {
  const void *data = tensor->data;
  switch (tensor->dtype) {
    case FA3_FLOAT32:
      for (int64_t i = 0; i < count; i++) elements[i] = (double)((const float *)data)[index + i];
      return;
    case FA3_FLOAT16:
      for (int64_t i = 0; i < count; i++)
        elements[i] = (double)float_from_half(((const uint16_t *)data)[index + i]);
      return;
    case FA3_BFLOAT16:
      for (int64_t i = 0; i < count; i++)
        elements[i] = (double)float_from_bfloat(((const uint16_t *)data)[index + i]);
      return;
    case FA3_FLOAT8_E4M3:
      for (int64_t i = 0; i < count; i++)
        elements[i] = (double)float_from_e4m3(((const uint8_t *)data)[index + i]);
      return;
    case FA3_INT32:
      for (int64_t i = 0; i < count; i++) elements[i] = ((const int32_t *)data)[index + i];
      return;
    case FA3_INT64:
      for (int64_t i = 0; i < count; i++) elements[i] = (double)((const int64_t *)data)[index + i];
      return;
    default:
      for (int64_t i = 0; i < count; i++) elements[i] = NAN;
  }
}

double dot(const double *a, const double *b, int64_t count, double *magnitude) {
  enum { LANES = 4 }; /* head dims are multiples of 8; apart, additions need not wait for another */
  double sums[LANES] = {0}, magnitudes[LANES] = {0};
  for (int64_t i = 0; i < count; i += LANES)
    for (int lane = 0; lane < LANES && i + lane < count; lane++) {
      const double product = a[i + lane] * b[i + lane];
      sums[lane] += product;
      magnitudes[lane] += fabs(product);
    }
  *magnitude = (magnitudes[0] + magnitudes[1]) + (magnitudes[2] + magnitudes[3]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static int32_t length_at(const fa3_tensor *lengths, int64_t index) {
  return ((const int32_t *)lengths->data)[index];
}

static int64_t first_row(const fa3_tensor *cu_seqlens, int64_t batch) {
  return cu_seqlens->data ? length_at(cu_seqlens, batch) : 0;
}

int64_t sequence_element(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens, int64_t batch,
                         int64_t row, int64_t head) {
  const int64_t *stride = tensor->strides;
  if (tensor->rank == 3) return (first_row(cu_seqlens, batch) + row) * stride[0] + head * stride[1];
  return batch * stride[0] + row * stride[1] + head * stride[2];
}

int64_t row_value_index(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens, int64_t batch,
                        int64_t row, int64_t head) {
  const int64_t *stride = tensor->strides;
  if (tensor->rank == 2) return head * stride[0] + (first_row(cu_seqlens, batch) + row) * stride[1];
  return batch * stride[0] + head * stride[1] + row * stride[2];
}

static double load_scale(const fa3_tensor *scale, int64_t index) {
  const double number = reference_load(scale, index);
  return isfinite(number) ? number : NAN;
}

/* What the codes of a row are multiplied by: the words of fa3.h. `entry` is a batch entry or a
 * page, and `at` the row in it. */
static double scale_of(const fa3_tensor *scale, int64_t rows, const fa3_tensor *cu_seqlens,
                       int64_t sequence, int64_t entry, int64_t head, int64_t at) {
  const int64_t *stride = scale->strides;
  if (!scale->data) return 1;
  if (scale->rank == 1) return load_scale(scale, 0);
  if (cu_seqlens->data && rows) {
    const int64_t block = first_row(cu_seqlens, sequence) / rows + sequence + at / rows;
    return load_scale(scale, head * stride[0] + block * stride[1]);
  }
  const int64_t first = (cu_seqlens->data ? sequence : entry) * stride[0] + head * stride[1];
  return load_scale(scale, first + (rows ? at / rows * stride[2] : 0));
}

/* Rows of a sequence that count, of those that are allotted to it in a dense batch. */
static int64_t sequence_rows(const fa3_tensor *cu_seqlens, const fa3_tensor *seqused,
                             int64_t allotted, int64_t batch) {
  if (seqused->data) return length_at(seqused, batch);
  if (cu_seqlens->data) return length_at(cu_seqlens, batch + 1) - length_at(cu_seqlens, batch);
  return allotted;
}

int64_t sequence_leftpad(const fa3_tensor *leftpad, int64_t batch) {
  return leftpad->data ? length_at(leftpad, batch) : 0;
}

int64_t reference_seqlen_q(const fa3_forward_args *args, int64_t batch) {
  return sequence_rows(&args->cu_seqlens_q, &args->seqused_q, args->query.shape[1], batch);
}

int64_t reference_seqlen_k(const fa3_forward_args *args, int64_t batch) {
  const int64_t pages = args->page_table.data ? args->page_table.shape[1] : 1;
  return sequence_rows(&args->cu_seqlens_k, &args->seqused_k, pages * args->key.shape[1], batch) -
         sequence_leftpad(&args->leftpad_k, batch);
}

struct row row_of(const fa3_forward_args *args, int64_t batch, int64_t head, int64_t i) {
  const fa3_tensor *query = &args->query;
  const fa3_tensor *key = &args->key;
  int64_t heads_q = query->shape[query->rank - 2];
  int64_t heads_k = key->shape[key->rank - 2];

  struct row row = {.args = args, .batch = batch};
  row.query = sequence_element(query, &args->cu_seqlens_q, batch, i, head);
  row.batch_k = args->cache_batch_index.data ? length_at(&args->cache_batch_index, batch) : batch;
  row.head_k = head / (heads_q / heads_k);
  const fa3_tensor *scale = &args->query_scale;
  const int scale_heads = args->cu_seqlens_q.data && args->query_scale_rows ? 0 : 1;
  row.query_scale = scale_of(scale, args->query_scale_rows, &args->cu_seqlens_q, batch, batch,
                             scale->shape[scale_heads] == heads_k ? row.head_k : head, i);
  row.row_k = sequence_leftpad(&args->leftpad_k, batch);
  row.seqlen_k = reference_seqlen_k(args, batch);
  row.center = (long double)i;
  row.center += args->diagonal.data ? ((const int64_t *)args->diagonal.data)[batch]
                                    : row.seqlen_k - reference_seqlen_q(args, batch);
  row.scale = args->flags & FA3_SCALE ? (double)args->softmax_scale
                                      : 1 / sqrt((double)query->shape[query->rank - 1]);
  return row;
}

/* Where key j is: the entry of the batch, or the page, and the row there. */
static int64_t find_key(const struct row *row, int64_t j, int64_t *entry) {
  const fa3_tensor *table = &row->args->page_table;
  const int64_t at = row->row_k + j, page_size = row->args->key.shape[1];
  *entry = row->batch_k;
  if (!table->data) return at;
  *entry = length_at(table, row->batch * table->strides[0] + at / page_size);
  return at % page_size;
}

static double key_scale(const struct row *row, int64_t entry, int64_t at, bool value) {
  const fa3_forward_args *args = row->args;
  return scale_of(value ? &args->value_scale : &args->key_scale,
                  value ? args->value_scale_rows : args->key_scale_rows, &args->cu_seqlens_k,
                  row->batch, entry, row->head_k, at);
}

void load_key(const struct row *row, int64_t j, bool value, double *elements) {
  const fa3_forward_args *args = row->args;
  const fa3_tensor *tensor = value ? &args->value : &args->key;
  const int64_t dim = tensor->shape[tensor->rank - 1];
  int64_t entry;
  const int64_t at = find_key(row, j, &entry);
  load_elements(tensor, sequence_element(tensor, &args->cu_seqlens_k, entry, at, row->head_k), dim,
                elements);
  const double scale = key_scale(row, entry, at, value);
  for (int64_t d = 0; d < dim; d++) elements[d] *= scale;
}

double value_scale(const struct row *row, int64_t j) {
  int64_t entry;
  const int64_t at = find_key(row, j, &entry);
  return key_scale(row, entry, at, true);
}

bool row_sees(const struct row *row, int64_t j) {
  const fa3_forward_args *args = row->args;
  bool causal = args->flags & FA3_CAUSAL;
  bool window = args->flags & FA3_WINDOW;
  if (causal && !((long double)j <= row->center)) return false;
  if (!window) return true;
  if (args->window_left != -1 && !((long double)j >= row->center - args->window_left)) return false;
  if (causal || args->window_right == -1) return true;
  return (long double)j <= row->center + args->window_right;
}

double sink_of(const fa3_forward_args *args, int64_t head) {
  if (!args->sink.data) return -INFINITY;
  return reference_load(&args->sink, head * args->sink.strides[0]);
}

double row_score(const struct row *row, int64_t j, double *magnitude) {
  const fa3_forward_args *args = row->args;
  const int64_t head_dim = args->query.shape[args->query.rank - 1];
  double query[MAX_HEAD_DIM], key[MAX_HEAD_DIM];
  load_elements(&args->query, row->query, head_dim, query);
  for (int64_t d = 0; d < head_dim; d++) query[d] *= row->query_scale;
  load_key(row, j, false, key);
  const double sum = dot(query, key, head_dim, magnitude) * row->scale;
  *magnitude *= fabs(row->scale);
  return sum;
}

double row_cap(const struct row *row, double score) {
  const double cap = (double)row->args->softcap;
  return cap > 0 ? cap * tanh(score / cap) : score;
}

struct rounding rounding_of(fa3_dtype dtype) {
  if (dtype == FA3_FLOAT16) return (struct rounding){0x1p-11, 0x1p-25};
  if (dtype == FA3_BFLOAT16) return (struct rounding){0x1p-8, 0x1p-134};
  return (struct rounding){UNIT_ROUNDOFF, 0x1p-150};
}

struct rounding weight_rounding(fa3_dtype dtype) {
  if (dtype == FA3_FLOAT8_E4M3) return (struct rounding){2 * UNIT_ROUNDOFF, 0x1p-150};
  return dtype == FA3_FLOAT32 ? (struct rounding){0, 0} : rounding_of(dtype);
}

bool rounds_scaled_weights(const fa3_forward_args *args) {
  return args->device.type == FA3_CUDA && args->value.dtype == FA3_FLOAT8_E4M3 &&
         args->query.dtype != FA3_FLOAT8_E4M3;
}

bool multiplies_codes(const fa3_forward_args *args) {
  return args->device.type == FA3_CUDA && args->query.dtype == FA3_FLOAT8_E4M3;
}

double code_sum_error(double products) {
  return products * (1 + 1 / 32.0) * 0x1p-13; /* the sum so far joins every 32 of them */
}

double chain(double n) {
  double error = fmin(n, 8 * sqrt(n)) * UNIT_ROUNDOFF;
  return error / (1 - error);
}
