#include "trial.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "reference.h"
#include "test.h"

/* A kernel that numbers the tiles of a packed batch looks at so many sequences together. A batch of
 * more than that has about so many rows in all. */
enum { SEQUENCES_OF_A_WARP = 32, MANY_ROWS = 6000 };

/* That are compared, in the mean, however long they are. */
static const double least_rows = 16;

static int64_t min(int64_t a, int64_t b) {
  return a < b ? a : b;
}

bool trial_is_output(fa3_phase phase, enum tensor tensor) {
  const struct argument *argument = find_argument(phase, tensor);
  return argument && argument->output;
}

static void make_tensor(struct trial *trial, enum tensor which, fa3_tensor *tensor, fa3_dtype dtype,
                        int32_t rank, const int64_t shape[4], int heads, struct rng *rng) {
  *tensor = (fa3_tensor){.dtype = dtype, .rank = rank};
  memcpy(tensor->shape, shape, sizeof tensor->shape);
  tensor_layout(tensor, heads, trial->spec.layout, !trial_is_output(FA3_FORWARD, which), rng);
  tensor_allocate(&trial->buffers[which], tensor, rng);
}

/* (batch, rows, heads, dim), or (rows, heads, dim) if packed. */
static void make_operand(struct trial *trial, enum tensor which, fa3_tensor *tensor,
                         fa3_dtype dtype, bool packed, int64_t batch, int64_t rows, int64_t heads,
                         int64_t dim, struct rng *rng) {
  const int64_t dense_shape[4] = {batch, rows, heads, dim};
  const int64_t packed_shape[4] = {rows, heads, dim};
  make_tensor(trial, which, tensor, dtype, packed ? 3 : 4, packed ? packed_shape : dense_shape,
              packed ? 1 : 2, rng);
}

static int32_t *make_int32(struct trial *trial, enum tensor which, fa3_tensor *tensor,
                           int64_t extent, struct rng *rng) {
  *tensor = fa3_vector(NULL, FA3_INT32, extent);
  tensor_allocate(&trial->buffers[which], tensor, rng);
  return tensor->data;
}

/* Lengths of a packed batch; returns the total of rows, with a few behind the last sequence. Of
 * many sequences one is as long as may be. */
static int64_t make_cu_seqlens(struct trial *trial, enum tensor which, fa3_tensor *tensor,
                               int64_t longest, struct rng *rng) {
  int64_t batch = trial->spec.batch;
  int32_t *cu_seqlens = make_int32(trial, which, tensor, batch + 1, rng);
  const bool many = batch > SEQUENCES_OF_A_WARP;
  const int64_t usual = many && longest > MANY_ROWS / batch ? MANY_ROWS / batch : longest;
  const int64_t long_one = many ? rng_between(rng, 0, batch - 1) : batch;
  cu_seqlens[0] = 0;
  for (int64_t b = 0; b < batch; b++) {
    int64_t length = rng_chance(rng, 0.4) ? usual : rng_between(rng, 0, usual);
    if (b == long_one) length = longest;
    cu_seqlens[b + 1] = cu_seqlens[b] + (int32_t)length;
  }
  return cu_seqlens[batch] + (rng_chance(rng, 0.3) ? rng_between(rng, 1, 9) : 0);
}

static struct rows allotted_rows(const fa3_tensor *tensor, const fa3_tensor *cu_seqlens,
                                 int64_t batch) {
  if (!cu_seqlens->data) return (struct rows){batch, 0, tensor->shape[1]};
  const int32_t *starts = cu_seqlens->data;
  return (struct rows){0, starts[batch], starts[batch + 1] - starts[batch]};
}

struct rows trial_query_rows(const struct trial *trial, int64_t batch) {
  struct rows rows = allotted_rows(&trial->args.query, &trial->args.cu_seqlens_q, batch);
  if (trial->args.seqused_q.data) rows.count = ((int32_t *)trial->args.seqused_q.data)[batch];
  return rows;
}

struct rows trial_key_rows(const struct trial *trial, int64_t batch) {
  const fa3_forward_args *args = &trial->args;
  struct rows rows = allotted_rows(&args->key, &args->cu_seqlens_k, batch);
  if (args->page_table.data) rows.count = args->page_table.shape[1] * args->key.shape[1];
  if (args->cache_batch_index.data) rows.batch = ((int32_t *)args->cache_batch_index.data)[batch];
  if (args->seqused_k.data) rows.count = ((int32_t *)args->seqused_k.data)[batch];
  if (args->leftpad_k.data) {
    rows.first += ((int32_t *)args->leftpad_k.data)[batch];
    rows.count -= ((int32_t *)args->leftpad_k.data)[batch];
  }
  return rows;
}

static void make_lengths(struct trial *trial, struct rng *rng) {
  const struct spec *spec = &trial->spec;
  fa3_forward_args *args = &trial->args;
  int64_t batch = spec->batch;
  if (spec->seqused_q) {
    int32_t *used = make_int32(trial, TENSOR_seqused_q, &args->seqused_q, batch, rng);
    for (int64_t b = 0; b < batch; b++)
      used[b] =
          (int32_t)rng_between(rng, 0, allotted_rows(&args->query, &args->cu_seqlens_q, b).count);
  }
  if (spec->batch_index) {
    int32_t *index =
        make_int32(trial, TENSOR_cache_batch_index, &args->cache_batch_index, batch, rng);
    for (int64_t b = 0; b < batch; b++)
      index[b] = (int32_t)rng_between(rng, 0, args->key.shape[0] - 1);
  }
  if (spec->seqused_k) {
    const int64_t longest =
        args->page_table.data ? args->page_table.shape[1] * args->key.shape[1] : -1;
    int32_t *used = make_int32(trial, TENSOR_seqused_k, &args->seqused_k, batch, rng);
    for (int64_t b = 0; b < batch; b++)
      used[b] = (int32_t)rng_between(
          rng, 0, longest >= 0 ? longest : allotted_rows(&args->key, &args->cu_seqlens_k, b).count);
  }
  if (spec->leftpad_k) {
    int32_t *leftpad = make_int32(trial, TENSOR_leftpad_k, &args->leftpad_k, batch, rng);
    for (int64_t b = 0; b < batch; b++) {
      leftpad[b] = 0;
      leftpad[b] = (int32_t)rng_between(rng, 0, min(trial_key_rows(trial, b).count, 40));
    }
  }
  if (spec->diagonal) {
    args->diagonal = fa3_vector(NULL, FA3_INT64, batch);
    tensor_allocate(&trial->buffers[TENSOR_diagonal], &args->diagonal, rng);
    int64_t *diagonal = args->diagonal.data;
    for (int64_t b = 0; b < batch; b++)
      diagonal[b] = rng_chance(rng, 0.1)
                        ? RNG_PICK(rng, INT64_C(1) << 60, -(INT64_C(1) << 60), INT64_C(1) << 32)
                        : rng_between(rng, -spec->max_seqlen_q - 2, spec->max_seqlen_k + 2);
  }
}

void trial_fill_rows(const fa3_tensor *tensor, struct rows rows, double spread, double trend,
                     struct rng *rng) {
  const int64_t *shape = tensor->shape + tensor->rank - 3;
  const int64_t *strides = tensor->strides + tensor->rank - 3;
  int64_t start = tensor->rank == 4 ? rows.batch * tensor->strides[0] : 0;
  for (int64_t row = 0; row < rows.count; row++) {
    double position = (double)row / (double)rows.count - 0.5;
    for (int64_t head = 0; head < shape[1]; head++)
      for (int64_t d = 0; d < shape[2]; d++)
        tensor_store(tensor, start + (rows.first + row) * strides[0] + head * strides[1] + d,
                     spread * (1 + trend * position) * rng_normal(rng));
  }
}

/* Rows that lie in the same place keep the same element. */
static void keep_one_element(const fa3_tensor *tensor, struct rows rows) {
  const int64_t *shape = tensor->shape + tensor->rank - 3;
  const int64_t *strides = tensor->strides + tensor->rank - 3;
  for (int64_t row = rows.first; row < rows.first + rows.count; row++)
    for (int64_t head = 0; head < shape[1]; head++) {
      const int64_t first = (tensor->rank == 4 ? rows.batch * tensor->strides[0] : 0) +
                            row * strides[0] + head * strides[1];
      for (int64_t d = 0; d < shape[2]; d++)
        if (d != first / shape[2] * 7 % shape[2]) tensor_store(tensor, first + d, 0);
    }
}

/* A sequence's rows of key or value, which may be in pages. */
static void fill_cache(const struct trial *trial, const fa3_tensor *tensor, int64_t batch,
                       double spread, double trend, struct rng *rng) {
  const fa3_tensor *table = &trial->args.page_table;
  const struct rows rows = trial_key_rows(trial, batch);
  if (!table->data) {
    trial_fill_rows(tensor, rows, spread, trend, rng);
    return;
  }
  const int32_t *pages = (const int32_t *)table->data + batch * table->strides[0];
  const int64_t page_size = tensor->shape[1];
  for (int64_t r = rows.first; r < rows.first + rows.count; r++) {
    const double position = (double)(r - rows.first) / (double)rows.count - 0.5;
    trial_fill_rows(tensor, (struct rows){pages[r / page_size], r % page_size, 1},
                    spread * (1 + trend * position), 0, rng);
  }
}

/* Pages of all sequences in random order, with some that nobody uses; now and then the first
 * sequences share their first pages. Entries past a sequence's length are wild. */
static void make_page_table(struct trial *trial, struct rng *rng) {
  const struct spec *spec = &trial->spec;
  fa3_forward_args *args = &trial->args;
  fa3_tensor *table = &args->page_table;
  const int64_t pages = args->key.shape[0], columns = table->shape[1];
  int32_t *order = calloc((size_t)pages + 1, sizeof *order);
  if (!order) exit(1);
  rng_order(rng, order, pages);
  const bool shared = rng_chance(rng, 0.3);
  for (int64_t b = 0; b < spec->batch; b++) {
    int32_t *row = (int32_t *)table->data + b * table->strides[0];
    const struct rows rows = trial_key_rows(trial, b);
    for (int64_t i = 0; i < columns; i++) {
      row[i] = order[b * columns + i];
      if (shared && b > 0 && i < columns / 2) row[i] = order[i];
      if (i * spec->page_size >= rows.first + rows.count)
        row[i] = (int32_t)RNG_PICK(rng, -1, INT32_MAX, INT32_MIN, (int64_t)pages);
    }
  }
  free(order);
}

/* Of keys, or values: what a row's scale is where it has not been drawn for another row. */
static void fill_scale(const struct trial *trial, int64_t batch, const fa3_tensor *scale,
                       int64_t rows_of_block, double spread, struct rng *rng) {
  const fa3_forward_args *args = &trial->args;
  const struct rows rows = trial_key_rows(trial, batch);
  const int64_t *stride = scale->strides;
  for (int64_t r = rows.first; r < rows.first + rows.count; r++)
    for (int64_t head = 0; head < trial->spec.heads_k; head++) {
      int64_t entry = rows.batch, row = r, index = 0;
      if (args->page_table.data) {
        const int32_t *pages = (const int32_t *)args->page_table.data;
        entry = pages[batch * args->page_table.strides[0] + r / args->key.shape[1]];
        row = r % args->key.shape[1];
      }
      if (args->cu_seqlens_k.data) {
        const int32_t start = ((const int32_t *)args->cu_seqlens_k.data)[batch];
        if (rows_of_block)
          index = head * stride[0] +
                  (start / rows_of_block + batch + (r - start) / rows_of_block) * stride[1];
        else if (scale->rank > 1)
          index = batch * stride[0] + head * stride[1];
      } else if (scale->rank > 1) {
        index = entry * stride[0] + head * stride[1];
        if (rows_of_block) index += row / rows_of_block * stride[2];
      }
      if (isnan(reference_load(scale, index)))
        tensor_store(scale, index, spread / 4 * (0.5 + rng_uniform(rng)));
    }
}

/* Of the shape that the spec's form has; what no row has stays NaN. */
static void make_scale(struct trial *trial, enum tensor which, fa3_tensor *scale, int64_t *rows,
                       enum scale_form form, double spread, struct rng *rng) {
  const struct spec *spec = &trial->spec;
  const fa3_tensor *key = &trial->args.key;
  if (form == SCALE_NONE) return;
  const int64_t heads = spec->heads_k, extent = key->shape[spec->packed_k ? 0 : 1];
  const int64_t entries = spec->packed_k ? spec->batch : key->shape[0];
  int64_t shape[4] = {1}, rank = 1;
  if (form >= SCALE_HEADS) {
    shape[0] = entries;
    shape[1] = heads;
    rank = 2;
  }
  if (form == SCALE_BLOCKS) {
    *rows = spec->scale_rows;
    const int64_t blocks =
        spec->packed_k ? extent / *rows + spec->batch : (extent + *rows - 1) / *rows;
    if (spec->packed_k) {
      shape[0] = heads;
      shape[1] = blocks;
    } else {
      shape[2] = blocks;
      rank = 3;
    }
  }
  make_tensor(trial, which, scale, FA3_FLOAT32, (int32_t)rank, shape, -1, rng);
  for (int64_t b = 0; scale->data && b < spec->batch; b++)
    fill_scale(trial, b, scale, *rows, spread, rng);
}

static void make_scales(struct trial *trial, struct rng *rng) {
  const struct spec *spec = &trial->spec;
  fa3_forward_args *args = &trial->args;
  make_scale(trial, TENSOR_key_scale, &args->key_scale, &args->key_scale_rows, spec->key_scale,
             spec->spread, rng);
  make_scale(trial, TENSOR_value_scale, &args->value_scale, &args->value_scale_rows,
             spec->value_scale, 1, rng);
}

/* Of the elements that are stored: of codes with a scale, some small numbers. */
static double code_spread(const fa3_tensor *scale, double spread) {
  return scale->data ? 4 : spread;
}

static void fill(struct trial *trial, struct rng *rng) {
  const struct spec *spec = &trial->spec;
  /* Scores that grow along the keys raise the running maximum again and again. */
  double trend = (double)rng_between(rng, -1, 1) * 1.8;
  for (int64_t b = 0; b < spec->batch; b++) {
    trial_fill_rows(&trial->args.query, trial_query_rows(trial, b), spec->spread, 0, rng);
    if (spec->one_hot) keep_one_element(&trial->args.query, trial_query_rows(trial, b));
    fill_cache(trial, &trial->args.key, b, code_spread(&trial->args.key_scale, spec->spread), trend,
               rng);
    fill_cache(trial, &trial->args.value, b, code_spread(&trial->args.value_scale, 1), 0, rng);
  }
}

struct trial trial_new(const struct spec *spec, struct rng *rng) {
  struct trial trial = {.spec = *spec, .args = {.struct_size = sizeof(fa3_forward_args)}};
  fa3_forward_args *args = &trial.args;
  int64_t heads_q = spec->heads_k * spec->group;
  const fa3_dtype key_dtype = spec->codes ? FA3_FLOAT8_E4M3 : spec->dtype;
  int64_t rows_q = spec->max_seqlen_q;
  int64_t rows_k = spec->max_seqlen_k;
  int64_t batch_k = spec->batch_index ? rng_between(rng, 1, 4) : spec->batch;
  if (spec->page_size) {
    const int64_t columns = rows_k > 0 ? (rows_k + spec->page_size - 1) / spec->page_size : 1;
    args->page_table = (fa3_tensor){.dtype = FA3_INT32,
                                    .rank = 2,
                                    .shape = {spec->batch, columns},
                                    .strides = {columns + rng_between(rng, 0, 2), 1}};
    tensor_allocate(&trial.buffers[TENSOR_page_table], &args->page_table, rng);
    batch_k = spec->batch * columns + rng_between(rng, 0, 3);
    rows_k = spec->page_size;
    if (rng_chance(rng, 0.3)) args->max_seqlen_k = columns * rows_k + rng_between(rng, 0, 9);
  }
  if (spec->packed_q) {
    rows_q = make_cu_seqlens(&trial, TENSOR_cu_seqlens_q, &args->cu_seqlens_q, rows_q, rng);
    args->max_seqlen_q = spec->max_seqlen_q + rng_between(rng, 0, 2);
  }
  if (spec->packed_k) {
    rows_k = make_cu_seqlens(&trial, TENSOR_cu_seqlens_k, &args->cu_seqlens_k, rows_k, rng);
    args->max_seqlen_k = rng_chance(rng, 0.5) ? spec->max_seqlen_k : 0;
  }
  make_operand(&trial, TENSOR_query, &args->query, spec->dtype, spec->packed_q, spec->batch, rows_q,
               heads_q, spec->head_dim, rng);
  make_operand(&trial, TENSOR_key, &args->key, key_dtype, spec->packed_k, batch_k, rows_k,
               spec->heads_k, spec->head_dim, rng);
  make_operand(&trial, TENSOR_value, &args->value, key_dtype, spec->packed_k, batch_k, rows_k,
               spec->heads_k, spec->value_head_dim, rng);
  make_operand(&trial, TENSOR_output, &args->output, spec->output_dtype, spec->packed_q,
               spec->batch, rows_q, heads_q, spec->value_head_dim, rng);
  if (spec->lse) {
    const int64_t dense_shape[4] = {spec->batch, heads_q, rows_q};
    const int64_t packed_shape[4] = {heads_q, rows_q};
    make_tensor(&trial, TENSOR_lse, &args->lse, FA3_FLOAT32, spec->packed_q ? 2 : 3,
                spec->packed_q ? packed_shape : dense_shape, -1, rng);
  }
  if (spec->sink_dtype) {
    args->sink = fa3_vector(NULL, spec->sink_dtype, heads_q);
    tensor_allocate(&trial.buffers[TENSOR_sink], &args->sink, rng);
    const double most = spec->sink_dtype == FA3_FLOAT16 ? 65504 : 3.38e38; /* and bfloat16 */
    for (int64_t h = 0; h < heads_q; h++)
      tensor_store(
          &args->sink, h,
          rng_chance(rng, 0.1) ? -INFINITY : fmax(fmin(spec->sink * rng_normal(rng), most), -most));
  }
  make_lengths(&trial, rng);
  if (spec->page_size) make_page_table(&trial, rng);
  if (spec->codes) make_scales(&trial, rng);
  fill(&trial, rng);
  args->flags = spec->flags;
  args->window_left = spec->window_left;
  args->window_right = spec->window_right;
  args->softmax_scale = spec->scale;
  args->softcap = spec->softcap;
  args->num_threads = spec->num_threads;
  args->num_splits = spec->num_splits;
  args->split_keys = spec->split_keys;
  return trial;
}

void trial_free(struct trial *trial) {
  for (int i = 0; i < TENSORS; i++) buffer_free(&trial->buffers[i]);
  buffer_free(&trial->workspace);
}

void *trial_make_workspace(size_t bytes, struct buffer *workspace, struct rng *rng) {
  buffer_free(workspace);
  if (bytes > 0)
    *workspace = rng_chance(rng, 0.5) ? buffer_at_end(bytes)
                                      : buffer_at_start(bytes, (size_t)rng_between(rng, 0, 64));
  return workspace->data;
}

void trial_run(struct trial *trial, struct rng *rng) {
  for (enum tensor i = 0; i < TENSORS; i++)
    if (!trial_is_output(FA3_FORWARD, i)) buffer_make_read_only(&trial->buffers[i]);
  size_t bytes = 0;
  if (fa3_forward_workspace(&trial->args, &bytes))
    fail_msg("fa3_forward_workspace: %s", fa3_last_error());
  trial->args.workspace = trial_make_workspace(bytes, &trial->workspace, rng);
  trial->args.workspace_size = bytes;
  if (fa3_forward(&trial->args)) fail_msg("fa3_forward: %s", fa3_last_error());
}

double trial_check(const struct trial *trial, struct rng *rng, double pairs) {
  const fa3_forward_args *args = &trial->args;
  int64_t heads_q = trial->spec.heads_k * trial->spec.group;
  for (int i = 0; i < TENSORS; i++) buffer_check(&trial->buffers[i], tensor_rows[i].name);
  buffer_check(&trial->workspace, "workspace");

  double all = 0, rows = 0;
  for (int64_t b = 0; b < trial->spec.batch; b++) {
    rows += (double)(heads_q * trial_query_rows(trial, b).count);
    all += (double)(heads_q * trial_query_rows(trial, b).count * trial_key_rows(trial, b).count);
  }
  double part = all > pairs ? pairs / all : 1;
  if (part * rows < least_rows) part = least_rows / rows;

  struct comparison at = {0};
  bool *output_marks = tensor_marks(&args->output);
  bool *lse_marks = tensor_marks(&args->lse);
  for (int64_t b = 0; b < trial->spec.batch; b++) {
    for (int64_t head = 0; head < heads_q; head++) {
      for (int64_t row = 0; row < trial_query_rows(trial, b).count; row++) {
        int64_t index = reference_output_index(args, b, head, row);
        memset(output_marks + index, true, (size_t)trial->spec.value_head_dim);
        if (args->lse.data) lse_marks[reference_lse_index(args, b, head, row)] = true;
        at.batch = b;
        at.head = head;
        at.row = row;
        if (part >= 1 || rng_chance(rng, part)) compare_row(&at, args);
      }
    }
  }
  tensor_check_unmarked(&args->output, output_marks, "output");
  tensor_check_unmarked(&args->lse, lse_marks, "lse");
  return at.worst;
}
