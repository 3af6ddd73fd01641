/* A small transformer that reads and writes bytes, built on libfa3's attention. model.c has its
 * parameters and their file, layers.c what a layer is made of, passes.c the passes over whole
 * sequences that training needs. generate.c runs it token by token with a cache, train.c trains it.
 *
 *   x = embedding[byte]
 *   in each layer:
 *     x += attention(norm(x) query, norm(x) key, norm(x) value) output
 *     x += relu(norm(x) up)^2 down
 *   logits of the next byte = norm(x) head
 *
 * Tensors are row-major float32; a row is a token. */
#ifndef GENERATE_MODEL_H
#define GENERATE_MODEL_H

#include <stdint.h>
#include <stdnoreturn.h>

#include <fa3.h>

enum { BYTES = 256, MAX_LAYERS = 8 };

struct sizes {
  int64_t layers;
  int64_t width;    /* of x */
  int64_t heads;    /* of queries */
  int64_t heads_k;  /* of keys and values; each serves heads / heads_k heads of queries */
  int64_t head_dim; /* of all three */
  int64_t hidden;   /* width of the feed-forward part */
  int64_t window;   /* a token sees itself and window - 1 tokens before it */
};

/* The sizes of the model in jargon.safetensors. */
extern const struct sizes jargon;

/* Matrices of (inputs, outputs): a row of inputs times the matrix is a row of outputs. */
struct layer {
  float *query, *key, *value, *output;
  float *up, *down;
};

struct model {
  struct sizes sizes;
  int64_t count;     /* of parameters */
  float *parameters; /* all of them; what follows points into it */
  float *embedding;  /* (BYTES, width) */
  struct layer layers[MAX_LAYERS];
  float *head; /* (width, BYTES) */
};

/* Prints why, and ends the program. */
noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Memory of `count` elements of zero. */
void *allocate(int64_t count, size_t size);

/* A model whose parameters are zero, random, or a file's. A file is safetensors in bfloat16, and
 * has to be of just these sizes. */
struct model model_new(const struct sizes *sizes);
struct model model_random(const struct sizes *sizes, uint64_t seed);
struct model model_load(const struct sizes *sizes, const char *path);
void model_save(const struct model *model, const char *path);
void model_free(struct model *model);

/* A number in [0, 1), and the next state. */
double random_uniform(uint64_t *state);

/* out += a b, of (rows, inner) and (inner, columns). A row of out does not depend on how many rows
 * there are: a token is computed to the same bits in whatever batch it comes. */
void matmul_add(float *out, const float *a, const float *b, int64_t rows, int64_t inner,
                int64_t columns);
void matmul(float *out, const float *a, const float *b, int64_t rows, int64_t inner,
            int64_t columns);
/* grad_a += grad_out b^T, grad_b += a^T grad_out, for out of (count, outputs). */
void matmul_backward(float *grad_a, float *grad_b, const float *grad_out, const float *a,
                     const float *b, int64_t count, int64_t inputs, int64_t outputs);

/* Each row divided by its root mean square; grad_x is added to. */
void norm(float *out, const float *x, int64_t rows, int64_t width);
void norm_backward(float *grad_x, const float *grad_out, const float *x, int64_t rows,
                   int64_t width);

/* relu(x)^2; grad_x is written. */
void relu_squared(float *out, const float *x, int64_t count);
void relu_squared_backward(float *grad_x, const float *grad_out, const float *x, int64_t count);

/* Rotary embedding: cosines and sines of (positions, head_dim / 2) angles. */
struct rotary {
  int64_t positions;
  float *cos, *sin;
};
struct rotary rotary_new(int64_t positions, int64_t head_dim);
void rotary_free(struct rotary *rotary);

/* Calls libfa3, with workspace that grows as it is asked for. */
struct workspace {
  void *memory;
  size_t size;
};
void attention(fa3_forward_args *args, struct workspace *workspace);
void attention_backward(fa3_backward_args *args, struct workspace *workspace);

/* What a forward pass leaves for the backward pass, for up to `rows` tokens. */
struct layer_activations {
  float *x;                               /* what the layer gets */
  float *normed, *query, *key, *value;    /* query and key are turned */
  float *attended, *lse;                  /* attention's output, before the matrix `output` */
  float *middle;                          /* x after attention */
  float *normed_middle, *up, *activation; /* the feed-forward part */
};
struct activations {
  int64_t rows;
  struct rotary rotary;
  struct workspace workspace;
  struct layer_activations layers[MAX_LAYERS];
  float *x, *normed, *logits; /* after the last layer; logits are (rows, BYTES) */
};
struct activations activations_new(const struct model *model, int64_t rows, int64_t seqlen);
void activations_free(struct activations *activations);

/* The logits of all tokens of `batch` sequences of `seqlen` tokens, with no cache. */
void forward(const struct model *model, struct activations *activations, const uint8_t *tokens,
             int64_t batch, int64_t seqlen);

/* The mean cross-entropy of the next bytes, in nats; logits become its gradient. */
double cross_entropy(float *logits, const uint8_t *next, int64_t rows);

/* Adds the loss's gradient to `gradient`, after forward and cross_entropy of the same tokens. */
void backward(const struct model *model, struct model *gradient, struct activations *activations,
              const uint8_t *tokens, int64_t batch, int64_t seqlen);

#endif
