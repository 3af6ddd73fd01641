/* A text as the small model of examples/generate reads it: byte by byte. */
#include <string.h>

#include "examples/generate/model.h"
#include "toys.h"

void toy_read_sizes(struct read_sizes *sizes) {
  *sizes = (struct read_sizes){(int32_t)jargon.layers, (int32_t)jargon.heads,
                               (int32_t)jargon.heads_k, (int32_t)jargon.head_dim};
}

/* bfloat16 is the upper half of a float32. */
static void set_parameters(struct model *model, const uint16_t *parameters) {
  for (int64_t i = 0; i < model->count; i++) {
    const uint32_t bits = (uint32_t)parameters[i] << 16;
    memcpy(&model->parameters[i], &bits, sizeof bits);
  }
}

void toy_read(const uint8_t *text, int count, const uint16_t *parameters, int layer, float *query,
              float *key, float *value) {
  static struct model model; /* kept for the next text */
  if (!model.parameters) {
    model = model_new(&jargon);
    set_parameters(&model, parameters);
  }
  struct activations activations = activations_new(&model, count, count);
  forward(&model, &activations, text, 1, count);
  const struct layer_activations *l = &activations.layers[layer];
  const size_t row = (size_t)count * (size_t)jargon.head_dim * sizeof(float);
  memcpy(query, l->query, row * (size_t)jargon.heads);
  memcpy(key, l->key, row * (size_t)jargon.heads_k);
  memcpy(value, l->value, row * (size_t)jargon.heads_k);
  activations_free(&activations);
}
