/* fa3_append on a GPU against the CPU engine, and with attention behind it in one call: random
 * dtypes, head dims, caches and forms of rotary embedding. Everything is in page-locked memory,
 * which both engines take; what a call writes begins as the same random bytes for both, and every
 * byte of it is compared. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fa3.h"
#include "gpu.h"
#include "reference.h"
#include "rng.h"
#include "tensor.h"
#include "test.h"

enum { MEMORY = 256 << 20, MOST_BATCH = 4, MOST_NEW = 6, ROOM = 40, POSITIONS = 60, OUTPUTS = 5 };

static char *memory;
static size_t taken;

static void *take(size_t bytes) {
  char *found = memory + taken;
  taken += (bytes + 63) / 64 * 64;
  assert_true(taken <= MEMORY);
  return found;
}

/* Contiguous, of normal numbers. */
static fa3_tensor make(struct rng *rng, fa3_dtype dtype, int rank, const int64_t *shape) {
  fa3_tensor tensor = {.dtype = dtype, .rank = rank};
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; d--) {
    tensor.shape[d] = shape[d];
    tensor.strides[d] = stride;
    stride *= shape[d];
  }
  tensor.data = take((size_t)stride * fa3_dtype_size(dtype));
  for (int64_t i = 0; i < stride && dtype != FA3_INT32; i++)
    tensor_store(&tensor, i, rng_normal(rng));
  return tensor;
}
#define MAKE(rng, dtype, ...)                                                \
  make(rng, dtype, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t), \
       (const int64_t[]){__VA_ARGS__})

/* Of a batch, or of its rows one after the other. */
static fa3_tensor make_rows(struct rng *rng, fa3_dtype dtype, bool packed, int64_t batch,
                            int64_t rows, int64_t heads, int64_t dim) {
  return packed ? MAKE(rng, dtype, batch * rows, heads, dim)
                : MAKE(rng, dtype, batch, rows, heads, dim);
}

static fa3_tensor make_scales(struct rng *rng, int64_t entries, int64_t heads, int64_t blocks) {
  fa3_tensor scale = blocks ? MAKE(rng, FA3_FLOAT32, entries, heads, blocks)
                            : MAKE(rng, FA3_FLOAT32, entries, heads);
  for (int64_t i = 0; i < tensor_reach(&scale); i++)
    ((float *)scale.data)[i] = (float)(0.01 + 0.01 * rng_uniform(rng));
  return scale;
}

static void add_rotary(struct rng *rng, fa3_append_args *args, int64_t batch, int64_t rows,
                       int64_t heads_q, int64_t head_dim) {
  const fa3_dtype dtype = args->new_key.dtype;
  const bool packed = args->new_key.rank == 3;
  const int64_t pairs = rng_chance(rng, 0.5) ? head_dim / 2 : rng_between(rng, 1, head_dim / 2);
  args->flags = rng_chance(rng, 0.5) ? FA3_ROTARY_INTERLEAVED : 0;
  args->rotary_cos = MAKE(rng, rng_chance(rng, 0.5) ? FA3_FLOAT32 : dtype, POSITIONS, pairs);
  args->rotary_sin = MAKE(rng, args->rotary_cos.dtype, POSITIONS, pairs);
  if (rng_chance(rng, 0.3)) {
    args->positions =
        packed ? MAKE(rng, FA3_INT32, batch * rows) : MAKE(rng, FA3_INT32, batch, rows);
    for (int64_t i = 0; i < batch * rows; i++)
      ((int32_t *)args->positions.data)[i] = (int32_t)rng_between(rng, 0, POSITIONS - 1);
  }
  if (rng_chance(rng, 0.6)) {
    args->query = make_rows(rng, dtype, packed, batch, rows, heads_q, head_dim);
    args->rotated_query = rng_chance(rng, 0.5)
                              ? args->query
                              : make_rows(rng, dtype, packed, batch, rows, heads_q, head_dim);
  }
}

static fa3_tensor vector(struct rng *rng, int64_t count) {
  return MAKE(rng, FA3_INT32, count);
}

/* Packed sequences of up to `rows` new rows each. */
static void add_starts(struct rng *rng, fa3_append_args *args, int64_t batch, int64_t rows) {
  args->cu_seqlens_q = vector(rng, batch + 1);
  args->max_seqlen_q = rows;
  int32_t *const starts = args->cu_seqlens_q.data;
  starts[0] = 0;
  for (int64_t b = 0; b < batch; b++)
    starts[b + 1] = starts[b] + (int32_t)rng_between(rng, 0, rows);
}

static fa3_append_args make_call(struct rng *rng) {
  const fa3_dtype dtype =
      (fa3_dtype)RNG_PICK(rng, FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16, FA3_FLOAT8_E4M3);
  const fa3_dtype cache = rng_chance(rng, 0.4) ? FA3_FLOAT8_E4M3 : dtype;
  const int64_t batch = rng_between(rng, 1, MOST_BATCH), rows = rng_between(rng, 1, MOST_NEW);
  const int64_t heads_k = rng_between(rng, 1, 3), group = rng_between(rng, 1, 3);
  const bool codes = cache == FA3_FLOAT8_E4M3;
  const int64_t head_dim = codes ? RNG_PICK(rng, 16, 48, 64, 128, 256)
                                 : RNG_PICK(rng, 8, 24, 40, 64, 128, 256, 320, 600);
  const int64_t value_head_dim =
      codes ? RNG_PICK(rng, 16, 64, 240) : RNG_PICK(rng, 8, 64, 128, 256, 264);
  const bool packed = rng_chance(rng, 0.3), paged = rng_chance(rng, 0.5);
  fa3_append_args args = {
      .struct_size = sizeof args,
      .device = {FA3_CUDA, 0},
      .new_key = make_rows(rng, dtype, packed, batch, rows, heads_k, head_dim),
      .new_value = make_rows(rng, dtype, packed, batch, rows, heads_k, value_head_dim),
      .seqused_k = vector(rng, batch)};
  int32_t *const used = args.seqused_k.data;
  for (int64_t b = 0; b < batch; b++) used[b] = (int32_t)rng_between(rng, 0, ROOM - rows);
  if (packed) add_starts(rng, &args, batch, rows);
  int64_t entries = batch, extent = ROOM;
  if (paged) {
    extent = RNG_PICK(rng, 1, 3, 16, 64);
    const int64_t columns = (ROOM + extent - 1) / extent;
    entries = batch * columns;
    args.page_table = MAKE(rng, FA3_INT32, batch, columns);
    for (int64_t i = 0; i < entries; i++)
      ((int32_t *)args.page_table.data)[i] = (int32_t)(entries - 1 - i);
  } else if (rng_chance(rng, 0.3)) {
    args.cache_batch_index = vector(rng, batch);
    for (int64_t b = 0; b < batch; b++)
      ((int32_t *)args.cache_batch_index.data)[b] = (int32_t)(batch - b);
    entries = batch + 1;
  }
  if (rng_chance(rng, 0.3)) {
    args.leftpad_k = vector(rng, batch);
    for (int64_t b = 0; b < batch; b++)
      ((int32_t *)args.leftpad_k.data)[b] = (int32_t)rng_between(rng, 0, used[b]);
  }
  args.key = MAKE(rng, cache, entries, extent, heads_k, head_dim);
  args.value = MAKE(rng, cache, entries, extent, heads_k, value_head_dim);
  if (dtype != FA3_FLOAT8_E4M3 && rng_chance(rng, 0.7))
    add_rotary(rng, &args, batch, rows, heads_k * group, head_dim);
  if (cache != dtype && rng_chance(rng, 0.8)) {
    const int64_t block = RNG_PICK(rng, 0, 1, 1, 4);
    const int64_t blocks = block ? (extent + block - 1) / block : 0;
    args.key_scale = make_scales(rng, entries, heads_k, blocks);
    args.value_scale = make_scales(rng, entries, heads_k, blocks);
    args.key_scale_rows = args.value_scale_rows = block;
  }
  return args;
}

static void list_outputs(fa3_append_args *args, fa3_tensor *outputs[OUTPUTS]) {
  outputs[0] = &args->key;
  outputs[1] = &args->value;
  outputs[2] = &args->rotated_query;
  outputs[3] = &args->key_scale;
  outputs[4] = &args->value_scale;
}

/* What is turned is a sum of two products, which may be fused: it may differ in the last bits
 * before it is rounded, and lie on the other side of the middle of two numbers. */
static void compare(int trial, int which, const fa3_tensor *got, const fa3_tensor *expected) {
  const fa3_dtype dtype = got->dtype;
  const double unit = dtype == FA3_FLOAT32    ? 0x1p-20
                      : dtype == FA3_FLOAT16  ? 0x1p-10
                      : dtype == FA3_BFLOAT16 ? 0x1p-7
                                              : 0x1p-2;
  for (int64_t i = 0; i < tensor_reach(got); i++) {
    const double x = reference_load(got, i), y = reference_load(expected, i);
    if (isnan(x) && isnan(y)) continue;
    const double least = dtype == FA3_FLOAT8_E4M3 ? 0x1p-8 : 0x1p-19;
    if (!(fabs(x - y) <= unit * fabs(y) + least))
      fail_msg("trial %d, output %d: element %lld is %g: expected %g", trial, which, (long long)i,
               x, y);
  }
}

static void run_trial(int trial) {
  struct rng rng = rng_for((uint64_t)trial);
  taken = 0;
  fa3_append_args args = make_call(&rng), there = args;
  const bool in_place = args.query.data && args.query.data == args.rotated_query.data;
  fa3_tensor *outputs[OUTPUTS], *copies[OUTPUTS];
  list_outputs(&args, outputs);
  list_outputs(&there, copies);
  for (int i = 0; i < OUTPUTS; i++) {
    const size_t bytes = (size_t)tensor_reach(outputs[i]) * fa3_dtype_size(outputs[i]->dtype);
    if (!outputs[i]->dtype) continue;
    copies[i]->data = take(bytes);
    memcpy(copies[i]->data, outputs[i]->data, bytes);
  }
  if (in_place) there.query.data = there.rotated_query.data;
  if (fa3_append(&there)) fail_msg("trial %d: %s", trial, fa3_last_error());
  GPU(cuCtxSynchronize, );
  args.device = (fa3_device){FA3_CPU, 0};
  if (fa3_append(&args)) fail_msg("trial %d on the CPU: %s", trial, fa3_last_error());
  for (int i = 0; i < OUTPUTS; i++) {
    if (!outputs[i]->dtype) continue;
    const size_t bytes = (size_t)tensor_reach(outputs[i]) * fa3_dtype_size(outputs[i]->dtype);
    const bool exact = !args.rotary_cos.data || i == 1 || i == 4;
    if (!exact)
      compare(trial, i, copies[i], outputs[i]);
    else if (memcmp(copies[i]->data, outputs[i]->data, bytes) != 0)
      fail_msg("trial %d: output %d differs", trial, i);
  }
}

/* Attention behind that append, of the queries that it turns or of others. */
static fa3_forward_args attention_of(struct rng *rng, const fa3_append_args *append) {
  const int32_t *const starts = append->cu_seqlens_q.data;
  const bool packed = starts;
  const int64_t batch = append->seqused_k.shape[0], rows = append->new_key.shape[packed ? 0 : 1];
  const int64_t last = append->new_key.rank - 1, dim = append->new_key.shape[last];
  const int64_t each = packed ? rows / batch : rows, heads = 2 * append->new_key.shape[last - 1];
  fa3_forward_args args = {.struct_size = sizeof args,
                           .device = append->device,
                           .key = append->key,
                           .value = append->value,
                           .seqused_k = vector(rng, batch),
                           .cu_seqlens_q = append->cu_seqlens_q,
                           .leftpad_k = append->leftpad_k,
                           .cache_batch_index = append->cache_batch_index,
                           .page_table = append->page_table,
                           .key_scale = append->key_scale,
                           .value_scale = append->value_scale,
                           .key_scale_rows = append->key_scale_rows,
                           .value_scale_rows = append->value_scale_rows,
                           .max_seqlen_q = append->max_seqlen_q,
                           .flags = FA3_CAUSAL,
                           .workspace_size = 16 << 20};
  args.query = append->rotated_query.dtype
                   ? append->rotated_query
                   : make_rows(rng, append->new_key.dtype, packed, batch, each, heads, dim);
  const int64_t heads_q = args.query.shape[last - 1];
  args.output = make_rows(rng, append->new_key.dtype, packed, batch, each, heads_q,
                          append->new_value.shape[last]);
  args.workspace = take(args.workspace_size);
  const int32_t *before = append->seqused_k.data;
  for (int64_t b = 0; b < batch; b++)
    ((int32_t *)args.seqused_k.data)[b] =
        before[b] + (packed ? starts[b + 1] - starts[b] : (int32_t)rows);
  return args;
}

/* Both calls in one give the bits of one after the other. What is behind a sequence's keys before
 * they are there is something else, and so are queries that are not turned yet. */
static void run_pair(int trial) {
  struct rng rng = rng_for(1000 + (uint64_t)trial);
  fa3_append_args append;
  do {
    taken = 0;
    append = make_call(&rng);
  } while (append.new_key.dtype == FA3_FLOAT32 || append.new_key.dtype == FA3_FLOAT8_E4M3 ||
           append.new_key.shape[append.new_key.rank - 1] > 256 ||
           append.new_value.shape[append.new_value.rank - 1] > 256);
  const fa3_forward_args forward = attention_of(&rng, &append);
  fa3_tensor *outputs[OUTPUTS];
  void *before[OUTPUTS] = {0};
  list_outputs(&append, outputs);
  for (int i = 0; i < OUTPUTS; i++) {
    const size_t bytes = (size_t)tensor_reach(outputs[i]) * fa3_dtype_size(outputs[i]->dtype);
    if (outputs[i]->dtype) before[i] = memcpy(take(bytes), outputs[i]->data, bytes);
  }
  const size_t bytes = (size_t)tensor_reach(&forward.output) * sizeof(uint16_t);
  void *const expected = take(bytes);
  for (int one = 0; one < 2; one++) {
    for (int i = 0; i < OUTPUTS; i++)
      if (before[i])
        memcpy(outputs[i]->data, before[i],
               (size_t)tensor_reach(outputs[i]) * fa3_dtype_size(outputs[i]->dtype));
    memset(forward.output.data, 0xff, bytes);
    fa3_status status;
    if (one) {
      status = fa3_append_forward(&append, &forward);
    } else {
      status = fa3_append(&append);
      if (!status) GPU(cuCtxSynchronize, );
      if (!status) status = fa3_forward(&forward);
    }
    if (status) fail_msg("trial %d: %s", trial, fa3_last_error());
    GPU(cuCtxSynchronize, );
    if (!one) memcpy(expected, forward.output.data, bytes);
  }
  if (memcmp(expected, forward.output.data, bytes) != 0)
    fail_msg("trial %d: both in one differ from one after the other", trial);
}

/* Each sequence's own pages, but for the first ones, which may be full of older rows that all have:
 * those are the last sequence's. */
static fa3_tensor make_page_table(struct rng *rng, int64_t batch, int64_t columns,
                                  int64_t page_size, const int32_t *used) {
  const fa3_tensor table = MAKE(rng, FA3_INT32, batch, columns);
  int64_t shared = columns;
  for (int64_t b = 0; b < batch; b++)
    shared = used[b] / page_size < shared ? used[b] / page_size : shared;
  if (rng_chance(rng, 0.5)) shared = 0;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < columns; i++)
      ((int32_t *)table.data)[b * columns + i] =
          (int32_t)((i < shared ? 1 : batch - b) * columns - 1 - i);
  return table;
}

/* What one kernel does, as run_joined says: few queries, 16 bits, and new rows that their own
 * sequence alone attends to. Lengths lie at edges of pages, and where the cache ends. `is_long`: a
 * cache whose keys several clusters may share. */
static fa3_append_args make_joined_append(struct rng *rng, int64_t group, bool is_long) {
  const fa3_dtype dtype = (fa3_dtype)RNG_PICK(rng, FA3_FLOAT16, FA3_BFLOAT16);
  const int64_t rows = rng_between(rng, 1, 8 / group);
  const int64_t heads_k = is_long ? 8 : rng_between(rng, 1, 3);
  const int64_t head_dim = RNG_PICK(rng, 8, 40, 64, 96, 128, 128);
  const int64_t value_head_dim = RNG_PICK(rng, 8, 64, 128, 128);
  const bool packed = rng_chance(rng, 0.3), paged = rng_chance(rng, 0.5);
  const int64_t batch = is_long ? 1 : rng_between(rng, 1, 3);
  const int64_t room = is_long ? 6400 : RNG_PICK(rng, 20, 130, 1000, 3000);
  fa3_append_args args = {
      .struct_size = sizeof args,
      .device = {FA3_CUDA, 0},
      .new_key = make_rows(rng, dtype, packed, batch, rows, heads_k, head_dim),
      .new_value = make_rows(rng, dtype, packed, batch, rows, heads_k, value_head_dim),
      .seqused_k = vector(rng, batch)};
  const int64_t extent = paged ? RNG_PICK(rng, 1, 3, 16, 64) : room;
  const int64_t columns = (room + extent - 1) / extent;
  int32_t *const used = args.seqused_k.data;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t edge = rng_between(rng, 0, room / 16) * 16 + rng_between(rng, -1, 1);
    const int64_t any = rng_between(rng, 0, room), last = room - rng_between(rng, 0, rows);
    const int64_t before = RNG_PICK(rng, edge, any, last);
    used[b] = (int32_t)(before < 0 ? 0 : before > room ? room : before);
  }
  if (packed) add_starts(rng, &args, batch, rows);
  if (rng_chance(rng, 0.2)) {
    args.seqused_q = vector(rng, batch);
    for (int64_t b = 0; b < batch; b++) {
      const int32_t *const starts = args.cu_seqlens_q.data;
      const int64_t most = packed ? starts[b + 1] - starts[b] : rows;
      ((int32_t *)args.seqused_q.data)[b] = (int32_t)rng_between(rng, 0, most);
    }
  }
  if (rng_chance(rng, 0.3)) {
    args.leftpad_k = vector(rng, batch);
    for (int64_t b = 0; b < batch; b++)
      ((int32_t *)args.leftpad_k.data)[b] = (int32_t)rng_between(rng, 0, used[b]);
  }
  if (paged) {
    args.page_table = make_page_table(rng, batch, columns, extent, used);
  } else if (rng_chance(rng, 0.3)) {
    args.cache_batch_index = vector(rng, batch);
    for (int64_t b = 0; b < batch; b++)
      ((int32_t *)args.cache_batch_index.data)[b] = (int32_t)(batch - b);
  }
  if (batch > 1 && (paged || args.cache_batch_index.data)) args.flags = FA3_SEPARATE_SEQUENCES;
  const int64_t entries = paged ? batch * columns : batch + (args.cache_batch_index.data ? 1 : 0);
  args.key = MAKE(rng, dtype, entries, extent, heads_k, head_dim);
  args.value = MAKE(rng, dtype, entries, extent, heads_k, value_head_dim);
  if (rng_chance(rng, 0.2)) return args;
  const int64_t pairs = rng_chance(rng, 0.5) ? head_dim / 2 : 2 * rng_between(rng, 1, head_dim / 4);
  /* Positions that the tables do not have give NaN. */
  const int64_t positions = rng_chance(rng, 0.9) ? room + 16 : room / 2 + 1;
  if (rng_chance(rng, 0.5)) args.flags |= FA3_ROTARY_INTERLEAVED;
  args.rotary_cos = MAKE(rng, dtype, positions, pairs);
  args.rotary_sin = MAKE(rng, dtype, positions, pairs);
  if (rng_chance(rng, 0.3)) {
    args.positions =
        packed ? MAKE(rng, FA3_INT32, batch * rows) : MAKE(rng, FA3_INT32, batch, rows);
    for (int64_t i = 0; i < batch * rows; i++)
      ((int32_t *)args.positions.data)[i] = (int32_t)rng_between(rng, 0, positions - 1);
  }
  if (rng_chance(rng, 0.8)) {
    args.query = make_rows(rng, dtype, packed, batch, rows, heads_k * group, head_dim);
    args.rotated_query = rng_chance(rng, 0.5) ? args.query
                                              : make_rows(rng, dtype, packed, batch, rows,
                                                          heads_k * group, head_dim);
  }
  return args;
}

static fa3_forward_args attention_joined(struct rng *rng, const fa3_append_args *append,
                                         int64_t group) {
  const int64_t last = append->new_key.rank - 1, heads = group * append->new_key.shape[last - 1];
  fa3_tensor query = append->new_key;
  query.shape[last - 1] = heads;
  query = append->rotated_query.dtype ? append->rotated_query
                                      : make(rng, query.dtype, query.rank, query.shape);
  fa3_forward_args args = attention_of(rng, append);
  args.query = query;
  args.seqused_q = append->seqused_q;
  query.shape[last] = append->new_value.shape[last];
  args.output = make(rng, query.dtype, query.rank, query.shape);
  const int64_t rows = query.shape[last - 2];
  args.lse = last == 2 ? MAKE(rng, FA3_FLOAT32, heads, rows)
                       : MAKE(rng, FA3_FLOAT32, query.shape[0], heads, rows);
  const int64_t room = append->page_table.dtype ? append->page_table.shape[1] * append->key.shape[1]
                                                : append->key.shape[1];
  int32_t *const used = args.seqused_k.data;
  for (int64_t b = 0; b < args.seqused_k.shape[0]; b++)
    used[b] = used[b] > room ? (int32_t)room : used[b];
  if (rng_chance(rng, 0.3)) args.flags = 0;
  if (rng_chance(rng, 0.2)) {
    args.flags = FA3_WINDOW;
    args.window_left = rng_between(rng, 0, 300);
    args.window_right = rng_between(rng, 0, 3);
  }
  if (rng_chance(rng, 0.2)) args.softcap = 20;
  return args;
}

/* How many kernels a call in one queues. */
static size_t count_kernels(fa3_append_args append, fa3_forward_args forward, gpu_stream stream) {
  gpu_graph graph;
  size_t count = 0;
  append.stream = forward.stream = stream;
  GPU(cuStreamBeginCapture, stream, 0);
  if (fa3_append_forward(&append, &forward)) fail_msg("%s", fa3_last_error());
  GPU(cuStreamEndCapture, stream, &graph);
  GPU(cuGraphGetNodes, graph, NULL, &count);
  GPU(cuGraphDestroy, graph);
  return count;
}

enum { RESULTS = 5 };

/* One kernel gives the bits of an append and attention behind it, in all that either writes.
 * Another puts together what several clusters have of a long cache, and a third appends before them
 * where queries are turned in their place. */
static void run_joined(int trial, gpu_stream stream, bool is_long) {
  struct rng rng = rng_for((is_long ? 3000 : 2000) + (uint64_t)trial);
  taken = 0;
  const int64_t group = rng_between(&rng, 1, 8);
  const fa3_append_args append = make_joined_append(&rng, group, is_long);
  const fa3_forward_args forward = attention_joined(&rng, &append, group);
  const bool in_place = append.query.data && append.query.data == append.rotated_query.data;
  const size_t kernels = count_kernels(append, forward, stream);
  const size_t most = !is_long ? 1 : in_place ? 3 : 2;
  if (kernels > most) fail_msg("trial %d: %zu kernels, not %zu", trial, kernels, most);
  const fa3_tensor *const results[RESULTS] = {&append.key, &append.value, &append.rotated_query,
                                              &forward.output, &forward.lse};
  void *before[RESULTS] = {0}, *expected[RESULTS] = {0};
  size_t bytes[RESULTS];
  for (int i = 0; i < RESULTS; i++) {
    bytes[i] = (size_t)tensor_reach(results[i]) * fa3_dtype_size(results[i]->dtype);
    if (!results[i]->dtype) continue;
    before[i] = memcpy(take(bytes[i]), results[i]->data, bytes[i]);
    expected[i] = take(bytes[i]);
  }
  for (int one = 0; one < 2; one++) {
    for (int i = 0; i < RESULTS; i++)
      if (before[i]) memcpy(results[i]->data, before[i], bytes[i]);
    fa3_status status = one ? fa3_append_forward(&append, &forward) : fa3_append(&append);
    GPU(cuCtxSynchronize, );
    if (!one && !status) status = fa3_forward(&forward);
    if (status) fail_msg("trial %d: %s", trial, fa3_last_error());
    GPU(cuCtxSynchronize, );
    for (int i = 0; i < RESULTS; i++)
      if (before[i] && !one) memcpy(expected[i], results[i]->data, bytes[i]);
  }
  for (int i = 0; i < RESULTS; i++)
    if (before[i] && memcmp(expected[i], results[i]->data, bytes[i]) != 0)
      fail_msg("trial %d: result %d of one kernel differs from that of two", trial, i);
}

static int trials;

static void test_append_and_attend(void **state) {
  (void)state;
  void *pages;
  GPU(cuMemAllocHost, &pages, MEMORY);
  memory = pages;
  const int pairs = gpu_trials(400);
  for (int trial = 0; trial < pairs; trial++) run_pair(trial);
  GPU(cuMemFreeHost, pages);
}

static void test_one_kernel(void **state) {
  (void)state;
  void *pages;
  gpu_stream stream;
  GPU(cuMemAllocHost, &pages, MEMORY);
  GPU(cuStreamCreate, &stream, 1);
  memory = pages;
  const int joined = gpu_trials(400);
  for (int trial = 0; trial < joined; trial++) run_joined(trial, stream, false);
  for (int trial = 0; trial < 1 + joined / 20; trial++) run_joined(trial, stream, true);
  GPU(cuStreamDestroy, stream);
  GPU(cuMemFreeHost, pages);
}

static void test_against_the_cpu(void **state) {
  (void)state;
  void *pages;
  trials = gpu_trials(400);
  GPU(cuMemAllocHost, &pages, MEMORY);
  memory = pages;
  for (int trial = 0; trial < trials; trial++) run_trial(trial);
  GPU(cuMemFreeHost, pages);
}

int main(void) {
  if (!gpu_open()) return TEST_SKIPPED;
  rng_run_seed();
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_the_cpu),
                                     cmocka_unit_test(test_append_and_attend),
                                     cmocka_unit_test(test_one_kernel)};
  const int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (result == 0) printf("passed: %d calls\n", trials);
  return result;
}
