/* The parameters and their file. */
#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct sizes jargon = {
    .layers = 4,
    .width = 128,
    .heads = 4,
    .heads_k = 2,
    .head_dim = 32,
    .hidden = 384,
    .window = 128,
};

enum { MAX_TENSORS = 6 * MAX_LAYERS + 2, MAX_HEADER = 128 * MAX_TENSORS };

noreturn void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fputc('\n', stderr);
  exit(EXIT_FAILURE);
}

void *allocate(int64_t count, size_t size) {
  void *memory = calloc((size_t)count, size);
  if (!memory) fail("no memory for %lld elements", (long long)count);
  return memory;
}

/* One matrix of the model: its name in a file, its shape, and the pointer to it. */
struct tensor {
  char name[32];
  int64_t rows, columns;
  float **data;
};

static struct tensor layer_tensor(int layer, const char *name, int64_t rows, int64_t columns,
                                  float **data) {
  struct tensor tensor = {.rows = rows, .columns = columns, .data = data};
  snprintf(tensor.name, sizeof tensor.name, "layers.%d.%.8s", layer, name);
  return tensor;
}

/* All matrices, in the order in which memory and files have them. */
static int list_tensors(struct model *model, struct tensor *list) {
  const int64_t width = model->sizes.width, hidden = model->sizes.hidden;
  const int64_t query_width = model->sizes.heads * model->sizes.head_dim;
  const int64_t key_width = model->sizes.heads_k * model->sizes.head_dim;
  int count = 0;
  list[count++] = (struct tensor){"embedding", BYTES, width, &model->embedding};
  for (int i = 0; i < (int)model->sizes.layers; i++) {
    struct layer *layer = &model->layers[i];
    list[count++] = layer_tensor(i, "query", width, query_width, &layer->query);
    list[count++] = layer_tensor(i, "key", width, key_width, &layer->key);
    list[count++] = layer_tensor(i, "value", width, key_width, &layer->value);
    list[count++] = layer_tensor(i, "output", query_width, width, &layer->output);
    list[count++] = layer_tensor(i, "up", width, hidden, &layer->up);
    list[count++] = layer_tensor(i, "down", hidden, width, &layer->down);
  }
  list[count++] = (struct tensor){"head", width, BYTES, &model->head};
  return count;
}

struct model model_new(const struct sizes *sizes) {
  struct model model = {.sizes = *sizes};
  struct tensor list[MAX_TENSORS];
  const int tensors = list_tensors(&model, list);
  for (int i = 0; i < tensors; i++) model.count += list[i].rows * list[i].columns;
  float *next = model.parameters = allocate(model.count, sizeof *next);
  for (int i = 0; i < tensors; i++) {
    *list[i].data = next;
    next += list[i].rows * list[i].columns;
  }
  return model;
}

void model_free(struct model *model) {
  free(model->parameters);
  *model = (struct model){0};
}

double random_uniform(uint64_t *state) {
  *state += 0x9e3779b97f4a7c15; /* splitmix64 */
  uint64_t z = *state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

/* Uniform numbers that keep the size of what a matrix is multiplied with. */
struct model model_random(const struct sizes *sizes, uint64_t seed) {
  struct model model = model_new(sizes);
  struct tensor list[MAX_TENSORS];
  const int tensors = list_tensors(&model, list);
  for (int i = 0; i < tensors; i++) {
    const double inputs = list[i].data == &model.embedding ? 1 : (double)list[i].rows;
    for (int64_t j = 0; j < list[i].rows * list[i].columns; j++)
      (*list[i].data)[j] = (float)((2 * random_uniform(&seed) - 1) * sqrt(3 / inputs));
  }
  return model;
}

/* A safetensors file is the length of its header in 8 bytes, the header, the data. The header is
 * JSON that says where each tensor is; ours is followed by spaces up to a multiple of 8 bytes. */
static int64_t make_header(struct model *model, char *header) {
  struct tensor list[MAX_TENSORS];
  const int tensors = list_tensors(model, list);
  int64_t length = 0, offset = 0;
  for (int i = 0; i < tensors; i++) {
    const int64_t bytes = 2 * list[i].rows * list[i].columns;
    length += snprintf(header + length, (size_t)(MAX_HEADER - length),
                       "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%lld,%lld],"
                       "\"data_offsets\":[%lld,%lld]}",
                       i ? "," : "{", list[i].name, (long long)list[i].rows,
                       (long long)list[i].columns, (long long)offset, (long long)(offset + bytes));
    offset += bytes;
  }
  header[length++] = '}';
  while (length % 8) header[length++] = ' ';
  return length;
}

/* bfloat16 is the upper half of a float32, here rounded to nearest even. */
static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_bfloat16(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Both assume a machine that is little-endian, as the format is. */
void model_save(const struct model *model, const char *path) {
  struct model layout = *model;
  char header[MAX_HEADER];
  const uint64_t length = (uint64_t)make_header(&layout, header);
  uint16_t *data = allocate(model->count, sizeof *data);
  for (int64_t i = 0; i < model->count; i++) data[i] = to_bfloat16(model->parameters[i]);
  FILE *file = fopen(path, "wb");
  if (!file) fail("%s: can't be written", path);
  const bool written =
      fwrite(&length, sizeof length, 1, file) == 1 &&
      fwrite(header, (size_t)length, 1, file) == 1 &&
      fwrite(data, sizeof *data, (size_t)model->count, file) == (size_t)model->count;
  if (fclose(file) || !written) fail("%s: could not be written", path);
  free(data);
}

struct model model_load(const struct sizes *sizes, const char *path) {
  struct model model = model_new(sizes);
  char expected[MAX_HEADER], header[MAX_HEADER];
  const uint64_t expected_length = (uint64_t)make_header(&model, expected);
  uint16_t *data = allocate(model.count, sizeof *data);
  uint64_t length = 0;
  FILE *file = fopen(path, "rb");
  if (!file) fail("%s: can't be read", path);
  if (fread(&length, sizeof length, 1, file) != 1 || length != expected_length ||
      fread(header, (size_t)length, 1, file) != 1 || memcmp(header, expected, (size_t)length) != 0)
    fail("%s: not a file of this model", path);
  if (fread(data, sizeof *data, (size_t)model.count, file) != (size_t)model.count)
    fail("%s: cut short", path);
  (void)fclose(file); /* it was only read */
  for (int64_t i = 0; i < model.count; i++) model.parameters[i] = from_bfloat16(data[i]);
  free(data);
  return model;
}
