#include "key_block.h"

#include <math.h>
#include <string.h>

#include "element.h"
#include "integer.h"
#include "scratch.h"
#include "threads.h"

enum {
  KEY_WORDS = 128 << 10, /* of a block's keys, values and gradients, in the second cache */
  LARGEST_TILE_K = 384,
  TILE_K_STEP = 96 /* a multiple of every level's strip and of its depth_step in elements */
};

/* Sizes in words. */
struct sizes {
  int64_t head_depth; /* of sums over a head dim */
  int64_t value_depth;
  int64_t head_width; /* of rows with a head dim's columns */
  int64_t value_width;
  int64_t tile_depth; /* of sums over a tile's queries */
};

static struct sizes sizes_of(const struct problem *problem, const struct routines *routines) {
  const int64_t pair = routines->elements_per_word;
  return (struct sizes){
      .head_depth = round_up(problem->head_dim / pair, routines->depth_step),
      .value_depth = round_up(problem->value_head_dim / pair, routines->depth_step),
      .head_width = round_up(problem->head_dim, routines->panel),
      .value_width = round_up(problem->value_head_dim, routines->panel),
      .tile_depth = TILE_Q / pair,
  };
}

/* Of a key: two left operands, a right one and two gradients. */
static int64_t key_words(const struct sizes *sizes, int64_t pair) {
  return sizes->head_depth + sizes->value_depth + sizes->head_width / pair + sizes->head_width +
         sizes->value_width;
}

int64_t key_block_largest(const struct problem *problem, const struct routines *routines) {
  struct sizes sizes = sizes_of(problem, routines);
  int64_t keys =
      round_down(KEY_WORDS / key_words(&sizes, routines->elements_per_word), TILE_K_STEP);
  return larger(smaller(keys, LARGEST_TILE_K), TILE_K_STEP);
}

size_t key_scratch_layout(const struct problem *problem, const struct routines *routines,
                          char *base, struct key_scratch *scratch) {
  const int64_t pair = routines->elements_per_word;
  const struct sizes sizes = sizes_of(problem, routines);
  const int64_t keys = key_block_largest(problem, routines), words = key_words(&sizes, pair);
  /* Room for the largest block, and unlike what that takes it never falls. */
  const int64_t room = smaller(larger(KEY_WORDS, TILE_K_STEP * words), LARGEST_TILE_K * words);
  const struct scratch_array arrays[] = {
      {&scratch->keys, keys * sizes.head_depth},
      {&scratch->values, keys * sizes.value_depth},
      {&scratch->keys_depth, keys / pair * sizes.head_width},
      {&scratch->grad_keys, keys * sizes.head_width},
      {&scratch->grad_values, keys * sizes.value_width + room - keys * words},
      {&scratch->query_columns, TILE_Q * sizes.head_depth},
      {&scratch->query_depth, sizes.tile_depth * sizes.head_width},
      {&scratch->grad_output_columns, TILE_Q * sizes.value_depth},
      {&scratch->grad_output_depth, sizes.tile_depth * sizes.value_width},
      {&scratch->rows, TILE_Q * larger(problem->head_dim, problem->value_head_dim)},
      {&scratch->scores, (int64_t)routines->strip * TILE_Q},
      {&scratch->gradients, (int64_t)routines->strip * TILE_Q},
      {&scratch->grad_scores_q, TILE_Q * LARGEST_TILE_K / pair},
  };
  return lay_out(arrays, sizeof arrays / sizeof *arrays, base);
}

static int64_t whole_depth(const struct routines *routines, int64_t elements) {
  return round_up(divide_up(elements, routines->elements_per_word), routines->depth_step);
}

/* A half-open range of a tile's rows. */
struct row_range {
  int64_t begin;
  int64_t end;
};

/* The rows whose queries see at least one key of [first, last]. */
static struct row_range rows_seeing(const struct key_block *block, const struct query_tile *tile,
                                    int64_t first, int64_t last) {
  const int64_t group = group_size(block->tiles->problem);
  const struct query_range queries =
      mask_seeing(&block->sequence.mask, block->sequence.seqlen_q, first, last);
  return (struct row_range){mask_clamp(queries.begin * group - tile->first_row, tile->rows),
                            mask_clamp(queries.end * group - tile->first_row, tile->rows)};
}

static char *key_row(const struct key_block *block, const struct operand *operand, int64_t key) {
  return element(operand, block->sequence.batch_k, block->sequence.row_k + key, block->head_k);
}

static struct rows key_rows(const struct key_block *block, const struct operand *operand,
                            int64_t width) {
  return (struct rows){.data = key_row(block, operand, block->key),
                       .dtype = operand->dtype,
                       .stride = operand->stride_row * element_size(operand),
                       .count = block->keys,
                       .width = width};
}

static void begin_block(const struct key_block *block, const struct sizes *sizes) {
  const struct problem *problem = block->tiles->problem;
  const struct routines *routines = block->tiles->routines;
  const struct key_scratch *scratch = &block->scratch;
  const int64_t depth = whole_depth(routines, block->keys);
  const struct rows keys = key_rows(block, &problem->key, problem->head_dim);
  const struct rows values = key_rows(block, &problem->value, problem->value_head_dim);
  routines->arrange_queries(&keys, scale_sign(problem), sizes->head_depth, scratch->keys);
  routines->arrange_queries(&values, 1, sizes->value_depth, scratch->values);
  routines->arrange_values(&keys, depth, routines->panel * depth, scratch->keys_depth);
  memset(scratch->grad_keys, 0, (size_t)(block->keys * sizes->head_width) * sizeof(float));
  memset(scratch->grad_values, 0, (size_t)(block->keys * sizes->value_width) * sizeof(float));
}

/* A tile's rows as columns and as depth. */
static void arrange_tile(const struct key_block *block, const struct query_tile *tile,
                         const struct operand *operand, int64_t width, int64_t depth,
                         float *columns, float *rows) {
  const struct query_tiles *tiles = block->tiles;
  const struct routines *routines = tiles->routines;
  const int64_t group = group_size(tiles->problem), bytes = width * element_size(operand);
  int64_t query = tile_query(tiles, tile, 0), member = tile->first_row % group;
  char *copy = (char *)block->scratch.rows;
  for (int64_t row = 0; row < tile->rows; row++) {
    memcpy(copy + row * bytes,
           element(operand, tile->sequence.batch_q, tile->sequence.row_q + query,
                   tile->head_k * group + member),
           (size_t)bytes);
    if (++member < group) continue;
    member = 0;
    query++;
  }
  const struct rows arranged = {
      .data = copy, .dtype = operand->dtype, .stride = bytes, .count = tile->rows, .width = width};
  routines->arrange_keys(&arranged, depth, columns);
  routines->arrange_values(&arranged, whole_depth(routines, tile->rows),
                           routines->panel * TILE_Q / routines->elements_per_word, rows);
}

/* Scores of rows [begin, begin + columns) of the tile: -infinity where a row does not see the
 * key. */
static void mask_strip(const struct key_block *block, const struct query_tile *tile, int64_t key,
                       int64_t keys, int64_t begin, int64_t columns) {
  for (int64_t k = 0; k < keys; k++) {
    float *scores = block->scratch.scores + k * TILE_Q;
    const struct row_range seen = rows_seeing(block, tile, key + k, key + k);
    const int64_t first = mask_clamp(seen.begin - begin, columns);
    const int64_t end = larger(mask_clamp(seen.end - begin, columns), first);
    for (int64_t i = 0; i < first; i++) scores[i] = -INFINITY;
    for (int64_t i = end; i < columns; i++) scores[i] = -INFINITY;
  }
}

/* The block's keys [strip, strip + keys) with a tile of queries. */
static void attend_strip(const struct key_block *block, const struct query_tile *tile,
                         const struct sizes *sizes, int64_t strip, int64_t keys) {
  const struct problem *problem = block->tiles->problem;
  const struct routines *routines = block->tiles->routines;
  const struct key_scratch *scratch = &block->scratch;
  const int64_t panel = routines->panel, pair = routines->elements_per_word;
  const int64_t first = block->key + strip, last = first + keys - 1;

  const struct row_range seen = rows_seeing(block, tile, first, last);
  if (seen.begin >= seen.end) return;
  const int64_t begin = round_down(seen.begin, panel);
  const int64_t columns = round_up(seen.end - begin, panel);
  struct product product = {
      .rows = keys,
      .columns = columns,
      .depth = sizes->head_depth,
      .left = scratch->keys + strip * sizes->head_depth,
      .left_stride = sizes->head_depth,
      .right = scratch->query_columns + begin * sizes->head_depth,
      .right_stride = panel * sizes->head_depth,
      .output = scratch->scores,
      .output_stride = TILE_Q,
  };
  routines->multiply(&product);
  product.depth = product.left_stride = sizes->value_depth;
  product.left = scratch->values + strip * sizes->value_depth;
  product.right = scratch->grad_output_columns + begin * sizes->value_depth;
  product.right_stride = panel * sizes->value_depth;
  product.output = scratch->gradients;
  routines->multiply(&product);

  float scale = scale_size(problem);
  if (problem->softcap > 0) {
    for (int64_t k = 0; k < keys; k++)
      routines->cap(scratch->scores + k * TILE_Q, columns, scale, problem->softcap);
    scale = 1;
  }
  const struct row_range full = {rows_seeing(block, tile, last, last).begin,
                                 rows_seeing(block, tile, first, first).end};
  if (full.begin > begin || full.end < smaller(begin + columns, tile->rows))
    mask_strip(block, tile, first, keys, begin, columns);
  routines->gradient(&(struct gradient_step){
      .rows = keys,
      .columns = columns,
      .scores = scratch->scores,
      .gradients = scratch->gradients,
      .stride = TILE_Q,
      .scale = scale,
      .softcap = problem->softcap,
      .lse = tile->lse + begin,
      .delta = tile->delta + begin,
  });

  const int64_t depth_begin = round_down(seen.begin, pair * routines->depth_step);
  product.depth = whole_depth(routines, seen.end - depth_begin);
  product.left_stride = TILE_Q;
  product.right_stride = panel * sizes->tile_depth;
  product.accumulate = true;
  product.columns = round_up(problem->value_head_dim, routines->vector);
  product.left = scratch->scores + (depth_begin - begin) / pair;
  product.right = scratch->grad_output_depth + depth_begin / pair * panel;
  product.output = scratch->grad_values + strip * sizes->value_width;
  product.output_stride = sizes->value_width;
  routines->multiply(&product);
  product.columns = round_up(problem->head_dim, routines->vector);
  product.left = scratch->gradients + (depth_begin - begin) / pair;
  product.right = scratch->query_depth + depth_begin / pair * panel;
  product.output = scratch->grad_keys + strip * sizes->head_width;
  product.output_stride = sizes->head_width;
  routines->multiply(&product);

  const int64_t stride = block->tile_k / pair;
  routines->transpose(scratch->gradients, keys, columns, TILE_Q,
                      scratch->grad_scores_q + begin * stride + strip / pair, stride);
}

/* grad_query += dS * key, without the keys that none of a strip's rows sees. */
static void add_to_queries(const struct key_block *block, const struct query_tile *tile,
                           const struct sizes *sizes) {
  const struct query_tiles *tiles = block->tiles;
  const struct routines *routines = tiles->routines;
  const int64_t pair = routines->elements_per_word, stride = block->tile_k / pair;
  for (int64_t row = 0; row < tile->rows; row += routines->strip) {
    const int64_t rows = smaller(routines->strip, tile->rows - row);
    const struct key_range visible =
        mask_visible(&block->sequence.mask, tile_query(tiles, tile, row),
                     tile_query(tiles, tile, row + rows - 1));
    const int64_t begin =
        round_down(larger(visible.begin - block->key, 0), pair * routines->depth_step);
    const int64_t end = smaller(visible.end - block->key, block->keys);
    if (begin >= end) continue;
    routines->multiply(&(struct product){
        .rows = rows,
        .columns = round_up(tiles->problem->head_dim, routines->vector),
        .depth = whole_depth(routines, end - begin),
        .left = block->scratch.grad_scores_q + row * stride + begin / pair,
        .left_stride = stride,
        .right = block->scratch.keys_depth + begin / pair * routines->panel,
        .right_stride = routines->panel * whole_depth(routines, block->keys),
        .output = tile->grad_query + row * sizes->head_width,
        .output_stride = sizes->head_width,
        .accumulate = true,
    });
  }
}

static void attend_tile(const struct key_block *block, const struct query_tile *tile,
                        const struct sizes *sizes) {
  const struct problem *problem = block->tiles->problem;
  const struct routines *routines = block->tiles->routines;
  const struct key_scratch *scratch = &block->scratch;
  const struct mask *mask = &block->sequence.mask;
  const int64_t first = tile_query(block->tiles, tile, 0);
  const int64_t last = tile_query(block->tiles, tile, tile->rows - 1);
  const int64_t end = block->key + block->keys;

  arrange_tile(block, tile, &problem->query, problem->head_dim, sizes->head_depth,
               scratch->query_columns, scratch->query_depth);
  arrange_tile(block, tile, &problem->grad_output, problem->value_head_dim, sizes->value_depth,
               scratch->grad_output_columns, scratch->grad_output_depth);
  const struct key_range full = mask_full(mask, first, last);
  if (full.begin > block->key || full.end < end || block->keys < block->tile_k)
    memset(scratch->grad_scores_q, 0,
           (size_t)(tile->rows * block->tile_k / routines->elements_per_word) * sizeof(float));
  for (int64_t strip = 0; strip < block->keys; strip += routines->strip)
    attend_strip(block, tile, sizes, strip, smaller(routines->strip, block->keys - strip));

  const long long turn =
      block->key / block->tile_k - mask_visible(mask, first, last).begin / block->tile_k;
  threads_wait(tile->turn, turn);
  add_to_queries(block, tile, sizes);
  atomic_store_explicit(tile->turn, turn + 1, memory_order_release);
}

static void store_row(const struct key_block *block, const struct operand *gradient, int64_t key,
                      const float *sums, int64_t width, float factor) {
  const struct routines *routines = block->tiles->routines;
  const struct query_range seeing =
      mask_seeing(&block->sequence.mask, block->sequence.seqlen_q, key, key);
  void *to = key_row(block, gradient, key);
  if (seeing.begin < seeing.end)
    (block->tiles->problem->accumulate ? routines->add_row : routines->store_row)(
        sums, width, factor, gradient->dtype, to);
  else if (!block->tiles->problem->accumulate)
    memset(to, 0, (size_t)(width * element_size(gradient)));
}

static void end_block(const struct key_block *block, const struct sizes *sizes) {
  const struct problem *problem = block->tiles->problem;
  const struct key_scratch *scratch = &block->scratch;
  for (int64_t k = 0; k < block->keys; k++) {
    store_row(block, &problem->grad_key, block->key + k, scratch->grad_keys + k * sizes->head_width,
              problem->head_dim, problem->scale);
    store_row(block, &problem->grad_value, block->key + k,
              scratch->grad_values + k * sizes->value_width, problem->value_head_dim, 1);
  }
}

/* The last queries first: under a causal mask or a window these are the ones that fewer of the
 * blocks before see, so blocks that run at the same time seldom wait for each other. */
void key_block_run(struct key_block *block) {
  const struct query_tiles *tiles = block->tiles;
  const struct routines *routines = tiles->routines;
  const struct sizes sizes = sizes_of(tiles->problem, routines);
  begin_block(block, &sizes);
  if (routines->enter) routines->enter();
  const struct query_range seeing = mask_seeing(&block->sequence.mask, block->sequence.seqlen_q,
                                                block->key, block->key + block->keys - 1);
  const int64_t group = group_size(tiles->problem);
  const int64_t first_row = round_down(seeing.begin * group, TILE_Q);
  for (int64_t row = round_up(seeing.end * group, TILE_Q) - TILE_Q;
       seeing.begin < seeing.end && row >= first_row; row -= TILE_Q) {
    const struct query_tile tile = query_tile_at(tiles, block->batch, block->head_k, row);
    attend_tile(block, &tile, &sizes);
  }
  if (routines->leave) routines->leave();
  end_block(block, &sizes);
}
