/* Trains the model on a text: AdamW on batches of random pieces of it, which two threads share.
 *
 *   train TEXT MODEL.safetensors [STEPS] */
#include "model.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 2, BATCH = 2, SEQLEN = 256, ROWS = BATCH * SEQLEN }; /* of each thread */

struct text {
  uint8_t *bytes;
  int64_t count;
};

static struct text read_text(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) fail("%s: can't be read", path);
  struct text text = {.count = ftell(file)};
  text.bytes = allocate(text.count + 1, 1);
  rewind(file);
  if (fread(text.bytes, 1, (size_t)text.count, file) != (size_t)text.count)
    fail("%s: can't be read", path);
  (void)fclose(file); /* it was only read */
  return text;
}

/* One thread's part of a batch, and what it makes of it. */
struct part {
  const struct model *model;
  struct model gradient;
  struct activations activations;
  uint8_t tokens[ROWS], next[ROWS];
  double loss;
};

/* Random pieces of the text from `first` on, and the byte that follows each of theirs. */
static void draw_pieces(const struct text *text, int64_t first, int64_t count, uint64_t *random,
                        struct part *part) {
  for (int64_t b = 0; b < BATCH; b++) {
    const double places = (double)(count - SEQLEN);
    const uint8_t *from = text->bytes + first + (int64_t)(random_uniform(random) * places);
    memcpy(part->tokens + b * SEQLEN, from, SEQLEN);
    memcpy(part->next + b * SEQLEN, from + 1, SEQLEN);
  }
}

static void *compute_gradient(void *argument) {
  struct part *part = argument;
  struct model *gradient = &part->gradient;
  memset(gradient->parameters, 0, (size_t)gradient->count * sizeof(float));
  forward(part->model, &part->activations, part->tokens, BATCH, SEQLEN);
  part->loss = cross_entropy(part->activations.logits, part->next, ROWS);
  backward(part->model, gradient, &part->activations, part->tokens, BATCH, SEQLEN);
  return NULL;
}

/* The mean loss of one batch; its gradient becomes the first part's. */
static double compute_gradients(struct part *parts) {
  pthread_t threads[THREADS];
  for (int t = 1; t < THREADS; t++)
    if (pthread_create(&threads[t], NULL, compute_gradient, &parts[t])) fail("no thread");
  compute_gradient(&parts[0]);
  double loss = parts[0].loss;
  float *sum = parts[0].gradient.parameters;
  for (int t = 1; t < THREADS; t++) {
    pthread_join(threads[t], NULL);
    loss += parts[t].loss;
    for (int64_t i = 0; i < parts[t].gradient.count; i++) sum[i] += parts[t].gradient.parameters[i];
  }
  for (int64_t i = 0; i < parts[0].gradient.count; i++) sum[i] /= THREADS;
  return loss / THREADS;
}

/* (Decoupled weight decay regularization, arXiv 1711.05101) `mean` and `square` are running means
 * of the gradient and of its square. */
static void adamw(struct model *model, const struct model *gradient, float *mean, float *square,
                  int64_t step, double rate) {
  const double beta1 = 0.9, beta2 = 0.99, decay = 0.05;
  const float rate1 = (float)(rate / (1 - pow(beta1, (double)step)));
  const float scale2 = (float)(1 / (1 - pow(beta2, (double)step)));
  const float keep = (float)(1 - rate * decay);
  for (int64_t i = 0; i < model->count; i++) {
    const float g = gradient->parameters[i];
    mean[i] += (float)(1 - beta1) * (g - mean[i]);
    square[i] += (float)(1 - beta2) * (g * g - square[i]);
    model->parameters[i] =
        keep * model->parameters[i] - rate1 * mean[i] / (sqrtf(square[i] * scale2) + 1e-8F);
  }
}

/* Up in the first twentieth of the steps, then down to zero along a cosine. */
static double learning_rate(int64_t step, int64_t steps) {
  const double top = 3e-3, warmup = (double)steps / 20, done = (double)step / (double)steps;
  return top * fmin((double)step / fmax(warmup, 1), (1 + cos(acos(-1) * done)) / 2);
}

/* The loss on pieces of the text's end, which no step has seen. */
static double held_out_loss(struct part *part, const struct text *text, int64_t first) {
  enum { BATCHES = 32 };
  uint64_t random = 3;
  double sum = 0;
  for (int i = 0; i < BATCHES; i++) {
    draw_pieces(text, first, text->count - first, &random, part);
    forward(part->model, &part->activations, part->tokens, BATCH, SEQLEN);
    sum += cross_entropy(part->activations.logits, part->next, ROWS);
  }
  return sum / BATCHES;
}

static double seconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv) {
  if (argc < 3 || argc > 4) fail("usage: train TEXT MODEL.safetensors [STEPS]");
  const struct text text = read_text(argv[1]);
  const int64_t steps = argc > 3 ? strtoll(argv[3], NULL, 10) : 2500;
  const int64_t trained = text.count - text.count / 20; /* the rest is held out */
  if (text.count - trained <= SEQLEN) fail("%s: too short", argv[1]);

  struct model model = model_random(&jargon, 1);
  float *mean = allocate(model.count, sizeof *mean),
        *square = allocate(model.count, sizeof *square);
  struct part *parts = allocate(THREADS, sizeof *parts);
  for (int t = 0; t < THREADS; t++) {
    parts[t].model = &model;
    parts[t].gradient = model_new(&jargon);
    parts[t].activations = activations_new(&model, ROWS, SEQLEN);
  }
  printf("%lld parameters, %lld bytes of text\n", (long long)model.count, (long long)text.count);

  uint64_t random = 2;
  double sum = 0;
  int64_t summed = 0;
  const double start = seconds();
  for (int64_t step = 1; step <= steps; step++) {
    for (int t = 0; t < THREADS; t++) draw_pieces(&text, 0, trained, &random, &parts[t]);
    sum += compute_gradients(parts);
    summed++;
    adamw(&model, &parts[0].gradient, mean, square, step, learning_rate(step, steps));
    if (step % 50 == 0 || step == 1 || step == steps) {
      printf("step %5lld  loss %.4f  %.0f tokens per second\n", (long long)step,
             sum / (double)summed, (double)(step * THREADS * ROWS) / (seconds() - start));
      (void)fflush(stdout);
      sum = 0;
      summed = 0;
    }
  }
  printf("held out    loss %.4f\n", held_out_loss(&parts[0], &text, trained));
  model_save(&model, argv[2]);

  for (int t = 0; t < THREADS; t++) {
    model_free(&parts[t].gradient);
    activations_free(&parts[t].activations);
  }
  model_free(&model);
  free(parts);
  free(mean);
  free(square);
  free(text.bytes);
  return EXIT_SUCCESS;
}
