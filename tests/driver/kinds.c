/* Each function of each kernel is launched by some call: one that no call launches fails here. And
 * what FP8 attention, unpacked codes, fa3_append and fa3_combine tell their kernels; watched.c has
 * the others. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "fake.h"
#include "kernels/append_params.h"
#include "kernels/combine_params.h"
#include "kernels/decode_params.h"
#include "kernels/forward_fp8_params.h"
#include "kernels/unpack_params.h"
#include "test.h"

enum { BATCH = 2, HEADS_Q = 8, HEADS_K = 2, MOST_LAUNCHES = 256 };

static const fa3_device gpu = {FA3_CUDA, 0};

/* All launches of this process; those of the last call begin at `first`. */
static struct fake_launch launches[MOST_LAUNCHES];
static int count, first;
static fa3_append_params append_params;
static fa3_combine_params combine_params;
static fa3_decode_fp8_params decode_params;
static fa3_decode_append_params joined_params;
static fa3_forward_fp8_params fp8_params;
static fa3_transpose_values_params transpose_params;
static fa3_forward_params forward_params;
static fa3_unpack_params unpack_params;

static void watch(const struct fake_launch *launch) {
  assert_true(count < MOST_LAUNCHES);
  fake_keep(launch, "append", &append_params, sizeof append_params);
  fake_keep(launch, "combine", &combine_params, sizeof combine_params);
  fake_keep(launch, "combine_rows", &combine_params, sizeof combine_params);
  fake_keep(launch, "combine_tiles", &combine_params, sizeof combine_params);
  fake_keep(launch, "decode", &decode_params, sizeof decode_params);
  fake_keep(launch, "decode_append", &joined_params, sizeof joined_params);
  fake_keep(launch, "forward", &forward_params, sizeof forward_params);
  fake_keep(launch, "forward_fp8", &fp8_params, sizeof fp8_params);
  fake_keep(launch, "speculative_fp8_dealt", &decode_params, sizeof decode_params);
  fake_keep(launch, "transpose_values", &transpose_params, sizeof transpose_params);
  fake_keep(launch, "unpack", &unpack_params, sizeof unpack_params);
  launches[count++] = *launch;
}

/* The last call's only launch. */
static const struct fake_launch *launch_of(const char *function) {
  assert_int_equal(count, first + 1);
  assert_string_equal(launches[first].function, function);
  return &launches[first];
}

static void assert_grid(const struct fake_launch *launch, unsigned x, unsigned y, unsigned z,
                        unsigned threads) {
  const unsigned grid[] = {x, y, z};
  assert_memory_equal(launch->grid, grid, sizeof grid);
  assert_int_equal(launch->block[0], threads);
  assert_int_equal(launch->dependent, 1);
}

static fa3_tensor tensor(int n, fa3_dtype dtype, int64_t rows, int64_t heads, int64_t head_dim) {
  return fa3_dense(place(n), dtype, BATCH, rows, heads, head_dim);
}

static fa3_tensor matrix(int n, fa3_dtype dtype, int64_t rows, int64_t columns) {
  return make_matrix(place(n), dtype, rows, columns);
}

static void good(fa3_status status) {
  if (status) fail_msg("%s", fa3_last_error());
}

static fa3_forward_args make_forward(fa3_dtype dtype, int64_t queries, int64_t keys,
                                     int64_t head_dim) {
  const fa3_dtype output = dtype == FA3_FLOAT8_E4M3 ? FA3_BFLOAT16 : dtype;
  return (fa3_forward_args){.struct_size = sizeof(fa3_forward_args),
                            .device = gpu,
                            .query = tensor(1, dtype, queries, HEADS_Q, head_dim),
                            .key = tensor(2, dtype, keys, HEADS_K, head_dim),
                            .value = tensor(3, dtype, keys, HEADS_K, head_dim),
                            .output = tensor(4, output, queries, HEADS_Q, head_dim)};
}

static void run_forward(fa3_forward_args *args) {
  args->workspace = place(20);
  good(fa3_forward_workspace(args, &args->workspace_size));
  first = count;
  good(fa3_forward(args));
}

static void run_backward(const fa3_forward_args *forward) {
  const int64_t queries = forward->query.shape[1], keys = forward->key.shape[1];
  const int64_t head_dim = forward->query.shape[3];
  fa3_backward_args args = {.struct_size = sizeof args};
  good(fa3_backward_init(forward, &args));
  args.lse = fa3_lse(place(5), BATCH, HEADS_Q, queries);
  args.grad_output = tensor(6, FA3_BFLOAT16, queries, HEADS_Q, head_dim);
  args.grad_query = tensor(7, FA3_BFLOAT16, queries, HEADS_Q, head_dim);
  args.grad_key = tensor(8, FA3_BFLOAT16, keys, HEADS_K, head_dim);
  args.grad_value = tensor(9, FA3_BFLOAT16, keys, HEADS_K, head_dim);
  args.grad_sink = forward->sink;
  args.workspace = place(20);
  good(fa3_backward_workspace(&args, &args.workspace_size));
  first = count;
  good(fa3_backward(&args));
}

/* A scale for each head that keys have, of queries too; or for each row. */
static void test_fp8_forward(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(FA3_FLOAT8_E4M3, 5000, 5000, 128);
  args.query_scale = matrix(5, FA3_FLOAT32, BATCH, HEADS_K);
  args.key_scale = (fa3_tensor){.data = place(6),
                                .dtype = FA3_FLOAT32,
                                .rank = 3,
                                .shape = {BATCH, HEADS_K, 40},
                                .strides = {(int64_t)HEADS_K * 40, 40, 1}};
  args.key_scale_rows = 128;
  run_forward(&args);
  const struct fake_launch *launch = launch_of("forward_fp8");
  assert_grid(launch, 132, 1, 1, FA3_FORWARD_THREADS(192));
  assert_int_equal(launch->shared_bytes, launch->shared_limit);
  assert_ptr_equal(fp8_params.query_scale.data, place(5));
  assert_int_equal(fp8_params.query_scale.stride_batch, HEADS_K);
  assert_int_equal(fp8_params.query_scale.stride_head, 1);
  assert_int_equal(fp8_params.query_scale.rows, 0);
  assert_int_equal(fp8_params.query_scale.heads_per_scale, HEADS_Q / HEADS_K);
  assert_int_equal(fp8_params.warpgroups_have_scales, 1);
  assert_ptr_equal(fp8_params.key_scale.data, place(6));
  assert_int_equal(fp8_params.key_scale.stride_head, 40);
  assert_int_equal(fp8_params.key_scale.stride_block, 1);
  assert_int_equal(fp8_params.key_scale.rows, 128);
  assert_int_equal(fp8_params.key_scale.heads_per_scale, 1);
  assert_null(fp8_params.value_scale.data);
  assert_int_equal(fp8_params.output, FA3_OUTPUT_BF16);
  assert_ptr_equal(fp8_params.forward.output_data, place(4));
  assert_int_equal(fp8_params.forward.group, HEADS_Q / HEADS_K);
  args.output.dtype = FA3_FLOAT32;
  run_forward(&args);
  assert_int_equal(fp8_params.output, FA3_OUTPUT_FP32);
}

/* V^T of head dim 256, tile by tile, from one kernel to the next. Scales of 16 rows are none of a
 * warpgroup. */
static void test_transposed_values(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(FA3_FLOAT8_E4M3, 5000, 5000, 256);
  args.query_scale = (fa3_tensor){.data = place(5),
                                  .dtype = FA3_FLOAT32,
                                  .rank = 3,
                                  .shape = {BATCH, HEADS_Q, 313},
                                  .strides = {(int64_t)HEADS_Q * 313, 313, 1}};
  args.query_scale_rows = 16;
  run_forward(&args);
  assert_int_equal(count, first + 2);
  assert_string_equal(launches[first].function, "transpose_values");
  assert_grid(&launches[first], 2 * 40, HEADS_K, BATCH, FA3_TRANSPOSE_VALUES_THREADS);
  assert_int_equal(launches[first].shared_bytes, launches[first].shared_limit);
  assert_string_equal(launches[first + 1].function, "forward_fp8");
  assert_int_equal(fp8_params.warpgroups_have_scales, 0);
  const fa3_transposed_values *values = &fp8_params.transposed;
  assert_memory_equal(values, &transpose_params.to, sizeof *values);
  assert_int_equal(values->heads, HEADS_K);
  assert_int_equal(values->per_sequence, 40);
  assert_int_equal(values->count, BATCH * 40);
  const unsigned char *workspace = args.workspace;
  assert_true(values->data >= workspace &&
              values->data + (size_t)BATCH * HEADS_K * 40 * 128 * 256 <=
                  workspace + args.workspace_size);
  assert_int_equal(transpose_params.sequences.seqlen_k, 5000);
}

static fa3_append_args make_append(fa3_dtype cache) {
  return (fa3_append_args){.struct_size = sizeof(fa3_append_args),
                           .device = gpu,
                           .new_key = tensor(1, FA3_BFLOAT16, 3, HEADS_K, 64),
                           .new_value = tensor(2, FA3_BFLOAT16, 3, HEADS_K, 64),
                           .key = tensor(3, cache, 100, HEADS_K, 64),
                           .value = tensor(4, cache, 100, HEADS_K, 64),
                           .seqused_k = fa3_vector(place(5), FA3_INT32, BATCH)};
}

/* A warp has a head of a new row: of keys, of values, of queries that are turned with them. */
static void test_append(void **state) {
  (void)state;
  fa3_append_args args = make_append(FA3_BFLOAT16);
  args.query = tensor(6, FA3_BFLOAT16, 3, HEADS_Q, 64);
  args.rotated_query = tensor(7, FA3_BFLOAT16, 3, HEADS_Q, 64);
  args.rotary_cos = matrix(8, FA3_FLOAT32, 200, 16);
  args.rotary_sin = matrix(9, FA3_FLOAT32, 200, 16);
  args.flags = FA3_ROTARY_INTERLEAVED;
  first = count;
  good(fa3_append(&args));
  assert_grid(launch_of("append"), 3, BATCH, (2 * HEADS_K + HEADS_Q) / FA3_APPEND_WARPS,
              FA3_APPEND_THREADS);
  assert_ptr_equal(append_params.sequences.used_k, place(5));
  assert_ptr_equal(append_params.key.data, place(3));
  assert_ptr_equal(append_params.rotated_query.data, place(7));
  assert_ptr_equal(append_params.sin.data, place(9));
  assert_null(append_params.page_table);
  assert_null(append_params.positions);
  assert_int_equal(append_params.rows_k, 100);
  assert_int_equal(append_params.heads_q, HEADS_Q);
  assert_int_equal(append_params.pairs, 16);
  assert_int_equal(append_params.table_rows, 200);
  assert_int_equal(append_params.interleaved, 1);
  assert_int_equal(append_params.kind, FA3_APPEND_BFLOAT16);
  assert_int_equal(append_params.table_kind, FA3_APPEND_FLOAT32);
  assert_int_equal(append_params.quantised, 0);

  /* Into pages of codes, each row with a scale of its own, which is written. */
  args = make_append(FA3_FLOAT8_E4M3);
  args.key = fa3_dense(place(3), FA3_FLOAT8_E4M3, 40, 16, HEADS_K, 64);
  args.value = fa3_dense(place(4), FA3_FLOAT8_E4M3, 40, 16, HEADS_K, 64);
  args.page_table = matrix(6, FA3_INT32, BATCH, 10);
  args.key_scale = args.value_scale = (fa3_tensor){.data = place(7),
                                                   .dtype = FA3_FLOAT32,
                                                   .rank = 3,
                                                   .shape = {40, HEADS_K, 16},
                                                   .strides = {(int64_t)HEADS_K * 16, 16, 1}};
  args.value_scale.data = place(8);
  args.key_scale_rows = args.value_scale_rows = 1;
  first = count;
  good(fa3_append(&args));
  assert_grid(launch_of("append"), 3, BATCH, 1, FA3_APPEND_THREADS);
  assert_int_equal(append_params.quantised, 1);
  assert_ptr_equal(append_params.page_table, place(6));
  assert_int_equal(append_params.page_table_stride, 10);
  assert_int_equal(append_params.page_size, 16);
  assert_int_equal(append_params.pages, 40);
  assert_int_equal(append_params.rows_k, 10 * 16);
  assert_int_equal(append_params.heads_q, 0);
  assert_null(append_params.cos.data);
  assert_ptr_equal(append_params.value_scale.data, place(8));
  assert_int_equal(append_params.value_scale.rows, 1);
  assert_int_equal(append_params.value_scale.stride_batch, HEADS_K * 16);

  /* Of codes, what attention takes. */
  args = make_append(FA3_FLOAT8_E4M3);
  args.new_key.shape[3] = args.key.shape[3] = 24;
  assert_int_equal(fa3_append(&args), FA3_UNSUPPORTED);
  assert_string_equal(fa3_last_error(), "head_dim is 24: expected a multiple of 16 from 16 to 256");
}

/* Attention of so many queries to the cache that the append writes. */
static fa3_forward_args attend_behind(const fa3_append_args *append, int64_t queries) {
  fa3_forward_args forward = {.struct_size = sizeof forward,
                              .device = gpu,
                              .query = tensor(6, FA3_BFLOAT16, queries, HEADS_Q, 64),
                              .key = append->key,
                              .value = append->value,
                              .output = tensor(7, FA3_BFLOAT16, queries, HEADS_Q, 64),
                              .page_table = append->page_table,
                              .workspace = place(8)};
  good(fa3_forward_workspace(&forward, &forward.workspace_size));
  return forward;
}

/* The two calls have to be on one stream; if not, neither is launched. */
static void test_append_forward(void **state) {
  (void)state;
  const fa3_append_args append = make_append(FA3_BFLOAT16);
  fa3_forward_args forward = attend_behind(&append, 3);
  forward.stream = (void *)1; /* the legacy stream, by name */
  first = count;
  assert_int_equal(fa3_append_forward(&append, &forward), FA3_INVALID_DEVICE);
  assert_string_equal(fa3_last_error(), "forward's device or stream is not append's");
  assert_int_equal(count, first);
  forward.stream = append.stream;
  good(fa3_append_forward(&append, &forward));
  assert_true(count >= first + 2);
  assert_string_equal(launches[first].function, "append");
}

/* What attention awaits of an append: a sequence's own new keys, or those of all that may share its
 * pages, or all keys. */
static void test_appended_keys(void **state) {
  (void)state;
  fa3_append_args append = make_append(FA3_BFLOAT16);
  fa3_forward_args forward = attend_behind(&append, 1);
  good(fa3_append_forward(&append, &forward));
  /* How many keys there are is not said. */
  assert_int_equal(decode_params.decode.appended, INT32_MAX / 2);
  forward.seqused_k = fa3_vector(place(9), FA3_INT32, BATCH);
  good(fa3_append_forward(&append, &forward));
  assert_int_equal(decode_params.decode.appended, 3);
  append.key = fa3_dense(place(3), FA3_BFLOAT16, 40, 16, HEADS_K, 64);
  append.value = fa3_dense(place(4), FA3_BFLOAT16, 40, 16, HEADS_K, 64);
  append.page_table = matrix(5, FA3_INT32, BATCH, 10);
  forward = attend_behind(&append, 1);
  forward.seqused_k = fa3_vector(place(9), FA3_INT32, BATCH);
  good(fa3_append_forward(&append, &forward));
  assert_int_equal(decode_params.decode.appended, 3 * BATCH);
  append.flags = FA3_SEPARATE_SEQUENCES;
  good(fa3_append_forward(&append, &forward));
  assert_int_equal(decode_params.decode.appended, 3);
}

/* The same, of three rows. */
static fa3_tensor with_rows(fa3_tensor of_two) {
  return fa3_dense(of_two.data, of_two.dtype, BATCH, 3, of_two.shape[2], of_two.shape[3]);
}

/* A call of both with so many launches, of which the last is that function's. */
static void run_both(const fa3_append_args *append, fa3_forward_args *forward, int launched,
                     const char *function) {
  good(fa3_forward_workspace(forward, &forward->workspace_size));
  first = count;
  good(fa3_append_forward(append, forward));
  assert_int_equal(count, first + launched);
  assert_string_equal(launches[count - 1].function, function);
}

/* Attention appends by itself where only one sequence's blocks read what it writes. */
static void test_append_in_one_kernel(void **state) {
  (void)state;
  fa3_append_args append = make_append(FA3_BFLOAT16);
  append.new_key = tensor(1, FA3_BFLOAT16, 2, HEADS_K, 64);
  append.new_value = tensor(2, FA3_BFLOAT16, 2, HEADS_K, 64);
  append.query = tensor(6, FA3_BFLOAT16, 2, HEADS_Q, 64);
  append.rotated_query = tensor(7, FA3_BFLOAT16, 2, HEADS_Q, 64);
  append.rotary_cos = matrix(8, FA3_BFLOAT16, 200, 16);
  append.rotary_sin = matrix(9, FA3_BFLOAT16, 200, 16);
  fa3_forward_args forward = {.struct_size = sizeof forward,
                              .device = gpu,
                              .query = append.rotated_query,
                              .key = append.key,
                              .value = append.value,
                              .output = tensor(10, FA3_BFLOAT16, 2, HEADS_Q, 64),
                              .seqused_k = fa3_vector(place(11), FA3_INT32, BATCH),
                              .workspace = place(20)};
  run_both(&append, &forward, 1, "decode_append");
  assert_grid(&launches[first], BATCH * HEADS_K * 2, 1, 1, FA3_DECODE_APPEND_THREADS);
  assert_int_equal(joined_params.query_pairs, 16);
  assert_ptr_equal(joined_params.append.query.data, place(6));
  assert_ptr_equal(joined_params.append.sequences.used_k, place(5));
  assert_ptr_equal(joined_params.decode.sequences.used_k, place(11));
  assert_int_equal(joined_params.decode.early_blocks, 0);

  fa3_append_args other = append;
  fa3_forward_args attention = forward;
  other.query = other.rotated_query = (fa3_tensor){0};
  run_both(&other, &forward, 1, "decode_append"); /* of queries that the append leaves alone */
  assert_int_equal(joined_params.query_pairs, 0);
  assert_ptr_equal(joined_params.append.query.data, place(7));
  other = append;
  other.rotary_cos.dtype = other.rotary_sin.dtype = FA3_FLOAT32;
  run_both(&other, &forward, 2, "decode");
  other = append;
  enum { OF_ROWS = 6, OF_BATCH = 8 };
  fa3_tensor *const of_rows[OF_ROWS] = {&other.new_key,       &other.new_value, &other.query,
                                        &other.rotated_query, &attention.query, &attention.output};
  for (int i = 0; i < OF_ROWS; i++) *of_rows[i] = with_rows(*of_rows[i]);
  run_both(&other, &attention, 2, "decode"); /* more rows than 8 */
  attention = forward;
  attention.query.data = place(6); /* queries that the append has not turned */
  run_both(&append, &attention, 2, "decode");
  attention = forward;
  attention.output.data = place(6); /* over queries that other clusters may still read */
  run_both(&append, &attention, 2, "decode");
  attention = forward;
  attention.seqused_k = (fa3_tensor){0};
  run_both(&append, &attention, 2, "decode");
  attention = forward;
  attention.split_keys = 64; /* parts of a sequence are put together by another kernel */
  run_both(&append, &attention, 3, "combine_rows");

  /* Sequences may have the same pages; one has them to itself, and others if they are separate. */
  for (int64_t batch = 1; batch <= BATCH; batch++) {
    other = append;
    other.key = fa3_dense(place(3), FA3_BFLOAT16, 40, 16, HEADS_K, 64);
    other.value = fa3_dense(place(4), FA3_BFLOAT16, 40, 16, HEADS_K, 64);
    other.page_table = make_matrix(place(12), FA3_INT32, batch, 10);
    attention = forward;
    attention.key = other.key;
    attention.value = other.value;
    attention.page_table = other.page_table;
    fa3_tensor *const of_batch[OF_BATCH] = {
        &other.new_key,   &other.new_value, &other.query,      &other.rotated_query,
        &other.seqused_k, &attention.query, &attention.output, &attention.seqused_k};
    for (int i = 0; i < OF_BATCH; i++) of_batch[i]->shape[0] = batch;
    run_both(&other, &attention, (int)batch, batch == 1 ? "decode_append" : "decode");
    other.flags = FA3_SEPARATE_SEQUENCES;
    run_both(&other, &attention, 1, "decode_append");
  }
}

/* Also where a sequence has several clusters, whose results another kernel puts together; but not
 * where turned queries would take the place of those that a later cluster turns. */
static void test_append_by_several_clusters(void **state) {
  (void)state;
  enum { KEYS = 1 << 16 };
  fa3_append_args append = {.struct_size = sizeof append,
                            .device = gpu,
                            .new_key = fa3_dense(place(1), FA3_BFLOAT16, 1, 2, HEADS_K, 64),
                            .new_value = fa3_dense(place(2), FA3_BFLOAT16, 1, 2, HEADS_K, 64),
                            .key = fa3_dense(place(3), FA3_BFLOAT16, 1, KEYS, HEADS_K, 64),
                            .value = fa3_dense(place(4), FA3_BFLOAT16, 1, KEYS, HEADS_K, 64),
                            .seqused_k = fa3_vector(place(5), FA3_INT32, 1),
                            .query = fa3_dense(place(6), FA3_BFLOAT16, 1, 2, HEADS_Q, 64),
                            .rotated_query = fa3_dense(place(7), FA3_BFLOAT16, 1, 2, HEADS_Q, 64),
                            .rotary_cos = matrix(8, FA3_BFLOAT16, KEYS, 16),
                            .rotary_sin = matrix(9, FA3_BFLOAT16, KEYS, 16)};
  fa3_forward_args forward = {.struct_size = sizeof forward,
                              .device = gpu,
                              .query = append.rotated_query,
                              .key = append.key,
                              .value = append.value,
                              .output = fa3_dense(place(10), FA3_BFLOAT16, 1, 2, HEADS_Q, 64),
                              .seqused_k = fa3_vector(place(11), FA3_INT32, 1),
                              .workspace = place(20)};
  run_both(&append, &forward, 2, "combine");
  assert_string_equal(launches[first].function, "decode_append");
  assert_true((int)joined_params.decode.splits.divisor > joined_params.decode.cluster);
  assert_non_null(joined_params.decode.partial);
  append.query.data = append.rotated_query.data;
  run_both(&append, &forward, 3, "combine");
  assert_string_equal(launches[first].function, "append");
  append.query = append.rotated_query = (fa3_tensor){0}; /* queries that are not turned */
  run_both(&append, &forward, 2, "combine");
  assert_string_equal(launches[first].function, "decode_append");
}

/* Three sets of keys: all sequences of one after all of another. */
static void test_combine(void **state) {
  (void)state;
  enum { SETS = 3, ROWS = 5, DIM = 64 };
  fa3_combine_args args = {
      .struct_size = sizeof args,
      .device = gpu,
      .partial_output = fa3_dense(place(1), FA3_FLOAT32, (int64_t)SETS * BATCH, ROWS, HEADS_Q, DIM),
      .partial_lse = fa3_lse(place(2), (int64_t)SETS * BATCH, HEADS_Q, ROWS),
      .output = tensor(3, FA3_FLOAT16, ROWS, HEADS_Q, DIM),
      .lse = fa3_lse(place(4), BATCH, HEADS_Q, ROWS)};
  first = count;
  good(fa3_combine(&args));
  const int rows = FA3_COMBINE_THREADS / FA3_COMBINE_ROW_THREADS(DIM);
  assert_grid(launch_of("combine_rows"), (ROWS * HEADS_Q + rows - 1) / rows, BATCH, 1,
              FA3_COMBINE_THREADS);
  assert_int_equal(combine_params.splits, SETS);
  assert_int_equal(combine_params.heads, HEADS_Q);
  assert_int_equal(combine_params.head_dim, DIM);
  assert_int_equal(combine_params.seqlen_q, ROWS);
  assert_int_equal(combine_params.kind, FA3_COMBINE_FLOAT16);
  assert_int_equal(combine_params.partial_strides.split, BATCH * ROWS * HEADS_Q * DIM);
  assert_int_equal(combine_params.partial_strides.batch, ROWS * HEADS_Q * DIM);
  assert_int_equal(combine_params.partial_lse_strides.split, BATCH * HEADS_Q * ROWS);
  assert_int_equal(combine_params.partial_lse_strides.row, 1);
  assert_ptr_equal(combine_params.lse, place(4));
  assert_null(combine_params.cu_seqlens_q);
  assert_null(combine_params.sink);

  /* Results that no thread can write four columns of: a warp has a row. */
  args.output.strides[1] = HEADS_Q * DIM + 1;
  args.output.strides[0] = ROWS * args.output.strides[1];
  first = count;
  good(fa3_combine(&args));
  assert_grid(launch_of("combine"), ROWS * HEADS_Q / FA3_COMBINE_WARPS, BATCH, 1,
              FA3_COMBINE_THREADS);
}

/* Rows whose threads are more than 32 bits count: a warp has a row. */
static void test_combine_many_rows(void **state) {
  (void)state;
  enum { DIM = 8 };
  const int64_t most = (INT64_C(1) << 32) / FA3_COMBINE_ROW_THREADS(DIM);
  for (int beyond = 0; beyond < 2; beyond++) {
    const int64_t rows = beyond ? most : most - 32;
    const fa3_combine_args args = {
        .struct_size = sizeof args,
        .device = gpu,
        .partial_output = fa3_dense(place(1), FA3_FLOAT32, 1, rows, 1, DIM),
        .partial_lse = fa3_lse(place(2), 1, 1, rows),
        .output = fa3_dense(place(3), FA3_BFLOAT16, 1, rows, 1, DIM)};
    first = count;
    good(fa3_combine(&args));
    assert_string_equal(launches[first].function, beyond ? "combine" : "combine_rows");
  }
}

/* A group of 4 shares tiles of 64 rows of 16 queries; both heads of keys are a team. */
static void test_dealt_keys(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(FA3_BFLOAT16, 16, 8000, 128);
  args.query.shape[0] = args.key.shape[0] = args.value.shape[0] = args.output.shape[0] = 27;
  args.seqused_k = fa3_vector(place(10), FA3_INT32, 27);
  run_forward(&args);
  assert_int_equal(count, first + 2);
  assert_string_equal(launches[first].function, "forward");
  assert_string_equal(launches[first + 1].function, "combine_tiles");
  const int rows = FA3_COMBINE_THREADS / FA3_COMBINE_ROW_THREADS(128);
  assert_grid(&launches[first + 1], 64 / rows, launches[first].grid[0], 1, FA3_COMBINE_THREADS);
  assert_int_equal(combine_params.tile_rows, 64);
  assert_int_equal(combine_params.group, HEADS_Q / HEADS_K);
  assert_int_equal(combine_params.team, HEADS_K);
  assert_int_equal(combine_params.by_four, 1);
  assert_non_null(combine_params.tiles);
}

/* The same of codes under 32 rows: a tile of 27 sequences has four parts in the mean, which are put
 * together tile by tile; of two sequences 66, and eight warps share a row. */
static void test_dealt_codes(void **state) {
  (void)state;
  for (int few_tiles = 0; few_tiles < 2; few_tiles++) {
    const int64_t batch = few_tiles ? 2 : 27;
    fa3_forward_args args = make_forward(FA3_BFLOAT16, 8, few_tiles ? 80000 : 8000, 128);
    args.query.shape[0] = args.key.shape[0] = args.value.shape[0] = args.output.shape[0] = batch;
    args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
    args.seqused_k = fa3_vector(place(10), FA3_INT32, batch);
    run_forward(&args);
    assert_int_equal(count, first + 2);
    const struct fake_launch *attention = &launches[first], *together = &launches[first + 1];
    assert_string_equal(attention->function, "speculative_fp8_dealt");
    assert_grid(attention, 264, 1, 1, 128 * FA3_SPECULATIVE_FP8_GROUPS);
    assert_int_equal(decode_params.decode.most_units, few_tiles ? 1251 : 126);
    assert_int_equal(decode_params.decode.parts != NULL, few_tiles);
    assert_int_equal(decode_params.decode.begun != NULL, !few_tiles);
    assert_non_null(decode_params.decode.partial);
    assert_string_equal(together->function, few_tiles ? "combine" : "combine_tiles");
    if (few_tiles)
      assert_grid(together, 8 * HEADS_Q, 2, 1, FA3_COMBINE_THREADS);
    else
      assert_grid(together, 4, 264, 1, FA3_COMBINE_THREADS);
    assert_int_equal(combine_params.parts != NULL, few_tiles);
    assert_int_equal(combine_params.tiles != NULL, !few_tiles);
    assert_int_equal(combine_params.tile_rows, FA3_SPECULATIVE_FP8_ROWS);
    assert_int_equal(combine_params.group, HEADS_Q / HEADS_K);
    assert_int_equal(few_tiles ? combine_params.warps : combine_params.team,
                     few_tiles ? FA3_COMBINE_WARPS : HEADS_K);
  }
}

/* Codes of one scale for each head, in pages, under many queries: they are unpacked, and then are
 * dense. */
static void test_unpacked(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(FA3_FLOAT16, 1000, 0, 128);
  args.key = args.value = fa3_dense(place(2), FA3_FLOAT8_E4M3, 900, 16, HEADS_K, 128);
  args.value.data = place(3);
  args.page_table = matrix(5, FA3_INT32, BATCH, 300);
  args.seqused_k = fa3_vector(place(6), FA3_INT32, BATCH);
  args.value_scale = (fa3_tensor){.data = place(7),
                                  .dtype = FA3_FLOAT32,
                                  .rank = 2,
                                  .shape = {900, HEADS_K},
                                  .strides = {0, 3}};
  args.num_splits = 1; /* nor are keys dealt out */
  run_forward(&args);
  assert_int_equal(count, first + 2);
  const struct fake_launch *unpack = &launches[first], *attention = &launches[first + 1];
  assert_string_equal(unpack->function, "unpack");
  assert_string_equal(attention->function, "forward");
  const int rows = 300 * 16;
  assert_grid(unpack, (unsigned)(rows + FA3_UNPACK_KEYS - 1) / FA3_UNPACK_KEYS * HEADS_K, BATCH, 1,
              FA3_UNPACK_THREADS);
  const fa3_decode_fp8_params *cache = &unpack_params.cache;
  assert_int_equal(cache->query, FA3_QUERY_FP16);
  assert_int_equal(cache->few_queries, 0);
  assert_int_equal(cache->decode.page_size.divisor, 16);
  assert_int_equal(cache->decode.pages, 900);
  assert_int_equal(cache->decode.rows_k, rows);
  assert_ptr_equal(cache->decode.sequences.page_table, place(5));
  assert_ptr_equal(cache->decode.sequences.used_k, place(6));
  assert_null(cache->key_scale.data);
  assert_ptr_equal(cache->value_scale.data, place(7));
  assert_int_equal(cache->value_scale.stride_head, 3);
  assert_int_equal(unpack_params.rows, rows);
  assert_int_equal(unpack_params.row_threads, 16);
  const char *const key = (const char *)unpack_params.key;
  const char *const value = (const char *)unpack_params.value;
  const char *const end = (const char *)args.workspace + args.workspace_size;
  const int64_t bytes = (int64_t)BATCH * HEADS_K * rows * 128 * 2;
  assert_true(key >= (const char *)args.workspace && key + bytes <= value);
  assert_true(value + bytes <= (const char *)unpack_params.head_scales);
  assert_true((const char *)&unpack_params.head_scales[(int64_t)BATCH * HEADS_K] <= end);
  assert_ptr_equal(forward_params.unpacked.of_heads, unpack_params.head_scales);
  assert_null(unpack_params.row_scales);
  assert_int_equal(forward_params.unpacked.heads_k, HEADS_K);
  assert_int_equal(forward_params.page_size, 0);
  assert_null(forward_params.sequences.page_table);
  assert_ptr_equal(forward_params.sequences.used_k, place(6));
  assert_int_equal(forward_params.clear_value, 1);
}

/* The same of so many keys that a head's have all the room there is: one head after the other. */
static void test_unpacked_heads(void **state) {
  (void)state;
  const int64_t group = HEADS_Q / HEADS_K;
  fa3_forward_args args = make_forward(FA3_BFLOAT16, 1000, 400000, 128);
  args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
  args.key_scale = (fa3_tensor){.data = place(5),
                                .dtype = FA3_FLOAT32,
                                .rank = 3,
                                .shape = {BATCH, HEADS_K, 400000},
                                .strides = {(int64_t)HEADS_K * 400000, 400000, 1}};
  args.key_scale_rows = 1;
  args.value_scale = fa3_vector(place(6), FA3_FLOAT32, 1);
  args.sink = fa3_vector(place(7), FA3_FLOAT32, HEADS_Q);
  args.lse = fa3_lse(place(8), BATCH, HEADS_Q, 1000);
  args.num_splits = 1;
  run_forward(&args);
  assert_int_equal(count, first + 4);
  for (int i = 0; i < 4; i++)
    assert_string_equal(launches[first + i].function, i % 2 ? "forward" : "unpack");
  /* Of the last two. */
  const fa3_decode_fp8_params *cache = &unpack_params.cache;
  assert_int_equal(launches[first + 2].grid[0], 400000 / FA3_UNPACK_KEYS);
  assert_ptr_equal(cache->decode.key.data, (char *)place(2) + 128);
  assert_ptr_equal(cache->decode.value.data, (char *)place(3) + 128);
  assert_ptr_equal(cache->key_scale.data, (float *)place(5) + 400000);
  assert_ptr_equal(cache->value_scale.data, place(6));
  assert_null(unpack_params.head_scales);
  assert_int_equal(unpack_params.scale_rows, 400000);
  assert_ptr_equal(forward_params.unpacked.of_rows, unpack_params.row_scales);
  assert_int_equal(forward_params.unpacked.rows, 400000);
  assert_int_equal(forward_params.unpacked.heads_k, 1);
  assert_ptr_equal(forward_params.output_data, (uint16_t *)place(4) + group * 128);
  assert_ptr_equal(forward_params.lse, (float *)place(8) + group * 1000);
  assert_ptr_equal(forward_params.sink, (float *)place(7) + group);
  const char *const end = (const char *)&unpack_params.row_scales[(int64_t)BATCH * 2 * 400000];
  assert_true(end <= (const char *)args.workspace + args.workspace_size);
}

/* Calls that take what those above leave out. */
static void run_the_others(void) {
  fa3_forward_args args = make_forward(FA3_BFLOAT16, 1, 200000, 128);
  run_forward(&args); /* decode, combine */
  args = make_forward(FA3_BFLOAT16, 1, 5000, 128);
  args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
  run_forward(&args); /* decode_fp8 */
  args = make_forward(FA3_BFLOAT16, 600, 5000, 128);
  args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
  args.softcap = 5;
  run_forward(&args); /* chunk_fp8 */
  args = make_forward(FA3_BFLOAT16, 8, 80000, 128);
  args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
  run_forward(&args); /* speculative_fp8 */
  args = make_forward(FA3_BFLOAT16, 1, 8000, 128);
  args.query.shape[0] = args.key.shape[0] = args.value.shape[0] = args.output.shape[0] = 27;
  run_forward(&args); /* decode_dealt */
  args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
  run_forward(&args); /* decode_fp8_dealt */
  args = make_forward(FA3_BFLOAT16, 3000, 3000, 64);
  run_forward(&args);
  run_backward(&args); /* backward_finish */
  args = make_forward(FA3_BFLOAT16, 60, 3000, 64);
  run_backward(&args); /* backward_finish_narrow */
  args = make_forward(FA3_BFLOAT16, 3000, 3000, 256);
  run_backward(&args);
  args = make_forward(FA3_BFLOAT16, 4096, 77, 64);
  args.sink = (fa3_tensor){
      .data = place(10), .dtype = FA3_BFLOAT16, .rank = 1, .shape = {HEADS_Q}, .strides = {1}};
  args.key.data = (char *)args.key.data + 2; /* copy_strided, sinks_to_float */
  run_backward(&args);                       /* backward_sink */
  args = make_forward(FA3_BFLOAT16, 4096, 77, 256);
  run_backward(&args); /* backward_sum */
  fa3_quantize_args quantize = {
      .struct_size = sizeof quantize,
      .device = gpu,
      .input = tensor(1, FA3_BFLOAT16, 3000, HEADS_Q, 64),
      .codes = tensor(2, FA3_FLOAT8_E4M3, 3000, HEADS_Q, 64),
      .codes_scale = fa3_vector(place(3), FA3_FLOAT32, 1)}; /* quantize_clear */
  good(fa3_quantize(&quantize));
  quantize.flags = FA3_ROTATE;
  good(fa3_quantize(&quantize)); /* quantize_rotated */
  quantize.rotary_cos = quantize.rotary_sin = (fa3_tensor){
      .data = place(4), .dtype = FA3_BFLOAT16, .rank = 2, .shape = {3000, 32}, .strides = {32, 1}};
  good(fa3_quantize(&quantize)); /* quantize_turned_rotated */
  quantize.flags = 0;
  good(fa3_quantize(&quantize)); /* quantize_turned */
  quantize.rotary_cos.dtype = quantize.rotary_sin.dtype = FA3_FLOAT32;
  good(fa3_quantize(&quantize)); /* quantize_turned_by_floats */
  quantize.flags = FA3_ROTATE;
  good(fa3_quantize(&quantize)); /* quantize_turned_rotated_by_floats */
  quantize.input.data = (char *)quantize.input.data + 2;
  good(fa3_quantize(&quantize)); /* quantize_any */
}

static void test_every_function(void **state) {
  (void)state;
  run_the_others();
  assert_non_null(fake_kernel_name(0));
  for (int k = 0; fake_kernel_name(k); k++) {
    bool launched = false;
    for (int i = 0; i < count && !launched; i++)
      launched = !strcmp(launches[i].function, fake_kernel_name(k));
    if (!launched) fail_msg("no call of this test launches %s", fake_kernel_name(k));
  }
}

int main(void) {
  if (fa3_prepare(gpu)) {
    printf("skipped: %s\n", fa3_last_error());
    return TEST_SKIPPED;
  }
  fake_watch(watch);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fp8_forward),
      cmocka_unit_test(test_transposed_values),
      cmocka_unit_test(test_append),
      cmocka_unit_test(test_append_forward),
      cmocka_unit_test(test_appended_keys),
      cmocka_unit_test(test_append_in_one_kernel),
      cmocka_unit_test(test_append_by_several_clusters),
      cmocka_unit_test(test_combine),
      cmocka_unit_test(test_combine_many_rows),
      cmocka_unit_test(test_dealt_keys),
      cmocka_unit_test(test_dealt_codes),
      cmocka_unit_test(test_unpacked),
      cmocka_unit_test(test_unpacked_heads),
      cmocka_unit_test(test_every_function),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
