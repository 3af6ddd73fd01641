/* What a call on a GPU asks the driver for: the kernels in their order, how each is launched, and
 * what it is told. The GPU is fake.c's Hopper, of 132 multiprocessors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "fa3.h"
#include "fake.h"
#include "kernels/backward_params.h"
#include "kernels/combine_params.h"
#include "kernels/decode_params.h"
#include "kernels/forward_params.h"
#include "kernels/quantize_params.h"
#include "kernels/strided_params.h"
#include "test.h"

enum { MULTIPROCESSORS = 132, MOST_LAUNCHES = 16 };

static const fa3_device gpu = {FA3_CUDA, 0};
static char *const workspace = (char *)(uintptr_t)((1 << 30) + 4); /* as it comes */
static void *const stream = (void *)1;                             /* the legacy default stream */

/* The launches of the last call. */
static struct fake_launch launches[MOST_LAUNCHES];
static int count;
static fa3_forward_params forward_params;
static fa3_backward_params backward_params;
static fa3_backward_prepare_params prepare_params;
static fa3_copy_params copies[MOST_LAUNCHES];
static fa3_sink_params sink_params;
static fa3_decode_params decode_params;
static fa3_decode_fp8_params decode_fp8_params;
static fa3_combine_params combine_params;
static fa3_quantize_params quantize_params;

static void watch(const struct fake_launch *launch) {
  assert_true(count < MOST_LAUNCHES);
  fake_keep(launch, "forward", &forward_params, sizeof forward_params);
  fake_keep(launch, "backward", &backward_params, sizeof backward_params);
  fake_keep(launch, "backward_prepare", &prepare_params, sizeof prepare_params);
  fake_keep(launch, "backward_prepare_long", &prepare_params, sizeof prepare_params);
  fake_keep(launch, "decode", &decode_params, sizeof decode_params);
  fake_keep(launch, "decode_fp8", &decode_fp8_params, sizeof decode_fp8_params);
  fake_keep(launch, "combine", &combine_params, sizeof combine_params);
  fake_keep(launch, "quantize", &quantize_params, sizeof quantize_params);
  fake_keep(launch, "quantize_any", &quantize_params, sizeof quantize_params);
  fake_keep(launch, "quantize_turned_rotated", &quantize_params, sizeof quantize_params);
  fake_keep(launch, "quantize_turned_rotated_by_floats", &quantize_params, sizeof quantize_params);
  fake_keep(launch, "copy_strided", &copies[count], sizeof *copies);
  fake_keep(launch, "sinks_to_float", &sink_params, sizeof sink_params);
  assert_ptr_equal(launch->stream, stream);
  launches[count++] = *launch;
}

static void assert_launches(const char *const *functions) {
  for (int i = 0; i < count || functions[i]; i++)
    assert_string_equal(i < count ? launches[i].function : "none",
                        functions[i] ? functions[i] : "none");
}
#define ASSERT_LAUNCHES(...) assert_launches((const char *const[]){__VA_ARGS__, NULL})

static const struct fake_launch *find(const char *function) {
  for (int i = 0; i < count; i++)
    if (!strcmp(launches[i].function, function)) return &launches[i];
  fail_msg("no launch of %s", function);
  return NULL;
}

static fa3_tensor tensor(int n, int64_t seqlen, int64_t heads, int64_t head_dim) {
  return fa3_dense(place(n), FA3_BFLOAT16, 2, seqlen, heads, head_dim);
}

static fa3_forward_args make_forward(int64_t seqlen, int64_t heads_k, int64_t head_dim) {
  return (fa3_forward_args){.struct_size = sizeof(fa3_forward_args),
                            .device = gpu,
                            .stream = stream,
                            .query = tensor(1, seqlen, 8, head_dim),
                            .key = tensor(2, seqlen, heads_k, head_dim),
                            .value = tensor(3, seqlen, heads_k, head_dim),
                            .output = tensor(4, seqlen, 8, head_dim)};
}

static fa3_backward_args make_backward(int64_t seqlen, int64_t head_dim) {
  return (fa3_backward_args){.struct_size = sizeof(fa3_backward_args),
                             .device = gpu,
                             .stream = stream,
                             .query = tensor(1, seqlen, 8, head_dim),
                             .key = tensor(2, seqlen, 8, head_dim),
                             .value = tensor(3, seqlen, 8, head_dim),
                             .output = tensor(4, seqlen, 8, head_dim),
                             .lse = fa3_lse(place(5), 2, 8, seqlen),
                             .grad_output = tensor(6, seqlen, 8, head_dim),
                             .grad_query = tensor(7, seqlen, 8, head_dim),
                             .grad_key = tensor(8, seqlen, 8, head_dim),
                             .grad_value = tensor(9, seqlen, 8, head_dim)};
}

static size_t run_forward(fa3_forward_args *args) {
  args->workspace = workspace;
  if (fa3_forward_workspace(args, &args->workspace_size)) fail_msg("%s", fa3_last_error());
  count = 0;
  if (fa3_forward(args)) fail_msg("%s", fa3_last_error());
  return args->workspace_size;
}

static size_t run_backward(fa3_backward_args *args) {
  args->workspace = workspace;
  if (fa3_backward_workspace(args, &args->workspace_size)) fail_msg("%s", fa3_last_error());
  count = 0;
  if (fa3_backward(args)) fail_msg("%s", fa3_last_error());
  return args->workspace_size;
}

static bool is_in_workspace(const void *data, size_t size) {
  return (const char *)data >= workspace && (const char *)data < workspace + size;
}

static void assert_in_workspace(const void *data, size_t size) {
  assert_true(is_in_workspace(data, size));
}

/* In the workspace, and aligned as its start is not. */
static void assert_staged(const void *data, size_t workspace_size, size_t bytes) {
  const char *at = data;
  assert_true(at >= workspace && at + bytes <= workspace + workspace_size);
  assert_int_equal((uintptr_t)at % 128, 0);
}

static void test_forward(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(10000, 8, 64);
  args.lse = fa3_lse(place(5), 2, 8, 10000);
  run_forward(&args);
  ASSERT_LAUNCHES("forward");
  assert_int_equal(launches[0].grid[0], MULTIPROCESSORS);
  assert_int_equal(launches[0].grid[1], 1);
  assert_int_equal(launches[0].grid[2], 1);
  assert_int_equal(launches[0].block[0], FA3_FORWARD_THREADS(192));
  assert_int_equal(launches[0].shared_bytes, FA3_FORWARD_SHARED_BYTES(64, 64, 192, 128, false));
  assert_int_equal(launches[0].shared_limit, launches[0].shared_bytes);
  assert_int_equal(launches[0].dependent, 1);
  assert_ptr_equal(forward_params.output_data, place(4));
  assert_ptr_equal(forward_params.lse, place(5));
  assert_int_equal(forward_params.lse_stride_batch, 8 * 10000);
  assert_int_equal(forward_params.sequences.seqlen_q, 10000);
  assert_int_equal(forward_params.tiles.batches, 2);
  assert_int_equal(forward_params.tiles.blocks, 53);
  assert_null(forward_params.next_tile);
  assert_null(forward_params.sink);

  /* Under a mask tiles are counted; softcap has a kernel of its own. */
  args.flags = FA3_CAUSAL;
  args.softcap = 30;
  const void *const plain = launches[0].cubin;
  run_forward(&args);
  ASSERT_LAUNCHES("forward");
  assert_ptr_not_equal(launches[0].cubin, plain);
  assert_int_equal(launches[0].block[0], FA3_FORWARD_THREADS(128));
  assert_non_null(forward_params.next_tile);

  /* With fewer tiles than multiprocessors each has a block, and nothing is counted; they have the
   * rows of one warpgroup. */
  args = make_forward(200, 8, 64);
  args.flags = FA3_CAUSAL;
  run_forward(&args);
  assert_int_equal(launches[0].grid[0], 2 * 8 * 4);
  assert_int_equal(forward_params.tile_queries, 64);
  assert_true(forward_params.clip_output && !forward_params.clear_value);
  assert_null(forward_params.next_tile);
  /* Query heads of a key head share tiles where the last ones have few rows. */
  args = make_forward(513, 2, 64);
  run_forward(&args);
  assert_int_equal(launches[0].grid[0], 2 * 2 * 33);
  assert_int_equal(forward_params.group, 4);
  assert_int_equal(forward_params.tile_heads, 4);
  assert_int_equal(forward_params.tile_queries, 16);
  args = make_forward(0, 8, 64);
  run_forward(&args);
  assert_int_equal(count, 0);
}

/* The launches of a stream share a counter of tiles. Each call that is captured has its own: its
 * graph may run beside the stream, and beside other graphs. */
static void test_tile_counters(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(10000, 8, 64);
  args.flags = FA3_CAUSAL;
  run_forward(&args);
  const unsigned *const of_stream = forward_params.next_tile;
  run_forward(&args);
  assert_ptr_equal(forward_params.next_tile, of_stream);
  setenv("FAKE_CUDA_CAPTURING", "1", 1);
  run_forward(&args);
  const unsigned *const captured = forward_params.next_tile;
  run_forward(&args);
  unsetenv("FAKE_CUDA_CAPTURING");
  assert_ptr_not_equal(captured, of_stream);
  assert_int_equal(forward_params.next_tile - captured, 1);
}

/* Where each block has one tile there is no counter, and pairs of blocks may begin early. */
static void test_backward_tile_counter(void **state) {
  (void)state;
  const struct {
    int64_t seqlen, head_dim;
    bool alone, early;
  } cases[] = {{500, 128, true, false},
               {5000, 128, false, false},
               {256, 256, true, true},
               {5000, 256, false, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    fa3_backward_args args = make_backward(cases[i].seqlen, cases[i].head_dim);
    const size_t size = run_backward(&args);
    assert_int_equal(is_in_workspace(backward_params.next_tile, size), !cases[i].alone);
    assert_ptr_equal(prepare_params.next_tile, backward_params.next_tile);
    if (cases[i].alone) assert_null(backward_params.next_tile);
    assert_int_equal(backward_params.early, cases[i].early);
    assert_int_equal(prepare_params.early, cases[i].early);
    assert_int_equal(prepare_params.lengths_known, 1);
  }
  /* Lengths in memory are not known before the kernels before are done. */
  fa3_backward_args args = make_backward(256, 256);
  args.seqused_k = fa3_vector(place(10), FA3_INT32, 2);
  run_backward(&args);
  assert_int_equal(prepare_params.lengths_known, 0);
  assert_null(backward_params.next_tile);
  assert_false(backward_params.early);
}

/* One query against many keys: blocks of a cluster share a sequence, and a second kernel puts the
 * clusters' results together where the keys are very many. */
static void test_decode(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(1, 2, 128);
  args.key = tensor(2, 5000, 2, 128);
  args.value = tensor(3, 5000, 2, 128);
  run_forward(&args);
  ASSERT_LAUNCHES("decode");
  assert_true(launches[0].cluster > 1);
  assert_int_equal(launches[0].cluster, decode_params.cluster);
  assert_int_equal(decode_params.splits.divisor, decode_params.cluster);
  assert_int_equal(launches[0].grid[0], 2 * 2 * decode_params.splits.divisor);
  assert_int_equal(launches[0].block[0], 32 * FA3_DECODE_WARPS);
  assert_int_equal(launches[0].shared_bytes, FA3_DECODE_SHARED_BYTES(8, 128, 3));
  assert_int_equal(launches[0].dependent, 1);
  assert_int_equal(decode_params.group.divisor, 4);
  assert_null(decode_params.partial);

  args.key = tensor(2, 200000, 2, 128);
  args.value = tensor(3, 200000, 2, 128);
  const size_t size = run_forward(&args);
  ASSERT_LAUNCHES("decode", "combine");
  assert_int_equal(launches[0].grid[0], 2 * 2 * decode_params.splits.divisor);
  const int64_t clusters = decode_params.splits.divisor / decode_params.cluster;
  assert_true(clusters > 1);
  assert_int_equal(combine_params.splits, clusters);
  assert_ptr_equal(combine_params.partial, decode_params.partial);
  assert_ptr_equal(combine_params.partial_lse, decode_params.partial_lse);
  assert_ptr_equal(combine_params.output, place(4));
  assert_staged(decode_params.partial, size, (size_t)(clusters * 2 * 8 * 128) * sizeof(float));
  assert_int_equal(launches[1].dependent, 1);
}

/* Codes are taken where they lie, and so are their scales; a page stands for a sequence there. */
static void test_fp8_cache(void **state) {
  (void)state;
  const int64_t pages = 40, page_size = 16, columns = 20;
  fa3_forward_args args = make_forward(1, 2, 128);
  args.key = fa3_dense(place(2), FA3_FLOAT8_E4M3, pages, page_size, 2, 128);
  args.value = fa3_dense(place(3), FA3_FLOAT8_E4M3, pages, page_size, 2, 128);
  args.page_table = make_matrix(place(5), FA3_INT32, 2, columns);
  args.seqused_k = fa3_vector(place(6), FA3_INT32, 2);
  args.value_scale = (fa3_tensor){.data = place(7),
                                  .dtype = FA3_FLOAT32,
                                  .rank = 3,
                                  .shape = {pages, 2, page_size},
                                  .strides = {2 * page_size, 1, 2}};
  args.value_scale_rows = 1;
  args.softcap = 5; /* else codes under many queries are unpacked */
  for (int queries = 1402; queries > 0; queries -= 700) {
    args.query = tensor(1, queries, 8, 128);
    args.output = tensor(4, queries, 8, 128);
    run_forward(&args);
    ASSERT_LAUNCHES(queries > 2 ? "chunk_fp8" : "decode_fp8");
  }
  assert_int_equal(decode_fp8_params.query, FA3_QUERY_BF16);
  assert_int_equal(decode_fp8_params.decode.output_kind, FA3_OUTPUT_BF16);
  assert_ptr_equal(decode_fp8_params.decode.key.data, place(2));
  assert_int_equal(decode_fp8_params.decode.key.stride_batch, page_size * 2 * 128 / 16);
  assert_int_equal(decode_fp8_params.decode.query.stride_row, 8 * 128 * 2 / 16);
  assert_int_equal(decode_fp8_params.decode.page_size.divisor, page_size);
  assert_null(decode_fp8_params.key_scale.data);
  assert_ptr_equal(decode_fp8_params.value_scale.data, place(7));
  assert_int_equal(decode_fp8_params.value_scale.rows, 1);
  assert_int_equal(decode_fp8_params.value_scale.stride_batch, 2 * page_size);
  assert_int_equal(decode_fp8_params.value_scale.stride_block, 2);
  args.query.dtype = FA3_FLOAT8_E4M3;
  run_forward(&args);
  ASSERT_LAUNCHES("decode_fp8");
  assert_int_equal(decode_fp8_params.query, FA3_QUERY_E4M3);
  args = make_forward(2, 2, 128);
  args.query.dtype = args.key.dtype = args.value.dtype = FA3_FLOAT8_E4M3;
  run_forward(&args);
  ASSERT_LAUNCHES("decode_fp8");
  assert_int_equal(decode_fp8_params.query, FA3_QUERY_E4M3);
  assert_int_equal(decode_fp8_params.decode.query.stride_row, 8 * 128 / 16);
}

/* A packed batch beside a cache: sequences of one token, or a few, are the decode kernel's,
 * whatever their number, and prompts the forward kernel's. Prompts alone have packed keys. */
static void test_mixed_batch(void **state) {
  (void)state;
  fa3_forward_args args = make_forward(1, 2, 128);
  args.query = fa3_packed(place(1), FA3_BFLOAT16, 600, 8, 128);
  args.output = fa3_packed(place(4), FA3_BFLOAT16, 600, 8, 128);
  args.cu_seqlens_q = fa3_vector(place(5), FA3_INT32, 3);
  args.max_seqlen_q = 512;
  args.key = tensor(2, 5000, 2, 128);
  args.value = tensor(3, 5000, 2, 128);
  run_forward(&args);
  ASSERT_LAUNCHES("decode", "forward");
  assert_int_equal(decode_params.most_queries, 4);
  assert_int_equal(forward_params.few_queries, 4);
  assert_int_equal(decode_params.row_tiles.divisor, 1);
  assert_int_equal(decode_params.splits.divisor, decode_params.cluster);
  assert_int_equal(launches[0].grid[0], 2 * 2 * decode_params.splits.divisor);
  args.max_seqlen_q = 4;
  run_forward(&args);
  ASSERT_LAUNCHES("decode");
  assert_int_equal(decode_params.most_queries, INT32_MAX);

  args.max_seqlen_q = 512;
  args.key = fa3_packed(place(2), FA3_BFLOAT16, 600, 2, 128);
  args.value = fa3_packed(place(3), FA3_BFLOAT16, 600, 2, 128);
  args.cu_seqlens_k = args.cu_seqlens_q;
  args.max_seqlen_k = 5000;
  run_forward(&args);
  ASSERT_LAUNCHES("forward");
  assert_int_equal(forward_params.few_queries, 0);
}

static void test_backward(void **state) {
  (void)state;
  fa3_backward_args args = make_backward(3000, 64);
  run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare", "backward", "backward_finish");
  assert_int_equal(backward_params.finished_later, 1);
  assert_int_equal(launches[2].grid[0], 8 * 24 * FA3_BACKWARD_FINISH_SLICES(64, 128, false));
  assert_int_equal(launches[2].grid[1], 2);
  assert_int_equal(launches[2].grid[2], 1);
  assert_int_equal(launches[2].block[0], FA3_BACKWARD_FINISH_THREADS);
  assert_int_equal(launches[2].shared_bytes, 0);
  assert_int_equal(launches[2].dependent, 1);
  assert_int_equal(launches[0].grid[0], 24); /* blocks of 128 queries */
  assert_int_equal(launches[0].grid[1], 8);
  assert_int_equal(launches[0].grid[2], 2);
  assert_int_equal(launches[0].block[0], FA3_BACKWARD_PREPARE_THREADS);
  assert_int_equal(launches[0].dependent, 1);
  assert_int_equal(launches[1].grid[0], MULTIPROCESSORS);
  assert_int_equal(launches[1].block[0], FA3_BACKWARD_THREADS);
  assert_int_equal(launches[1].shared_bytes, FA3_BACKWARD_SHARED_BYTES(64, 64, 128, 128));
  assert_int_equal(launches[1].dependent, 1);
  assert_ptr_equal(backward_params.grad_key.data, place(8));

  /* Under a mask dQ is stored by the tiles. */
  args = make_backward(3000, 64);
  args.flags = FA3_CAUSAL;
  run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare", "backward");
  assert_int_equal(backward_params.finished_later, 0);
  args = make_backward(3000, 256); /* pairs of blocks */
  run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare_long", "backward", "backward_finish");
  assert_int_equal(launches[2].grid[0],
                   8 * 47 * FA3_BACKWARD_FINISH_SLICES(256, 64, false)); /* blocks of 64 queries */
  assert_int_equal(launches[1].grid[0], MULTIPROCESSORS);
  assert_int_equal(launches[1].block[0], FA3_BACKWARD_WIDE_THREADS);
  args = make_backward(100, 256);
  run_backward(&args);
  assert_int_equal(launches[1].grid[0], 2 * 2 * 8);
  /* Few queries, whose blocks of dQ have many sums. */
  args = make_backward(3000, 64);
  args.query = args.output = args.grad_output = args.grad_query = tensor(1, 60, 8, 64);
  args.lse = fa3_lse(place(5), 2, 8, 60);
  run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare", "backward", "backward_finish_narrow");
  assert_true(1 << backward_params.tiles.sums_log2 >= 8);
  assert_int_equal(launches[2].grid[0], 8 * FA3_BACKWARD_FINISH_SLICES(64, 64, true));
  assert_int_equal(launches[2].grid[1], 2);

  /* Few keys for many queries: eight parts of a tile, whose dK and dV meet in memory. */
  args = make_backward(4096, 64);
  args.key.shape[1] = args.value.shape[1] = args.grad_key.shape[1] = args.grad_value.shape[1] = 77;
  const size_t size = run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare", "backward");
  assert_int_equal(backward_params.tiles.row_parts, 8);
  assert_int_equal(launches[1].grid[0], 2 * 8 * 8);
  assert_ptr_equal(backward_params.grad_key.data, place(8));
  assert_in_workspace(backward_params.parts, size);
  assert_in_workspace(backward_params.arrivals, size);

  /* Pairs of blocks leave them to a kernel of its own. */
  args = make_backward(4096, 256);
  args.key.shape[1] = args.value.shape[1] = args.grad_key.shape[1] = args.grad_value.shape[1] = 77;
  const size_t size_of_pairs = run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare_long", "backward", "backward_sum");
  assert_in_workspace(backward_params.grad_key.data, size_of_pairs);
  assert_in_workspace(backward_params.grad_value.data, size_of_pairs);
  assert_int_equal(backward_params.grad_key.is_float, 1);
  assert_int_equal(launches[2].grid[0], (77 * 2 * 256 / 8 + 255) / 256);
  assert_int_equal(launches[2].grid[1], 8);
  assert_int_equal(launches[2].grid[2], 2);
  assert_int_equal(launches[2].dependent, 1);

  args = make_backward(100, 256);
  args.sink = args.grad_sink = (fa3_tensor){
      .data = place(10), .dtype = FA3_FLOAT32, .rank = 1, .shape = {8}, .strides = {1}};
  run_backward(&args);
  ASSERT_LAUNCHES("backward_prepare_long", "backward", "backward_sink");
}

/* Grids keep off reserved multiprocessors, and something always runs. */
static void test_reserved_multiprocessors(void **state) {
  (void)state;
  static const struct {
    int32_t reserved;
    unsigned blocks, pairs;
  } cases[] = {{0, 132, 132}, {1, 131, 130}, {20, 112, 112}, {131, 1, 2}, {INT32_MAX, 1, 2}};
  size_t sizes[3];
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    fa3_forward_args forward = make_forward(10000, 8, 128);
    fa3_backward_args backward = make_backward(10000, 128), wide = make_backward(10000, 192);
    forward.reserved_multiprocessors = backward.reserved_multiprocessors =
        wide.reserved_multiprocessors = cases[c].reserved;
    forward.flags = backward.flags = FA3_CAUSAL;
    size_t size[3] = {run_forward(&forward)};
    assert_int_equal(find("forward")->grid[0], cases[c].blocks);
    size[1] = run_backward(&backward);
    assert_int_equal(find("backward")->grid[0], cases[c].blocks);
    /* What waits for others' sums does not wait there. */
    backward.flags = 0;
    run_backward(&backward);
    assert_int_equal(find("backward_finish")->dependent, cases[c].reserved == 0);
    backward.flags = FA3_CAUSAL;
    size[2] = run_backward(&wide);
    assert_int_equal(find("backward")->grid[0], cases[c].pairs);
    if (c == 0) memcpy(sizes, size, sizeof sizes);
    assert_memory_equal(size, sizes, sizeof sizes);
  }
}

static fa3_quantize_args make_quantize(int64_t seqlen, int64_t head_dim, int64_t rows) {
  const int64_t blocks = rows ? (seqlen + rows - 1) / rows : 1;
  return (fa3_quantize_args){.struct_size = sizeof(fa3_quantize_args),
                             .device = gpu,
                             .stream = stream,
                             .input = tensor(1, seqlen, 8, head_dim),
                             .codes = fa3_dense(place(2), FA3_FLOAT8_E4M3, 2, seqlen, 8, head_dim),
                             .codes_scale = {place(3),
                                             FA3_FLOAT32,
                                             rows ? 3 : 2,
                                             {2, 8, rows ? blocks : 0},
                                             {8 * blocks, blocks, rows ? 1 : 0},
                                             {0}},
                             .codes_scale_rows = rows};
}

static void run_quantize(const fa3_quantize_args *args) {
  count = 0;
  if (fa3_quantize(args)) fail_msg("%s", fa3_last_error());
}

/* One pass where a block holds all rows of a scale, with as many threads as that takes; else the
 * scales first. With a mean each head of a sequence has a cluster. */
static void test_quantize(void **state) {
  (void)state;
  fa3_quantize_args args = make_quantize(10000, 128, 128);
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize");
  assert_int_equal(launches[0].grid[0], MULTIPROCESSORS);
  assert_int_equal(launches[0].block[0], FA3_QUANTIZE_THREADS);
  assert_int_equal(launches[0].shared_bytes,
                   1024 * (FA3_QUANTIZE_ELEMENTS * 2 + FA3_QUANTIZE_PLACE_BYTES));
  assert_int_equal(launches[0].dependent, 1);
  assert_int_equal(launches[0].cluster, 0);
  assert_int_equal(quantize_params.from, FA3_QUANTIZE_OF_TILE);
  assert_int_equal(quantize_params.tile_rows, 256);
  assert_int_equal(quantize_params.tiles, 40);
  assert_int_equal(quantize_params.in_turn, 1);
  assert_ptr_equal(quantize_params.scale.data, place(3));

  /* Several scales of a tile; more threads; rows that can't be read 16 bytes at a time. */
  args = make_quantize(10000, 128, 50);
  args.input.strides[1] += 1;
  args.input.strides[0] += 10000;
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_any");
  assert_int_equal(launches[0].block[0], FA3_QUANTIZE_ANY_THREADS);
  assert_int_equal(quantize_params.tile_rows, 100);
  args = make_quantize(10000, 256, 128);
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize");
  assert_int_equal(launches[0].grid[0], MULTIPROCESSORS);
  assert_int_equal(launches[0].block[0], FA3_QUANTIZE_THREADS);
  args = make_quantize(100, 64, 0);
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize");
  assert_int_equal(launches[0].grid[0], 2 * 8);
  assert_int_equal(quantize_params.tile_rows, 100);

  args = make_quantize(10000, 128, 1000);
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_clear", "quantize", "quantize");
  assert_int_equal(launches[0].grid[0], 1); /* 2 * 8 * 10 scales */
  assert_int_equal(launches[1].grid[0], launches[2].grid[0]);
  assert_int_equal(launches[1].dependent && launches[2].dependent, 1);
  assert_int_equal(quantize_params.from, FA3_QUANTIZE_USE);
  assert_int_equal(quantize_params.span_tiles, 4);
  assert_int_equal(quantize_params.tiles, 40);
  args = make_quantize(10, 128, 0);
  args.codes_scale = fa3_vector(place(3), FA3_FLOAT32, 1);
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_clear", "quantize", "quantize");

  args = make_quantize(10000, 128, 128);
  args.flags = FA3_SUBTRACT_MEAN;
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize");
  assert_int_equal(launches[0].cluster, 8);
  assert_int_equal(launches[0].grid[0], 2 * 8 * 8);
  args = make_quantize(0, 128, 128);
  run_quantize(&args);
  assert_int_equal(count, 0);
}

/* Rows that tensor cores rotate have a kernel of their own; scales that several tiles share are
 * cleared by the other. */
static void test_quantize_rotated(void **state) {
  (void)state;
  enum { ROWS = 66 * 128 }; /* heads four by four leave no block without its share */
  fa3_quantize_args args = make_quantize(ROWS, 128, 128);
  args.flags = FA3_ROTATE;
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_rotated");
  args.rotary_cos = args.rotary_sin = (fa3_tensor){
      .data = place(4), .dtype = FA3_BFLOAT16, .rank = 2, .shape = {ROWS, 64}, .strides = {64, 1}};
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_turned_rotated");
  assert_int_equal(launches[0].block[0], 512);
  assert_int_equal(launches[0].shared_bytes,
                   512 * (FA3_QUANTIZE_ELEMENTS * (2 + 2) + FA3_QUANTIZE_PLACE_BYTES));
  assert_int_equal(quantize_params.in_turn, 4);
  assert_int_equal(quantize_params.pairs, 64);
  assert_int_equal(quantize_params.float_tables, 0);
  fa3_quantize_args longer = make_quantize(ROWS, 128, 1000);
  longer.flags = FA3_ROTATE;
  longer.rotary_cos = longer.rotary_sin = args.rotary_cos;
  run_quantize(&longer);
  ASSERT_LAUNCHES("quantize_clear", "quantize_turned_rotated", "quantize_turned_rotated");
  assert_int_equal(quantize_params.from, FA3_QUANTIZE_USE);
  args.rotary_cos.dtype = args.rotary_sin.dtype = FA3_FLOAT32;
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_turned_rotated_by_floats");
  assert_int_equal(quantize_params.float_tables, 1);
  args.rotary_cos.data = (char *)args.rotary_cos.data + 4;
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize_any");
  args = make_quantize(10000, 96, 128);
  args.flags = FA3_ROTATE;
  run_quantize(&args);
  ASSERT_LAUNCHES("quantize");
}

static void test_staging(void **state) {
  (void)state;
  /* A key that starts anywhere, an output with an odd stride, a sink of 16 bits, and a negative
   * scale. */
  const size_t bytes = (size_t)2 * 300 * 8 * 64 * 2;
  fa3_forward_args args = make_forward(300, 8, 64);
  args.key.data = (char *)place(2) + 2;
  args.output.strides[1] += 1;
  args.output.strides[0] = 300 * args.output.strides[1];
  args.sink = (fa3_tensor){
      .data = place(6), .dtype = FA3_BFLOAT16, .rank = 1, .shape = {8}, .strides = {1}};
  args.flags = FA3_SCALE;
  args.softmax_scale = -0.5F;
  const size_t size = run_forward(&args);
  ASSERT_LAUNCHES("copy_strided", "copy_strided", "sinks_to_float", "forward", "copy_strided");
  assert_ptr_equal(copies[0].from.data, place(1));
  assert_int_equal(copies[0].flip, 0x8000);
  assert_staged(copies[0].to.data, size, bytes);
  assert_ptr_equal(copies[1].from.data, args.key.data);
  assert_int_equal(copies[1].flip, 0);
  assert_staged(copies[1].to.data, size, bytes);
  assert_true((char *)copies[1].to.data - (char *)copies[0].to.data >= (int64_t)bytes);
  assert_ptr_equal(sink_params.from, place(6));
  assert_ptr_equal(forward_params.sink, sink_params.to);
  assert_staged(sink_params.to, size, 8 * sizeof(float));
  assert_staged(forward_params.output_data, size, bytes);
  assert_ptr_equal(copies[4].from.data, forward_params.output_data);
  assert_ptr_equal(copies[4].to.data, place(4));
  assert_int_equal(copies[4].to.stride_row, args.output.strides[1]);
  assert_true(forward_params.scale.log2 > 0);

  fa3_backward_args backward = make_backward(300, 64);
  backward.grad_output.strides[2] = backward.grad_output.strides[1] = 0; /* expanded: as it is */
  backward.value.data = (char *)place(3) + 4;
  run_backward(&backward);
  ASSERT_LAUNCHES("copy_strided", "backward_prepare", "backward", "backward_finish");
  assert_ptr_equal(copies[0].from.data, backward.value.data);
}

/* What kernels do not do is refused by name, and launches nothing. */
static void test_what_is_refused(void **state) {
  (void)state;
  fa3_forward_args forward = make_forward(1, 2, 64);
  count = 0;
  forward.key.dtype = forward.value.dtype = FA3_FLOAT8_E4M3;
  forward.query.dtype = forward.output.dtype = FA3_FLOAT32;
  assert_int_equal(fa3_forward(&forward), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "query's dtype is FA3_FLOAT32"));
  forward.query.dtype = forward.output.dtype = FA3_BFLOAT16;
  forward.value.data = (char *)forward.value.data + 8;
  assert_int_equal(fa3_forward(&forward), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "value does not start"));
  forward = make_forward(200, 2, 64);
  forward.flags = FA3_SCALE;
  forward.softmax_scale = -3e38f;
  assert_int_equal(fa3_forward(&forward), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "softmax_scale is -3e+38"));
  forward.softmax_scale = 2;
  forward.softcap = 1.2e-38f;
  assert_int_equal(fa3_forward(&forward), FA3_UNSUPPORTED);
  assert_non_null(strstr(fa3_last_error(), "softmax_scale is 2, softcap 1.2e-38"));
  assert_int_equal(count, 0);
}

int main(void) {
  if (fa3_prepare(gpu)) {
    printf("skipped: %s\n", fa3_last_error());
    return TEST_SKIPPED;
  }
  fake_watch(watch);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_forward),
      cmocka_unit_test(test_tile_counters),
      cmocka_unit_test(test_backward_tile_counter),
      cmocka_unit_test(test_decode),
      cmocka_unit_test(test_fp8_cache),
      cmocka_unit_test(test_mixed_batch),
      cmocka_unit_test(test_backward),
      cmocka_unit_test(test_reserved_multiprocessors),
      cmocka_unit_test(test_quantize),
      cmocka_unit_test(test_quantize_rotated),
      cmocka_unit_test(test_staging),
      cmocka_unit_test(test_what_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
