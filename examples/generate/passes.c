/* The passes over whole sequences, forward and backward, with no cache. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct activations activations_new(const struct model *model, int64_t rows, int64_t seqlen) {
  const struct sizes *s = &model->sizes;
  const int64_t width = rows * s->width, hidden = rows * s->hidden;
  const int64_t query = rows * s->heads * s->head_dim, key = rows * s->heads_k * s->head_dim;
  struct activations a = {.rows = rows, .rotary = rotary_new(seqlen, s->head_dim)};
  for (int64_t i = 0; i < s->layers; i++)
    a.layers[i] = (struct layer_activations){
        .x = allocate(width, sizeof(float)),
        .normed = allocate(width, sizeof(float)),
        .query = allocate(query, sizeof(float)),
        .key = allocate(key, sizeof(float)),
        .value = allocate(key, sizeof(float)),
        .attended = allocate(query, sizeof(float)),
        .lse = allocate(rows * s->heads, sizeof(float)),
        .middle = allocate(width, sizeof(float)),
        .normed_middle = allocate(width, sizeof(float)),
        .up = allocate(hidden, sizeof(float)),
        .activation = allocate(hidden, sizeof(float)),
    };
  a.x = allocate(width, sizeof(float));
  a.normed = allocate(width, sizeof(float));
  a.logits = allocate(rows * BYTES, sizeof(float));
  return a;
}

void activations_free(struct activations *a) {
  for (int i = 0; i < MAX_LAYERS; i++) {
    struct layer_activations *l = &a->layers[i];
    float *all[] = {l->x,   l->normed, l->query,         l->key, l->value,     l->attended,
                    l->lse, l->middle, l->normed_middle, l->up,  l->activation};
    for (size_t j = 0; j < sizeof all / sizeof *all; j++) free(all[j]);
  }
  free(a->x);
  free(a->normed);
  free(a->logits);
  free(a->workspace.memory);
  rotary_free(&a->rotary);
}

/* Turns element i and head_dim / 2 + i of each head by the angle of its position, as fa3_append
 * does; a sign of -1 turns back, which is how the gradient goes. */
static void rotate(const struct rotary *rotary, float *x, float sign, int64_t batch, int64_t seqlen,
                   int64_t heads, int64_t head_dim) {
  const int64_t pairs = head_dim / 2;
  for (int64_t row = 0; row < batch * seqlen; row++) {
    const float *cos = rotary->cos + row % seqlen * pairs,
                *sin = rotary->sin + row % seqlen * pairs;
    for (int64_t head = 0; head < heads; head++, x += head_dim)
      for (int64_t i = 0; i < pairs; i++) {
        const float first = x[i], second = x[pairs + i], s = sign * sin[i];
        x[i] = first * cos[i] - second * s;
        x[pairs + i] = first * s + second * cos[i];
      }
  }
}

/* The attention of a layer, as both passes describe it. */
static fa3_forward_args attention_args(const struct sizes *s, const struct layer_activations *l,
                                       int64_t batch, int64_t seqlen) {
  return (fa3_forward_args){
      .struct_size = sizeof(fa3_forward_args),
      .query = fa3_dense(l->query, FA3_FLOAT32, batch, seqlen, s->heads, s->head_dim),
      .key = fa3_dense(l->key, FA3_FLOAT32, batch, seqlen, s->heads_k, s->head_dim),
      .value = fa3_dense(l->value, FA3_FLOAT32, batch, seqlen, s->heads_k, s->head_dim),
      .output = fa3_dense(l->attended, FA3_FLOAT32, batch, seqlen, s->heads, s->head_dim),
      .lse = fa3_lse(l->lse, batch, s->heads, seqlen),
      .flags = FA3_CAUSAL | FA3_WINDOW,
      .window_left = s->window - 1,
  };
}

void forward(const struct model *model, struct activations *activations, const uint8_t *tokens,
             int64_t batch, int64_t seqlen) {
  const struct sizes *s = &model->sizes;
  const int64_t rows = batch * seqlen, width = s->width;
  const int64_t query_width = s->heads * s->head_dim, key_width = s->heads_k * s->head_dim;
  const size_t bytes = (size_t)(rows * width) * sizeof(float);
  float *x = activations->layers[0].x;
  for (int64_t row = 0; row < rows; row++)
    memcpy(x + row * width, model->embedding + tokens[row] * width, (size_t)width * sizeof *x);

  for (int64_t i = 0; i < s->layers; i++) {
    const struct layer *w = &model->layers[i];
    struct layer_activations *l = &activations->layers[i];
    norm(l->normed, l->x, rows, width);
    matmul(l->query, l->normed, w->query, rows, width, query_width);
    matmul(l->key, l->normed, w->key, rows, width, key_width);
    matmul(l->value, l->normed, w->value, rows, width, key_width);
    rotate(&activations->rotary, l->query, 1, batch, seqlen, s->heads, s->head_dim);
    rotate(&activations->rotary, l->key, 1, batch, seqlen, s->heads_k, s->head_dim);
    fa3_forward_args args = attention_args(s, l, batch, seqlen);
    attention(&args, &activations->workspace);
    memcpy(l->middle, l->x, bytes);
    matmul_add(l->middle, l->attended, w->output, rows, query_width, width);

    norm(l->normed_middle, l->middle, rows, width);
    matmul(l->up, l->normed_middle, w->up, rows, width, s->hidden);
    relu_squared(l->activation, l->up, rows * s->hidden);
    float *next = i + 1 < s->layers ? activations->layers[i + 1].x : activations->x;
    memcpy(next, l->middle, bytes);
    matmul_add(next, l->activation, w->down, rows, s->hidden, width);
  }

  norm(activations->normed, activations->x, rows, width);
  matmul(activations->logits, activations->normed, model->head, rows, width, BYTES);
}

double cross_entropy(float *logits, const uint8_t *next, int64_t rows) {
  double loss = 0;
  for (int64_t row = 0; row < rows; row++, logits += BYTES) {
    float largest = logits[0], sum = 0;
    for (int i = 1; i < BYTES; i++) largest = fmaxf(largest, logits[i]);
    for (int i = 0; i < BYTES; i++) sum += expf(logits[i] - largest);
    const float lse = largest + logf(sum);
    loss += (double)(lse - logits[next[row]]);
    for (int i = 0; i < BYTES; i++)
      logits[i] = (expf(logits[i] - lse) - (i == next[row] ? 1.0F : 0.0F)) / (float)rows;
  }
  return loss / (double)rows;
}

/* The gradients of one layer's tensors. */
struct layer_gradients {
  float *normed, *query, *key, *value, *attended, *up, *activation;
};

/* On the way in grad_x is the gradient of what the layer gives, on the way out of what it gets. */
static void layer_backward(const struct model *model, struct layer *grad_w,
                           struct activations *activations, int64_t i,
                           const struct layer_gradients *g, float *grad_x, int64_t batch,
                           int64_t seqlen) {
  const struct sizes *s = &model->sizes;
  const struct layer *w = &model->layers[i];
  const struct layer_activations *l = &activations->layers[i];
  const int64_t rows = batch * seqlen, width = s->width;
  const int64_t query_width = s->heads * s->head_dim, key_width = s->heads_k * s->head_dim;
  const size_t bytes = (size_t)(rows * width) * sizeof(float);

  memset(g->activation, 0, (size_t)(rows * s->hidden) * sizeof(float));
  memset(g->normed, 0, bytes);
  matmul_backward(g->activation, grad_w->down, grad_x, l->activation, w->down, rows, s->hidden,
                  width);
  relu_squared_backward(g->up, g->activation, l->up, rows * s->hidden);
  matmul_backward(g->normed, grad_w->up, g->up, l->normed_middle, w->up, rows, width, s->hidden);
  norm_backward(grad_x, g->normed, l->middle, rows, width);

  memset(g->attended, 0, (size_t)(rows * query_width) * sizeof(float));
  memset(g->normed, 0, bytes);
  matmul_backward(g->attended, grad_w->output, grad_x, l->attended, w->output, rows, query_width,
                  width);
  const fa3_forward_args forward_args = attention_args(s, l, batch, seqlen);
  fa3_backward_args args = {.struct_size = sizeof args};
  if (fa3_backward_init(&forward_args, &args)) fail("fa3_backward_init: %s", fa3_last_error());
  args.grad_output = fa3_dense(g->attended, FA3_FLOAT32, batch, seqlen, s->heads, s->head_dim);
  args.grad_query = fa3_dense(g->query, FA3_FLOAT32, batch, seqlen, s->heads, s->head_dim);
  args.grad_key = fa3_dense(g->key, FA3_FLOAT32, batch, seqlen, s->heads_k, s->head_dim);
  args.grad_value = fa3_dense(g->value, FA3_FLOAT32, batch, seqlen, s->heads_k, s->head_dim);
  attention_backward(&args, &activations->workspace);
  rotate(&activations->rotary, g->query, -1, batch, seqlen, s->heads, s->head_dim);
  rotate(&activations->rotary, g->key, -1, batch, seqlen, s->heads_k, s->head_dim);
  matmul_backward(g->normed, grad_w->query, g->query, l->normed, w->query, rows, width,
                  query_width);
  matmul_backward(g->normed, grad_w->key, g->key, l->normed, w->key, rows, width, key_width);
  matmul_backward(g->normed, grad_w->value, g->value, l->normed, w->value, rows, width, key_width);
  norm_backward(grad_x, g->normed, l->x, rows, width);
}

void backward(const struct model *model, struct model *gradient, struct activations *activations,
              const uint8_t *tokens, int64_t batch, int64_t seqlen) {
  const struct sizes *s = &model->sizes;
  const int64_t rows = batch * seqlen, width = s->width;
  const int64_t query = rows * s->heads * s->head_dim, key = rows * s->heads_k * s->head_dim;
  float *grad_x = allocate(rows * width, sizeof *grad_x);
  const struct layer_gradients g = {
      .normed = allocate(rows * width, sizeof(float)),
      .query = allocate(query, sizeof(float)),
      .key = allocate(key, sizeof(float)),
      .value = allocate(key, sizeof(float)),
      .attended = allocate(query, sizeof(float)),
      .up = allocate(rows * s->hidden, sizeof(float)),
      .activation = allocate(rows * s->hidden, sizeof(float)),
  };

  matmul_backward(g.normed, gradient->head, activations->logits, activations->normed, model->head,
                  rows, width, BYTES);
  norm_backward(grad_x, g.normed, activations->x, rows, width);
  for (int64_t i = s->layers - 1; i >= 0; i--)
    layer_backward(model, &gradient->layers[i], activations, i, &g, grad_x, batch, seqlen);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t c = 0; c < width; c++)
      gradient->embedding[tokens[row] * width + c] += grad_x[row * width + c];

  float *all[] = {grad_x, g.normed, g.query, g.key, g.value, g.attended, g.up, g.activation};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}
