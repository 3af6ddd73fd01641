#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"
#include "kernels.h"

static const size_t guard = 64;
static const unsigned char pattern = 0xa5;

/* Guard, data, guard up to a whole number of guards. */
static size_t whole_size(size_t size) {
  return (size + 3 * guard - 1) / guard * guard;
}

/* The data's size is kept in the guard in front. */
void *guarded_new(size_t size) {
  size_t whole = whole_size(size);
  char *memory = aligned_alloc(guard, whole);
  if (!memory) {
    perror("aligned_alloc");
    exit(1);
  }
  memset(memory, pattern, whole);
  memcpy(memory, &size, sizeof size);
  memset(memory + guard, 0xff, size);
  return memory + guard;
}

bool guarded_intact(const void *memory) {
  const unsigned char *data = memory;
  size_t size;
  memcpy(&size, data - guard, sizeof size);
  for (size_t i = sizeof size; i < guard; i++)
    if (*(data - guard + i) != pattern) return false;
  for (size_t i = size; i < whole_size(size) - guard; i++)
    if (data[i] != pattern) return false;
  return true;
}

void guarded_free(void *memory) {
  if (memory) free((char *)memory - guard);
}

float *new_floats(int64_t count) {
  return guarded_new((size_t)count * sizeof(float));
}

float *copy_floats(const float *from, int64_t count) {
  float *to = malloc((size_t)count * sizeof *to);
  if (!to) exit(1);
  memcpy(to, from, (size_t)count * sizeof *to);
  return to;
}

static void store_element(fa3_dtype dtype, char *to, float value) {
  uint16_t bits = dtype == FA3_FLOAT16 ? half_from_float(value) : bfloat_from_float(value);
  if (dtype == FA3_FLOAT32)
    memcpy(to, &value, sizeof value);
  else
    memcpy(to, &bits, sizeof bits);
}

void fill_rows(struct rng *rng, const struct rows *rows, char *data) {
  int64_t size = (int64_t)fa3_dtype_size(rows->dtype);
  for (int64_t r = 0; r < rows->count; r++)
    for (int64_t i = 0; i < rows->width; i++)
      store_element(rows->dtype, data + r * rows->stride + i * size, (float)rng_normal(rng));
}

double load_element(const struct rows *rows, int64_t row, int64_t element) {
  const char *from =
      rows->data + row * rows->stride + element * (int64_t)fa3_dtype_size(rows->dtype);
  uint16_t bits;
  float value;
  memcpy(&value, from, rows->dtype == FA3_FLOAT32 ? sizeof value : sizeof bits);
  memcpy(&bits, from, sizeof bits);
  if (rows->dtype == FA3_FLOAT32) return value;
  return rows->dtype == FA3_FLOAT16 ? float_from_half(bits) : float_from_bfloat(bits);
}

double load_arranged(const struct routines *routines, const float *words, int64_t word_stride,
                     int64_t index) {
  int64_t pair = routines->elements_per_word;
  const float *word = words + index / pair * word_stride;
  if (pair == 1) return *word;
  uint16_t halves[2];
  memcpy(halves, word, sizeof halves);
  return float_from_bfloat(halves[index % pair]);
}

float arrange_word(const struct routines *routines, const double *values) {
  if (routines->elements_per_word == 1) return (float)values[0];
  uint16_t halves[2] = {bfloat_from_float((float)values[0]), bfloat_from_float((float)values[1])};
  float word;
  memcpy(&word, halves, sizeof word);
  return word;
}
