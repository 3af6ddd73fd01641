/* FP8 on a GPU against the CPU engine, which computes exactly from the same codes and scales.
 *
 * The bound of an output: each probability is rounded to 4 bits (an error of at most 2^-4 of it, or
 * of 2^-17 of the row's greatest; where keys and values have a scale a head, whose kernel leaves
 * less room below that, of 2^-13), and sums of scores and outputs are cut to about 13 bits (here as
 * much as 2^-6 of what is summed, with the rounding of the output itself): so 2^-4 + 2^-6 of the
 * sum of p |v|, which the CPU computes too, and that share of the greatest |v| for each key. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "float8.h"
#include "gpu.h"
#include "reference.h"
#include "rng.h"
#include "test.h"

enum {
  MOST_SCALES = 1 << 17,
  LARGEST_V = 8,
  MOST_BATCH = 300,
  MOST_PAGES = 1000,
  MANY = 32,
  SHORT = 100
};

/* What is out of the ordinary: nothing; a key in the first third of a sequence with scores hundreds
 * of standard deviations from the others'; scores that are all alike; the same beyond 2^22. */
enum scores { ORDINARY, ONE_FAR, ALIKE, ALIKE_AND_LARGE };

struct shape {
  int head_dim, value_head_dim, batch, rows_q, rows_k, heads_q, heads_k;
  bool causal, packed, padded, capped;
  bool may_split; /* keys, by the kernels for caches */
  bool mixed;     /* queries alone are packed: many of a sequence, one of the next, and so on */
  enum scores scores;
  int rows_per_scale[3]; /* of query, key, value; -1: none */
  int page_size;         /* of the GPU's key and value, a divisor of rows_k; 0: they are dense */
  fa3_dtype output;
  int nan_in; /* -1: none; a NaN in query, key or value, in the first head of this row */
  int nan_row;
  bool nan_scale; /* of the row's block, not in a code */
};

static struct gpu_arena arena;
static float scales[3][MOST_SCALES];
static float sinks[64];

static void *to_gpu(const void *data, size_t size) {
  const gpu_pointer to = gpu_arena_take(&arena, size);
  GPU(cuMemcpyHtoDAsync, to, data, size, NULL);
  return (void *)to;
}

static void *take_poisoned(size_t size) {
  const gpu_pointer to = gpu_arena_take(&arena, size);
  GPU(cuMemsetD8Async, to, 0xff, size, NULL);
  return (void *)to;
}

static uint8_t *make_codes(struct rng *rng, int64_t count) {
  uint8_t *codes = malloc((size_t)count);
  assert_non_null(codes);
  for (int64_t i = 0; i < count; i++)
    codes[i] = e4m3_from_float((float)fmin(fmax(rng_normal(rng), -LARGEST_V), LARGEST_V));
  return codes;
}

static fa3_tensor make_scale(int which, const struct shape *shape, int64_t rows) {
  fa3_tensor scale = {.data = scales[which], .dtype = FA3_FLOAT32};
  const int64_t per = shape->rows_per_scale[which];
  const int64_t heads = which ? shape->heads_k : shape->heads_q;
  const int64_t blocks =
      shape->packed ? rows / (per ? per : 1) + shape->batch : (rows + per - 1) / (per ? per : 1);
  const int64_t full[] = {shape->batch, heads, blocks};
  const int first = shape->packed && per ? 1 : 0, last = per ? 3 : 2;
  scale.rank = last - first;
  int64_t stride = 1;
  for (int d = scale.rank - 1; d >= 0; d--) {
    scale.shape[d] = full[first + d];
    scale.strides[d] = stride;
    stride *= scale.shape[d];
  }
  assert_in_range(stride, 1, MOST_SCALES);
  if (shape->page_size && which) scale.strides[0] = 0; /* all pages have the same */
  return scale;
}

static void shuffle(struct rng *rng, int32_t *numbers, int count) {
  for (int i = 0; i < count; i++) {
    const int64_t j = rng_between(rng, 0, i);
    numbers[i] = numbers[j];
    numbers[j] = i;
  }
}

/* Keys or values of dense sequences as pages on the GPU, the i-th at place table[i]. Rows that are
 * not used are NaN. */
static fa3_tensor to_pages(const struct shape *shape, const uint8_t *codes, int dim,
                           const int32_t *table, const int32_t *used) {
  const int each = shape->rows_k / shape->page_size;
  const size_t row = (size_t)shape->heads_k * (size_t)dim, page = row * (size_t)shape->page_size;
  const size_t size = page * (size_t)(shape->batch * each);
  uint8_t *pages = malloc(size);
  assert_non_null(pages);
  for (int b = 0; b < shape->batch; b++)
    for (int r = 0; r < shape->rows_k; r++) {
      uint8_t *to = pages + page * (size_t)table[b * each + r / shape->page_size] +
                    row * (size_t)(r % shape->page_size);
      if (!shape->padded || r < used[b])
        memcpy(to, codes + row * (size_t)(b * shape->rows_k + r), row);
      else
        memset(to, 0x7f, row);
    }
  void *there = to_gpu(pages, size);
  GPU(cuCtxSynchronize, );
  free(pages);
  return fa3_dense(there, FA3_FLOAT8_E4M3, (int64_t)shape->batch * each, shape->page_size,
                   shape->heads_k, dim);
}

static void run(fa3_forward_args *args) {
  if (fa3_forward_workspace(args, &args->workspace_size)) fail_msg("%s", fa3_last_error());
  const bool cpu = args->device.type == FA3_CPU;
  args->workspace =
      cpu ? malloc(args->workspace_size + 1) : take_poisoned(args->workspace_size + 1);
  if (fa3_forward(args)) fail_msg("%s", fa3_last_error());
  if (cpu) free(args->workspace);
}

/* A NaN and what it may reach: of the rows of its sequence all heads that read its head. */
struct nan_place {
  int64_t first_row, last_row; /* and one; of the queries */
  int64_t heads;
  int64_t first_key, last_key; /* the first with it, the sequence's last and one; of its keys */
};

/* As a code, 0x7f or 0xff, or in the scale of the row's block. `used`: the keys of a sequence whose
 * rows are not all used. */
static struct nan_place put_nan(const struct shape *shape, uint8_t *const *codes,
                                const int32_t *starts_q, const int32_t *starts_k,
                                const int32_t *used) {
  const int which = shape->nan_in;
  const int32_t *starts = which ? starts_k : starts_q;
  const int rows = shape->packed ? starts[shape->batch] : which ? shape->rows_k : shape->rows_q;
  const int64_t row = shape->nan_row % rows;
  const int64_t per = shape->rows_per_scale[which];
  const int64_t heads = which ? shape->heads_k : shape->heads_q;
  const int64_t dim = which == 2 ? shape->value_head_dim : shape->head_dim;
  const int batch = shape->packed && row >= starts[1];
  if (!shape->nan_scale)
    codes[which][row * heads * dim + row % dim] = (uint8_t)(row % 2 ? 0x7f : 0xff);
  else if (!per)
    scales[which][batch * heads] = NAN;
  else
    scales[which][starts[batch] / per + batch + (row - starts[batch]) / per] = NAN;
  const int64_t key = shape->packed ? row - starts[batch] : row;
  return (struct nan_place){.first_row = shape->packed ? starts_q[batch] : 0,
                            .last_row = shape->packed ? starts_q[batch + 1] : shape->rows_q,
                            .heads = shape->heads_q / heads,
                            .first_key = !shape->nan_scale ? key
                                         : per             ? key / per * per
                                                           : 0,
                            .last_key = shape->packed   ? starts_k[batch + 1] - starts_k[batch]
                                        : shape->padded ? used[0]
                                                        : shape->rows_k};
}

/* Whether a row of output may be NaN though the CPU's is not: in the sequence of a NaN that some of
 * its rows see, as a key that is masked for others may reach them (fa3.h); and a row that sees no
 * key where its own scale is NaN. */
static bool may_be_nan(const struct shape *shape, const struct nan_place *place, int64_t row,
                       int64_t head, float expected) {
  if (row < place->first_row || row >= place->last_row || head >= place->heads) return false;
  return shape->nan_in > 0 || (shape->nan_scale && expected == 0);
}

/* Whether a mask keeps a row from each key of a NaN. If such a row is NaN all the same, it is
 * because its tile has one of them, and tiles are not the same on both engines. */
static bool is_masked(const struct shape *shape, const struct nan_place *place, int64_t row) {
  const int64_t query = row - place->last_row;
  return shape->nan_in > 0 && shape->causal && query + place->last_key < place->first_key;
}

static void set_scores(const struct shape *shape, uint8_t *const *codes, const int32_t *starts_k,
                       int64_t rows_k, const int64_t *counts, struct rng *rng) {
  const int64_t row = (int64_t)shape->heads_k * shape->head_dim; /* codes of one */
  if (shape->scores == ONE_FAR)
    for (int b = 0; b < shape->batch; b++) {
      const int64_t first = shape->packed ? starts_k[b] : b * rows_k;
      const int64_t length = shape->packed ? starts_k[b + 1] - first : rows_k;
      memset(codes[1] + (first + rng_between(rng, 0, length / 3)) * row, 0x7e, (size_t)row);
    }
  if (shape->scores == ALIKE) memset(codes[0], 0, (size_t)counts[0]);
  if (shape->scores == ALIKE_AND_LARGE) memset(codes[1], 0x7e, (size_t)counts[1]);
}

static void compare(const struct shape *shape, uint64_t number) {
  struct rng rng = rng_for(number);
  int32_t starts_q[MOST_BATCH + 1] = {0}, starts_k[MOST_BATCH + 1] = {0};
  int32_t padding[MOST_BATCH], used[MOST_BATCH];
  for (int b = 0; b < shape->batch; b++) {
    const bool short_one = shape->batch > MANY && b != shape->batch / 2; /* of many all but one */
    const int most_queries = short_one ? SHORT : shape->rows_q;
    const int least_queries = shape->mixed ? most_queries * 3 / 4 : 1;
    const bool one_query = shape->mixed && b % 2;
    starts_q[b + 1] =
        starts_q[b] + (one_query ? 1 : (int32_t)rng_between(&rng, least_queries, most_queries));
    starts_k[b + 1] =
        starts_k[b] + (int32_t)rng_between(&rng, 1, short_one ? SHORT : shape->rows_k);
    padding[b] = (int32_t)rng_between(&rng, 0, 9);
    used[b] = (int32_t)rng_between(&rng, 10, shape->rows_k);
  }
  const int batch = shape->batch;
  const bool packs_queries = shape->packed || shape->mixed;
  const int64_t rows_q = packs_queries ? starts_q[batch] : shape->rows_q;
  const int64_t rows_k = shape->packed ? starts_k[batch] : shape->rows_k;
  const int64_t all_q = packs_queries ? rows_q : batch * rows_q;
  const int64_t all_k = shape->packed ? rows_k : batch * rows_k;
  const int64_t counts[] = {all_q * shape->heads_q * shape->head_dim,
                            all_k * shape->heads_k * shape->head_dim,
                            all_k * shape->heads_k * shape->value_head_dim,
                            all_q * shape->heads_q * shape->value_head_dim, all_q * shape->heads_q};
  uint8_t *codes[3];
  for (int i = 0; i < 3; i++) codes[i] = make_codes(&rng, counts[i]);
  set_scores(shape, codes, starts_k, rows_k, counts, &rng);
  struct nan_place place = {0};
  if (shape->nan_in >= 0) place = put_nan(shape, codes, starts_q, starts_k, used);
  float *outputs[2], *lse = calloc((size_t)counts[4], sizeof *lse);
  for (int i = 0; i < 2; i++) outputs[i] = calloc((size_t)counts[3], sizeof **outputs);

  fa3_forward_args args = {.struct_size = sizeof args, .flags = shape->causal ? FA3_CAUSAL : 0};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++) {
    const int64_t rows = i == 1 || i == 2 ? rows_k : rows_q;
    const int64_t heads = i == 1 || i == 2 ? shape->heads_k : shape->heads_q;
    const int64_t dim = i < 2 ? shape->head_dim : shape->value_head_dim;
    const fa3_dtype dtype = i < 3 ? FA3_FLOAT8_E4M3 : FA3_FLOAT32;
    void *data = i < 3 ? (void *)codes[i] : outputs[0];
    const bool packs = i == 1 || i == 2 ? shape->packed : packs_queries;
    *tensors[i] = packs ? fa3_packed(data, dtype, rows, heads, dim)
                        : fa3_dense(data, dtype, batch, rows, heads, dim);
  }
  args.lse = packs_queries ? fa3_packed_lse(lse, shape->heads_q, rows_q)
                           : fa3_lse(lse, batch, shape->heads_q, rows_q);
  args.sink = fa3_vector(sinks, FA3_FLOAT32, shape->heads_q);
  args.softcap = shape->capped ? 3 : 0;
  /* Else calls with few tiles are those of the kernels for caches. */
  if (!shape->page_size && !shape->may_split) args.num_splits = 1;
  if (packs_queries) {
    args.cu_seqlens_q = fa3_vector(starts_q, FA3_INT32, batch + 1);
    args.max_seqlen_q = shape->rows_q;
  }
  if (shape->packed) {
    args.cu_seqlens_k = fa3_vector(starts_k, FA3_INT32, batch + 1);
    args.max_seqlen_k = shape->rows_k;
  } else if (shape->padded && shape->page_size) {
    args.seqused_k = fa3_vector(used, FA3_INT32, batch);
  } else if (shape->padded) {
    args.leftpad_k = fa3_vector(padding, FA3_INT32, batch);
    args.seqused_k = fa3_vector(used, FA3_INT32, batch);
  }
  if (shape->scores == ALIKE_AND_LARGE) {
    args.flags |= FA3_SCALE;
    args.softmax_scale = 1e5f;
    args.sink = (fa3_tensor){0}; /* beside it, what a score lacks would count */
  }
  fa3_tensor *its_scales[] = {&args.query_scale, &args.key_scale, &args.value_scale};
  int64_t *its_rows[] = {&args.query_scale_rows, &args.key_scale_rows, &args.value_scale_rows};
  for (int i = 0; i < 3; i++) {
    if (shape->rows_per_scale[i] < 0) continue;
    *its_scales[i] = make_scale(i, shape, i ? rows_k : rows_q);
    *its_rows[i] = shape->rows_per_scale[i];
  }

  fa3_forward_args there = args;
  there.device.type = FA3_CUDA;
  for (int i = 0; i < 3; i++) {
    tensors[i] = (fa3_tensor *[]){&there.query, &there.key, &there.value}[i];
    tensors[i]->data = to_gpu(codes[i], (size_t)counts[i]);
    fa3_tensor *scale =
        (fa3_tensor *[]){&there.query_scale, &there.key_scale, &there.value_scale}[i];
    if (scale->data) scale->data = to_gpu(scale->data, sizeof scales[i]);
  }
  if (shape->page_size) {
    const int each = shape->rows_k / shape->page_size;
    int32_t table[MOST_PAGES];
    assert_in_range(batch * each, 1, MOST_PAGES);
    shuffle(&rng, table, batch * each);
    there.key = to_pages(shape, codes[1], shape->head_dim, table, used);
    there.value = to_pages(shape, codes[2], shape->value_head_dim, table, used);
    there.page_table = (fa3_tensor){.data = to_gpu(table, sizeof table),
                                    .dtype = FA3_INT32,
                                    .rank = 2,
                                    .shape = {batch, each},
                                    .strides = {each, 1}};
    GPU(cuCtxSynchronize, );
    for (int i = 1; i < 3; i++) {
      fa3_tensor *scale = i == 1 ? &there.key_scale : &there.value_scale;
      if (scale->data) scale->shape[0] = (int64_t)batch * each;
    }
  }
  const size_t output_size = (size_t)counts[3] * fa3_dtype_size(shape->output);
  there.output.dtype = shape->output;
  there.output.data = take_poisoned(output_size);
  there.lse.data = take_poisoned((size_t)counts[4] * sizeof *lse);
  if (there.sink.data) there.sink.data = to_gpu(sinks, sizeof sinks);
  fa3_tensor *lengths[] = {&there.cu_seqlens_q, &there.cu_seqlens_k, &there.leftpad_k,
                           &there.seqused_k};
  for (int i = 0; i < 4; i++)
    if (lengths[i]->data)
      lengths[i]->data = to_gpu(lengths[i]->data, (size_t)lengths[i]->shape[0] * sizeof(int32_t));
  run(&there);
  if (shape->batch > MANY) run(&there); /* twice in a row on one stream */

  run(&args);
  for (int64_t i = 0; i < counts[2]; i++) codes[2][i] &= 0x7f;
  args.output.data = outputs[1];
  run(&args);
  fa3_tensor got = there.output;
  got.data = malloc(output_size);
  float *got_lse = malloc((size_t)counts[4] * sizeof *lse);
  assert_non_null(got.data);
  assert_non_null(got_lse);
  GPU(cuMemcpyDtoHAsync, got.data, (gpu_pointer)there.output.data, output_size, NULL);
  GPU(cuMemcpyDtoHAsync, got_lse, (gpu_pointer)there.lse.data, (size_t)counts[4] * sizeof *lse,
      NULL);
  GPU(cuCtxSynchronize, );
  bool seen = shape->nan_in == 0; /* or no row sees it */
  for (int64_t i = 0; i < counts[3]; i++) seen = seen || isnan(outputs[0][i]);
  for (int64_t i = 0; i < counts[3]; i++) {
    const int64_t row = i / shape->value_head_dim / shape->heads_q;
    const int64_t head = i / shape->value_head_dim % shape->heads_q;
    const double value = reference_load(&got, i);
    if (seen && isnan(value) &&
        (isnan(outputs[0][i]) || may_be_nan(shape, &place, row, head, outputs[0][i])))
      continue;
    if (isnan(outputs[0][i]) && is_masked(shape, &place, row) && fabs(value) <= 2 * LARGEST_V)
      continue;
    const double error = fabs(value - (double)outputs[0][i]);
    const double lost =
        shape->rows_per_scale[1] <= 0 && shape->rows_per_scale[2] <= 0 ? 0x1p-13 : 0x1p-17;
    const double bound =
        (0x1p-4 + 0x1p-6) * (double)outputs[1][i] + lost * LARGEST_V * shape->rows_k;
    if (!(error <= bound))
      fail_msg("trial %d, head dims %d and %d: output %lld is %g, expected %g, off by %g > %g",
               (int)number, shape->head_dim, shape->value_head_dim, (long long)i, value,
               (double)outputs[0][i], error, bound);
  }
  for (int64_t i = 0; i < counts[4]; i++) {
    const int64_t row =
        packs_queries ? i % rows_q : i / rows_q / shape->heads_q * rows_q + i % rows_q;
    const int64_t head = i / rows_q % shape->heads_q;
    /* Values have no part in it, but their scales go with the probabilities. */
    const bool of_values = shape->nan_in == 2 && !shape->nan_scale;
    const float output = outputs[0][(row * shape->heads_q + head) * shape->value_head_dim];
    if (seen && isnan(got_lse[i]) && !of_values &&
        (isnan(lse[i]) || may_be_nan(shape, &place, row, head, output)))
      continue;
    if (isnan(lse[i]) && is_masked(shape, &place, row)) continue;
    if (shape->scores == ALIKE_AND_LARGE) continue; /* it is off by what a score lacks */
    /* What a score of 448s loses grows as the root of its terms: docs/notes/hopper-fp8.md. */
    const float lse_bound =
        shape->scores == ONE_FAR ? 0.5f * sqrtf((float)shape->head_dim / 64) : 0x1p-6f;
    if (!(fabsf(got_lse[i] - lse[i]) <= lse_bound || got_lse[i] == lse[i]))
      fail_msg("trial %d: lse %lld is %g, expected %g", (int)number, (long long)i,
               (double)got_lse[i], (double)lse[i]);
  }
  for (int i = 0; i < 3; i++) free(codes[i]);
  for (int i = 0; i < 2; i++) free(outputs[i]);
  free(lse);
  free(got.data);
  free(got_lse);
  arena.used = 0;
}

static int compared; /* calls */

static void set_scales(struct rng *rng) {
  for (int i = 0; i < 3; i++)
    for (int j = 0; j < MOST_SCALES; j++) scales[i][j] = (float)(0.2 + 0.8 * rng_uniform(rng));
}

static void test_against_the_cpu(void **state) {
  (void)state;
  struct rng rng = rng_for(0);
  arena = gpu_arena_new((size_t)256 << 20);
  set_scales(&rng);
  for (int i = 0; i < 64; i++) sinks[i] = (float)rng_normal(&rng);
  static const int dims[] = {64, 128, 256, 16, 96, 192};
  static const int rows_per_scale[][3] = {
      {-1, -1, -1}, {0, 0, 0}, {64, 128, 256}, {1, 48, 1}, {128, 0, 128}};
  uint64_t number = 0;
  const uint64_t most = (uint64_t)gpu_trials(6 * 5 * 2);
  for (int s = 0; s < 5; s++)
    for (int d = 0; d < 6; d++)
      for (int packed = 0; packed < 2 && number < most; packed++) {
        const int heads_k = (int)rng_between(&rng, 1, 3), group = (int)rng_between(&rng, 1, 4);
        struct shape shape = {
            .head_dim = dims[d],
            .value_head_dim = dims[d] == 96 ? 64 : dims[d],
            .batch = dims[d] == 128 && !packed ? 30 : 3, /* many tiles have three warpgroups */
            .rows_q = (int)rng_between(&rng, 1, 300),
            .rows_k = (int)rng_between(&rng, 10, 600),
            .heads_q = heads_k * group,
            .heads_k = heads_k,
            .causal = rng_chance(&rng, 0.5),
            .packed = packed,
            .padded = rng_chance(&rng, 0.5),
            .capped = rng_chance(&rng, 0.3),
            .may_split = rng_chance(&rng, 0.3),
            .output = (fa3_dtype)RNG_PICK(&rng, FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16),
            .nan_in = -1};
        memcpy(shape.rows_per_scale, rows_per_scale[s], sizeof shape.rows_per_scale);
        compare(&shape, ++number);
      }
  /* Sums are put away on the way, in shared memory or in the workspace. */
  for (int d = 0; d < 6; d++)
    compare(&(struct shape){.head_dim = dims[d % 3],
                            .value_head_dim = dims[d % 3],
                            .batch = 1,
                            .rows_q = 40,
                            .rows_k = 9000,
                            .heads_q = 2,
                            .heads_k = 1,
                            .causal = true,
                            .rows_per_scale = {0, d < 3 ? 128 : 0, d < 3 ? 128 : 0},
                            .output = FA3_FLOAT32,
                            .nan_in = -1},
            ++number);
  /* Few tiles of many keys, which are split. */
  for (int i = 0; i < (most < 60 ? 3 : 9); i++)
    compare(&(struct shape){.head_dim = i == 4 ? 96 : dims[i % 3],
                            .value_head_dim = i == 4 ? 64 : dims[i % 3],
                            .batch = 1 + i % 2,
                            .rows_q = (int)rng_between(&rng, 17, 200),
                            .rows_k = (int)rng_between(&rng, 3000, 9000),
                            .heads_q = 3,
                            .heads_k = 1 + 2 * (i % 4 / 2),
                            .causal = i % 5 < 2,
                            .capped = i % 4 == 3,
                            .padded = i % 7 == 3,
                            .scores = i == 5 ? ONE_FAR : ORDINARY,
                            .rows_per_scale = {0, i % 3 == 1 ? 128 : 0, i % 3 == 2 ? 1 : 0},
                            .may_split = true,
                            .output = i % 2 ? FA3_FLOAT32 : FA3_BFLOAT16,
                            .nan_in = -1},
            ++number);
  /* Up to 32 rows of very many keys: speculative_fp8, but at head dim 256. */
  for (int i = 0; i < (most < 60 ? 0 : 5); i++)
    compare(&(struct shape){.head_dim = dims[i % 3],
                            .value_head_dim = dims[i % 3],
                            .batch = 4,
                            .rows_q = i < 3 ? 31 : 8,
                            .rows_k = 8500,
                            .heads_q = i < 3 ? 8 : 32,
                            .heads_k = 8,
                            .causal = i % 2,
                            .capped = i > 2,
                            .padded = i == 1,
                            .rows_per_scale = {0, i % 3 == 1 ? 128 : 0, i == 4 ? 128 : 0},
                            .may_split = true,
                            .output = i % 2 ? FA3_FLOAT32 : FA3_BFLOAT16,
                            .nan_in = -1},
            ++number);
  /* The same with lengths that the device alone knows, so that keys are dealt out: few tiles to
   * many blocks each, as many teams as leave blocks over, more sequences than a block has threads,
   * the last time of one row each. */
  static const struct {
    int batch, rows_q, rows_k, heads_q, heads_k, page_size;
  } dealt[] = {{4, 8, 33024, 8, 2, 256},
               {4, 8, 13312, 15, 5, 256},
               {300, 7, 1024, 4, 1, 512},
               {300, 1, 1024, 4, 1, 512}};
  for (int i = 0; i < (most < 60 ? 0 : 8); i++)
    compare(&(struct shape){.head_dim = dims[i % 2],
                            .value_head_dim = dims[i % 2],
                            .batch = dealt[i / 2].batch,
                            .rows_q = dealt[i / 2].rows_q,
                            .rows_k = dealt[i / 2].rows_k,
                            .heads_q = dealt[i / 2].heads_q,
                            .heads_k = dealt[i / 2].heads_k,
                            .causal = i % 2,
                            .capped = i % 2,
                            .padded = true,
                            .page_size = dealt[i / 2].page_size,
                            .may_split = true,
                            .output = FA3_BFLOAT16,
                            .nan_in = -1},
            ++number);
  /* Values that many queries see, which head dim 256 has transposed ahead. */
  for (int i = 0; i < (most < 60 ? 2 : 8); i++)
    compare(&(struct shape){.head_dim = i == 6 ? 192 : 256,
                            .value_head_dim = i == 6 ? 192 : 256,
                            .batch = i % 2 ? 8 : 6,
                            .rows_q = (int)rng_between(&rng, 700, 900),
                            .rows_k = (int)rng_between(&rng, 1000, 1300),
                            .heads_q = 24,
                            .heads_k = i < 4 ? 1 : 2,
                            .causal = i < 4,
                            .packed = i % 2,
                            .padded = i == 2 || i == 4,
                            .capped = i == 5,
                            .scores = i == 7 ? ONE_FAR : ORDINARY,
                            .rows_per_scale = {i < 2 ? 128 : 0},
                            .output = i == 3 ? FA3_FLOAT32 : FA3_BFLOAT16,
                            .nan_in = i < 3 ? i : -1,
                            .nan_row = (int)rng_between(&rng, 0, 5000)},
            ++number);
  if (most >= 60)
    compare(&(struct shape){.head_dim = 256,
                            .value_head_dim = 256,
                            .batch = 1,
                            .rows_q = 300,
                            .rows_k = 9000,
                            .heads_q = 16,
                            .heads_k = 1,
                            .output = FA3_FLOAT32,
                            .nan_in = -1},
            ++number);
  /* Pages, of calls with queries enough for the forward kernel; and more keys than its codes have
   * room for where a head has one scale. */
  static const int page_sizes[] = {16, 48, 64, 256, 128};
  for (int i = 0; i < (most < 60 ? 6 : 30); i++) {
    const bool many_keys = i / 6 == 4, mixed = i / 3 % 2;
    const int page_size = page_sizes[i / 6], heads_k = many_keys ? 2 : 3 + i % 2;
    compare(&(struct shape){.head_dim = i == 1 ? 96 : dims[i % 3],
                            .value_head_dim = i == 1 ? 64 : dims[i % 3],
                            .batch = many_keys ? 1 + mixed : 2 + 2 * mixed,
                            .rows_q = (int)rng_between(&rng, 280, 400) + 100 * mixed,
                            .rows_k = page_size *
                                      (many_keys ? 260
                                       : mixed   ? (int)rng_between(&rng, 2, 9) + 1300 / page_size
                                                 : (int)rng_between(&rng, 2, 9) + 600 / page_size),
                            .heads_q = heads_k * (many_keys ? 16 : (int)rng_between(&rng, 6, 8)),
                            .heads_k = heads_k,
                            .causal = rng_chance(&rng, 0.5),
                            .padded = rng_chance(&rng, 0.7),
                            .mixed = mixed,
                            .capped = rng_chance(&rng, 0.2),
                            .page_size = page_size,
                            .rows_per_scale = {0, i % 4 ? 0 : -1, i % 5 ? 0 : -1},
                            .output = i % 2 ? FA3_FLOAT32 : FA3_BFLOAT16,
                            .nan_in = -1},
            ++number);
  }
  /* As many keys as one step of a kernel of its own has, in tiles enough for several of a block. */
  for (int i = 0; i < (most < 60 ? 4 : 12); i++) {
    const int keys = (int)(i % 2 ? rng_between(&rng, 193, 224) : rng_between(&rng, 129, 160));
    compare(&(struct shape){.head_dim = dims[i % 2],
                            .value_head_dim = dims[i % 2],
                            .batch = i % 4 == 3 ? 4 : 30,
                            .rows_q = i % 3 ? keys : (int)rng_between(&rng, 65, 300),
                            .rows_k = keys,
                            .heads_q = 12,
                            .heads_k = i % 5 ? 12 : 4,
                            .causal = i / 2 % 2,
                            .padded = rng_chance(&rng, 0.5),
                            .output = i % 3 == 1 ? FA3_FLOAT32 : FA3_BFLOAT16,
                            .nan_in = -1},
            ++number);
  }
  /* More sequences than a warp looks at together, short but for one. */
  for (int d = 0; d < 3; d++)
    for (int causal = 0; causal < 2; causal++)
      for (int many = 0; many < 2; many++)
        compare(&(struct shape){.head_dim = dims[d],
                                .value_head_dim = dims[d],
                                .batch = many ? MOST_BATCH : 41,
                                .rows_q = many ? SHORT : 1500,
                                .rows_k = many ? SHORT : 1500,
                                .heads_q = 2,
                                .heads_k = 1,
                                .causal = causal,
                                .packed = true,
                                .rows_per_scale = {0, causal ? 0 : 128, causal ? 0 : 128},
                                .output = FA3_BFLOAT16,
                                .nan_in = -1},
                ++number);
  gpu_arena_free(&arena);
  compared += (int)number;
}

static void test_far_and_alike(void **state) {
  (void)state;
  struct rng rng = rng_for(2);
  arena = gpu_arena_new((size_t)256 << 20);
  set_scales(&rng);
  for (int i = 0; i < 64; i++) sinks[i] = (float)rng_normal(&rng);
  static const int dims[] = {64, 128, 256}, rows_per_scale[][3] = {{0, 0, 0}, {1, 128, 128}};
  uint64_t number = 2000;
  const uint64_t most = number + (uint64_t)gpu_trials(3 * 6 * 2);
  for (int d = 0; d < 3; d++)
    for (int s = 0; s < 2; s++)
      for (int scores = ONE_FAR; scores <= ALIKE_AND_LARGE; scores++)
        for (int packed = 0; packed < 2 && number < most; packed++) {
          struct shape shape = {.head_dim = dims[d],
                                .value_head_dim = dims[d],
                                .batch = 2,
                                .rows_q = (int)rng_between(&rng, 100, 400),
                                .rows_k = (int)rng_between(&rng, 400, 2000),
                                .heads_q = 4,
                                .heads_k = 2,
                                .causal = rng_chance(&rng, 0.5),
                                .packed = packed,
                                .scores = (enum scores)scores,
                                .output = FA3_FLOAT32,
                                .nan_in = -1};
          memcpy(shape.rows_per_scale, rows_per_scale[s], sizeof shape.rows_per_scale);
          /* With scales of their own blocks of large scores are not alike. */
          for (int j = 0; j < MOST_SCALES; j++)
            scales[1][j] =
                scores == ALIKE_AND_LARGE ? 0.7f : (float)(0.2 + 0.8 * rng_uniform(&rng));
          compare(&shape, ++number);
        }
  gpu_arena_free(&arena);
  compared += (int)(number - 2000);
}

static void test_nan(void **state) {
  (void)state;
  struct rng rng = rng_for(1);
  arena = gpu_arena_new((size_t)64 << 20);
  static const int dims[] = {64, 128, 256};
  static const int rows_per_scale[][3] = {{0, 0, 0}, {64, 128, 128}, {1, 48, 48}, {128, 1, 1}};
  uint64_t number = 1000;
  const uint64_t most = number + (uint64_t)gpu_trials(3 * 4 * 6 * 3);
  for (int d = 0; d < 3; d++)
    for (int s = 0; s < 4; s++)
      for (int what = 0; what < 6; what++)
        for (int layout = 0; layout < 3 && number < most; layout++) {
          const int heads_k = (int)rng_between(&rng, 1, 2), group = (int)rng_between(&rng, 1, 3);
          struct shape shape = {.head_dim = dims[d],
                                .value_head_dim = dims[d],
                                .batch = 2,
                                .rows_q = (int)rng_between(&rng, 100, 300),
                                .rows_k = (int)rng_between(&rng, 100, 600),
                                .heads_q = heads_k * group,
                                .heads_k = heads_k,
                                .causal = rng_chance(&rng, 0.7),
                                .packed = layout == 1,
                                .padded = layout == 2,
                                .output = FA3_FLOAT32,
                                .nan_in = what % 3,
                                .nan_scale = what >= 3};
          memcpy(shape.rows_per_scale, rows_per_scale[s], sizeof shape.rows_per_scale);
          shape.nan_row = (int)rng_between(&rng, 0, 599);
          set_scales(&rng);
          compare(&shape, ++number);
        }
  set_scales(&rng);
  gpu_arena_free(&arena);
  compared += (int)(number - 1000);
}

int main(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_the_cpu),
                                     cmocka_unit_test(test_far_and_alike),
                                     cmocka_unit_test(test_nan)};
  const int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %d calls\n", compared);
  return result;
}
