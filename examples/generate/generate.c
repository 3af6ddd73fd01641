/* Continues prompts, all side by side, with a KV cache in pages.
 *
 *   generate [-n TOKENS] [-t TEMPERATURE] [-s SEED] [-r] MODEL.safetensors PROMPT...
 *
 * Temperature 0 takes the likeliest byte each time. -r keeps no cache: each token recomputes
 * all that is before it, which gives the same text and takes longer. */
#include "model.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PAGE_SIZE = 16, MAX_SEQUENCES = 64 };

/* Keys and values of all tokens so far. A page is memory for PAGE_SIZE tokens of one sequence in
 * all layers; page_table says which pages a sequence has, in their order. Memory is taken page by
 * page as sequences grow, and sequences that begin alike can have pages in common. */
struct cache {
  int64_t pages;                  /* that there are */
  int64_t pages_used;             /* the first so many are taken */
  int64_t sequence_pages;         /* columns of page_table */
  float *key, *value;             /* (layers, pages, PAGE_SIZE, heads_k, head_dim) */
  int32_t *page_table;            /* (sequences, sequence_pages) */
  int32_t lengths[MAX_SEQUENCES]; /* tokens of each sequence */
  struct rotary rotary;
  struct workspace workspace;
};

static struct cache cache_new(const struct sizes *s, int64_t sequences, int64_t max_tokens) {
  struct cache cache = {.sequence_pages = (max_tokens + PAGE_SIZE - 1) / PAGE_SIZE};
  cache.pages = sequences * cache.sequence_pages;
  const int64_t rows = s->layers * cache.pages * PAGE_SIZE;
  cache.key = allocate(rows * s->heads_k * s->head_dim, sizeof *cache.key);
  cache.value = allocate(rows * s->heads_k * s->head_dim, sizeof *cache.value);
  cache.page_table = allocate(cache.pages, sizeof *cache.page_table);
  cache.rotary = rotary_new(max_tokens, s->head_dim);
  return cache;
}

static void cache_free(struct cache *cache) {
  free(cache->key);
  free(cache->value);
  free(cache->page_table);
  free(cache->workspace.memory);
  rotary_free(&cache->rotary);
}

/* Gives a sequence pages for `count` more tokens. */
static void cache_grow(struct cache *cache, int64_t sequence, int64_t count) {
  const int64_t tokens = cache->lengths[sequence] + count;
  int64_t page = (cache->lengths[sequence] + PAGE_SIZE - 1) / PAGE_SIZE;
  for (; page * PAGE_SIZE < tokens; page++)
    cache->page_table[sequence * cache->sequence_pages + page] = (int32_t)cache->pages_used++;
}

/* Gives all sequences the pages of the first one. */
static void cache_share(struct cache *cache, int64_t sequences) {
  for (int64_t b = 1; b < sequences; b++) {
    memcpy(cache->page_table + b * cache->sequence_pages, cache->page_table,
           (size_t)cache->sequence_pages * sizeof *cache->page_table);
    cache->lengths[b] = cache->lengths[0];
  }
}

/* A batch of new tokens, packed: those of sequence b are tokens[starts[b]] up to
 * tokens[starts[b + 1]]. One, a few or a whole prompt for each sequence are all the same. */
struct batch {
  int64_t sequences;
  const uint8_t *tokens;
  int32_t starts[MAX_SEQUENCES + 1];
};

static fa3_tensor matrix(const void *data, fa3_dtype dtype, int64_t rows, int64_t columns) {
  return (fa3_tensor){(void *)data, dtype, 2, {rows, columns}, {columns, 1}, {0}};
}

/* Attention of a batch in one layer: writes the new keys and values into the cache, turned by
 * their positions, and lets each new token see all of its sequence up to itself. */
static void attend(const struct sizes *s, struct cache *cache, int64_t layer,
                   const struct batch *batch, const int32_t *lengths_after, float *query,
                   const float *key, const float *value, float *output) {
  const int64_t rows = batch->starts[batch->sequences], pages = cache->pages;
  const int64_t layer_size = pages * PAGE_SIZE * s->heads_k * s->head_dim;
  const fa3_tensor queries = fa3_packed(query, FA3_FLOAT32, rows, s->heads, s->head_dim);
  const fa3_tensor keys = fa3_dense(cache->key + layer * layer_size, FA3_FLOAT32, pages, PAGE_SIZE,
                                    s->heads_k, s->head_dim);
  const fa3_tensor values = fa3_dense(cache->value + layer * layer_size, FA3_FLOAT32, pages,
                                      PAGE_SIZE, s->heads_k, s->head_dim);
  const fa3_tensor starts = fa3_vector(batch->starts, FA3_INT32, batch->sequences + 1);
  const fa3_tensor page_table =
      matrix(cache->page_table, FA3_INT32, batch->sequences, cache->sequence_pages);

  const int64_t positions = cache->rotary.positions, pairs = s->head_dim / 2;
  const fa3_append_args append = {
      .struct_size = sizeof append,
      .new_key = fa3_packed(key, FA3_FLOAT32, rows, s->heads_k, s->head_dim),
      .new_value = fa3_packed(value, FA3_FLOAT32, rows, s->heads_k, s->head_dim),
      .key = keys,
      .value = values,
      .query = queries,
      .rotated_query = queries,
      .rotary_cos = matrix(cache->rotary.cos, FA3_FLOAT32, positions, pairs),
      .rotary_sin = matrix(cache->rotary.sin, FA3_FLOAT32, positions, pairs),
      .cu_seqlens_q = starts,
      .seqused_k = fa3_vector(cache->lengths, FA3_INT32, batch->sequences),
      .page_table = page_table,
  };
  if (fa3_append(&append)) fail("fa3_append: %s", fa3_last_error());

  fa3_forward_args args = {
      .struct_size = sizeof args,
      .query = queries,
      .key = keys,
      .value = values,
      .output = fa3_packed(output, FA3_FLOAT32, rows, s->heads, s->head_dim),
      .cu_seqlens_q = starts,
      .seqused_k = fa3_vector(lengths_after, FA3_INT32, batch->sequences),
      .page_table = page_table,
      .flags = FA3_CAUSAL | FA3_WINDOW,
      .window_left = s->window - 1,
  };
  attention(&args, &cache->workspace);
}

/* Runs a batch through the model: logits (sequences, BYTES) of the byte after the last token of
 * each sequence. */
static void run(const struct model *model, struct cache *cache, const struct batch *batch,
                float *logits) {
  const struct sizes *s = &model->sizes;
  const int64_t rows = batch->starts[batch->sequences], width = s->width;
  const int64_t query_width = s->heads * s->head_dim, key_width = s->heads_k * s->head_dim;
  float *x = allocate(rows * width, sizeof *x), *normed = allocate(rows * width, sizeof *x);
  float *query = allocate(rows * query_width, sizeof *x);
  float *key = allocate(rows * key_width, sizeof *x),
        *value = allocate(rows * key_width, sizeof *x);
  float *attended = allocate(rows * query_width, sizeof *x);
  float *hidden = allocate(rows * s->hidden, sizeof *x);

  int32_t lengths_after[MAX_SEQUENCES];
  for (int64_t b = 0; b < batch->sequences; b++) {
    const int32_t count = batch->starts[b + 1] - batch->starts[b];
    cache_grow(cache, b, count);
    lengths_after[b] = cache->lengths[b] + count;
  }
  for (int64_t row = 0; row < rows; row++)
    memcpy(x + row * width, model->embedding + batch->tokens[row] * width,
           (size_t)width * sizeof *x);

  for (int64_t i = 0; i < s->layers; i++) {
    const struct layer *w = &model->layers[i];
    norm(normed, x, rows, width);
    matmul(query, normed, w->query, rows, width, query_width);
    matmul(key, normed, w->key, rows, width, key_width);
    matmul(value, normed, w->value, rows, width, key_width);
    attend(s, cache, i, batch, lengths_after, query, key, value, attended);
    matmul_add(x, attended, w->output, rows, query_width, width);

    norm(normed, x, rows, width);
    matmul(hidden, normed, w->up, rows, width, s->hidden);
    relu_squared(hidden, hidden, rows * s->hidden);
    matmul_add(x, hidden, w->down, rows, s->hidden, width);
  }

  for (int64_t b = 0; b < batch->sequences; b++) {
    norm(normed, x + (batch->starts[b + 1] - 1) * width, 1, width);
    matmul(logits + b * BYTES, normed, model->head, 1, width, BYTES);
  }
  memcpy(cache->lengths, lengths_after, (size_t)batch->sequences * sizeof *lengths_after);
  float *all[] = {x, normed, query, key, value, attended, hidden};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The next byte: the likeliest, or one drawn from softmax(logits / temperature). */
static uint8_t choose(const float *logits, double temperature, uint64_t *random) {
  int best = 0;
  for (int i = 1; i < BYTES; i++)
    if (logits[i] > logits[best]) best = i;
  if (temperature <= 0) return (uint8_t)best;
  double weights[BYTES], sum = 0;
  for (int i = 0; i < BYTES; i++)
    sum += weights[i] = exp((double)(logits[i] - logits[best]) / temperature);
  double left = random_uniform(random) * sum;
  int chosen = 0;
  while (chosen < BYTES - 1 && (left -= weights[chosen]) >= 0) chosen++;
  return (uint8_t)chosen;
}

/* A prompt, and then what follows it. */
struct sequence {
  uint8_t *text;
  int64_t prompt, length;
  uint64_t random;
};

struct options {
  int64_t tokens;
  double temperature;
  uint64_t seed;
  bool recompute;
};

static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* How many whole pages all prompts begin with, less the last token of each, whose logits are
 * needed. */
static int64_t common_pages(const struct sequence *sequences, int64_t count) {
  int64_t common = sequences[0].prompt - 1;
  for (int64_t b = 1; b < count; b++) {
    int64_t same = 0;
    while (same < common && same < sequences[b].prompt - 1 &&
           sequences[b].text[same] == sequences[0].text[same])
      same++;
    common = same;
  }
  return count > 1 ? common / PAGE_SIZE : 0;
}

/* Reads all prompts: first what they have in common, once, then the rest of each in one batch. */
static void prefill(const struct model *model, struct cache *cache,
                    const struct sequence *sequences, int64_t count, float *logits) {
  const int64_t common = common_pages(sequences, count) * PAGE_SIZE;
  if (common > 0) {
    const struct batch first = {1, sequences[0].text, {0, (int32_t)common}};
    run(model, cache, &first, logits);
    cache_share(cache, count);
  }
  struct batch rest = {.sequences = count};
  for (int64_t b = 0; b < count; b++)
    rest.starts[b + 1] = rest.starts[b] + (int32_t)(sequences[b].prompt - common);
  uint8_t *tokens = allocate(rest.starts[count], 1);
  for (int64_t b = 0; b < count; b++)
    memcpy(tokens + rest.starts[b], sequences[b].text + common,
           (size_t)(sequences[b].prompt - common));
  rest.tokens = tokens;
  run(model, cache, &rest, logits);
  free(tokens);
}

static void generate(const struct model *model, struct sequence *sequences, int64_t count,
                     int64_t longest, const struct options *options) {
  struct cache cache = cache_new(&model->sizes, count, longest);
  float *logits = allocate(count * BYTES, sizeof *logits);
  const double start = seconds();
  prefill(model, &cache, sequences, count, logits);
  const double prompts_read = seconds();
  for (int64_t i = 0; i < options->tokens; i++) {
    uint8_t tokens[MAX_SEQUENCES];
    struct batch batch = {.sequences = count, .tokens = tokens};
    for (int64_t b = 0; b < count; b++) {
      struct sequence *sequence = &sequences[b];
      tokens[b] = choose(logits + b * BYTES, options->temperature, &sequence->random);
      sequence->text[sequence->length++] = tokens[b];
      batch.starts[b + 1] = (int32_t)b + 1;
    }
    if (i + 1 < options->tokens) run(model, &cache, &batch, logits);
  }
  const int64_t shared = common_pages(sequences, count), made = count * options->tokens;
  fprintf(stderr,
          "prompts read in %.1f ms; %lld x %lld tokens, %.0f tokens per second\n"
          "cache: %lld pages of %d tokens, %lld of them shared\n",
          1e3 * (prompts_read - start), (long long)count, (long long)options->tokens,
          (double)made / (seconds() - prompts_read), (long long)cache.pages_used, PAGE_SIZE,
          (long long)shared);
  free(logits);
  cache_free(&cache);
}

/* The same text without a cache, by the pass that the model was trained with. */
static void recompute(const struct model *model, struct sequence *sequences, int64_t count,
                      int64_t longest, const struct options *options) {
  struct activations activations = activations_new(model, longest, longest);
  const double start = seconds();
  for (int64_t b = 0; b < count; b++) {
    struct sequence *sequence = &sequences[b];
    for (int64_t i = 0; i < options->tokens; i++) {
      forward(model, &activations, sequence->text, 1, sequence->length);
      const float *logits = activations.logits + (sequence->length - 1) * BYTES;
      sequence->text[sequence->length++] = choose(logits, options->temperature, &sequence->random);
    }
  }
  const int64_t made = count * options->tokens;
  fprintf(stderr, "%lld x %lld tokens without a cache, %.0f tokens per second\n", (long long)count,
          (long long)options->tokens, (double)made / (seconds() - start));
  activations_free(&activations);
}

static struct options read_options(int argc, char **argv) {
  struct options options = {.tokens = 200, .seed = 1};
  int option;
  while ((option = getopt(argc, argv, "n:t:s:r")) != -1) {
    if (option == 'n') options.tokens = strtoll(optarg, NULL, 10);
    if (option == 't') options.temperature = strtod(optarg, NULL);
    if (option == 's') options.seed = strtoull(optarg, NULL, 10);
    if (option == 'r') options.recompute = true;
    if (option == '?') exit(EXIT_FAILURE);
  }
  if (options.tokens < 1 || options.tokens > 1000000) fail("-n: expected 1 to 1000000 tokens");
  if (!(options.temperature >= 0)) fail("-t: expected a temperature of 0 or more");
  const int prompts = argc - optind - 1;
  if (prompts < 1 || prompts > MAX_SEQUENCES)
    fail(
        "usage: generate [-n TOKENS] [-t TEMPERATURE] [-s SEED] [-r] MODEL.safetensors PROMPT..., "
        "up to %d prompts; -r: without a cache",
        MAX_SEQUENCES);
  return options;
}

int main(int argc, char **argv) {
  const struct options options = read_options(argc, argv);
  char **prompts = argv + optind + 1;
  const int64_t count = argc - optind - 1;
  struct model model = model_load(&jargon, argv[optind]);

  struct sequence sequences[MAX_SEQUENCES] = {0};
  int64_t longest = 0;
  for (int64_t b = 0; b < count; b++) {
    const int64_t length = (int64_t)strlen(prompts[b]);
    if (length == 0) fail("a prompt is empty");
    sequences[b] = (struct sequence){allocate(length + options.tokens, 1), length, length,
                                     options.seed * MAX_SEQUENCES + (uint64_t)b};
    memcpy(sequences[b].text, prompts[b], (size_t)length);
    if (length + options.tokens > longest) longest = length + options.tokens;
  }

  (options.recompute ? recompute : generate)(&model, sequences, count, longest, &options);
  for (int64_t b = 0; b < count; b++) {
    if (b > 0) fputs("\n----\n", stdout);
    const size_t length = (size_t)sequences[b].length;
    if (fwrite(sequences[b].text, 1, length, stdout) != length) fail("the text can't be written");
    free(sequences[b].text);
  }
  putchar('\n');
  model_free(&model);
  return EXIT_SUCCESS;
}
