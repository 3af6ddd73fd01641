/* Attention in three orders, counting the numbers that move between memory and chip.
 *   traffic          with the matrix of scores in memory, and tile by tile
 *   traffic loops    tile by tile, with the loop over keys outside and with it inside */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { tokens = 512, head_dim = 64, largest_tile = 128 };
typedef float row[head_dim];

static long moved;

static void load(row *chip, const row *memory, int rows) {
  memcpy(chip, memory, (size_t)rows * sizeof(row));
  moved += (long)rows * head_dim;
}

static void store(row *memory, const row *chip, int rows) {
  memcpy(memory, chip, (size_t)rows * sizeof(row));
  moved += (long)rows * head_dim;
}

static float score_of(const row query, const row key) {
  float sum = 0;
  for (int d = 0; d < head_dim; d++) sum += query[d] * key[d];
  return sum / sqrtf(head_dim);
}

/* Three kernels: scores, softmax, output. */
static void standard(const row *query, const row *key, const row *value, row *output) {
  static float matrix[tokens][tokens];
  for (int i = 0; i < tokens; i++)
    for (int j = 0; j < tokens; j++) matrix[i][j] = score_of(query[i], key[j]);
  moved += 2L * tokens * head_dim + (long)tokens * tokens; /* reads Q and K, writes S */

  for (int i = 0; i < tokens; i++) {
    float maximum = -INFINITY, sum = 0;
    for (int j = 0; j < tokens; j++) maximum = fmaxf(maximum, matrix[i][j]);
    for (int j = 0; j < tokens; j++) sum += expf(matrix[i][j] - maximum);
    for (int j = 0; j < tokens; j++) matrix[i][j] = expf(matrix[i][j] - maximum) / sum;
  }
  moved += 2L * tokens * tokens; /* reads S once, if a row fits on the chip, and writes P */

  for (int i = 0; i < tokens; i++)
    for (int d = 0; d < head_dim; d++) {
      output[i][d] = 0;
      for (int j = 0; j < tokens; j++) output[i][d] += matrix[i][j] * value[j][d];
    }
  moved += (long)tokens * tokens + 2L * tokens * head_dim; /* reads P and V, writes O */
}

/* What a row of queries has seen so far: chapter 2. */
struct state {
  float maximum, sum;
};

/* The online softmax of one row of queries and one tile of keys. */
static void attend(const row query, const row *key, const row *value, int keys, struct state *state,
                   row output) {
  float score[largest_tile], top = state->maximum;
  for (int j = 0; j < keys; j++) {
    score[j] = score_of(query, key[j]);
    top = fmaxf(top, score[j]);
  }
  const float factor = expf(state->maximum - top);
  state->maximum = top;
  state->sum *= factor;
  for (int d = 0; d < head_dim; d++) output[d] *= factor;
  for (int j = 0; j < keys; j++) {
    const float weight = expf(score[j] - top);
    state->sum += weight;
    for (int d = 0; d < head_dim; d++) output[d] += weight * value[j][d];
  }
}

/* A tile of queries stays on the chip while all keys and values pass by. */
static void keys_inside(const row *query, const row *key, const row *value, row *output, int rows,
                        int keys) {
  for (int i = 0; i < tokens; i += rows) {
    row q[largest_tile], k[largest_tile], v[largest_tile], o[largest_tile] = {{0}};
    struct state state[largest_tile];
    for (int r = 0; r < rows; r++) state[r] = (struct state){-INFINITY, 0};
    load(q, query + i, rows);
    for (int j = 0; j < tokens; j += keys) {
      load(k, key + j, keys);
      load(v, value + j, keys);
      for (int r = 0; r < rows; r++) attend(q[r], k, v, keys, &state[r], o[r]);
    }
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < head_dim; d++) o[r][d] /= state[r].sum;
    store(output + i, o, rows);
  }
}

/* A tile of keys and values stays on the chip while all queries and outputs pass by. */
static void keys_outside(const row *query, const row *key, const row *value, row *output, int rows,
                         int keys) {
  static struct state state[tokens];
  memset(output, 0, tokens * sizeof(row));
  for (int i = 0; i < tokens; i++) state[i] = (struct state){-INFINITY, 0};
  for (int j = 0; j < tokens; j += keys) {
    row q[largest_tile], k[largest_tile], v[largest_tile], o[largest_tile];
    load(k, key + j, keys);
    load(v, value + j, keys);
    for (int i = 0; i < tokens; i += rows) {
      load(q, query + i, rows);
      load(o, output + i, rows);
      moved += 4L * rows; /* maximum and sum, read and written */
      for (int r = 0; r < rows; r++) attend(q[r], k, v, keys, &state[i + r], o[r]);
      if (j + keys == tokens)
        for (int r = 0; r < rows; r++)
          for (int d = 0; d < head_dim; d++) o[r][d] /= state[i + r].sum;
      store(output + i, o, rows);
    }
  }
}

static float difference(const row *a, const row *b) {
  float most = 0;
  for (int i = 0; i < tokens; i++)
    for (int d = 0; d < head_dim; d++) most = fmaxf(most, fabsf(a[i][d] - b[i][d]));
  return most;
}

int main(int count, char **arguments) {
  static row query[tokens], key[tokens], value[tokens], expected[tokens], output[tokens];
  row *const inputs[] = {query, key, value};
  for (int n = 0; n < 3; n++)
    for (int i = 0; i < tokens; i++)
      for (int d = 0; d < head_dim; d++) inputs[n][i][d] = 2 * (float)rand() / (float)RAND_MAX - 1;

  standard(query, key, value, expected);
  const int loops = count > 1 && strcmp(arguments[1], "loops") == 0;
  if (!loops) printf("scores in memory:              %8ld numbers moved\n", moved);
  float worst = 0;
  for (int tile = loops ? 64 : 16; tile <= largest_tile; tile *= 2) {
    if (loops) {
      moved = 0;
      keys_outside(query, key, value, output, tile, tile);
      worst = fmaxf(worst, difference(output, expected));
      printf("tiles of %3d, keys outside:    %8ld numbers moved\n", tile, moved);
    }
    moved = 0;
    keys_inside(query, key, value, output, tile, tile);
    worst = fmaxf(worst, difference(output, expected));
    printf("tiles of %3d, keys inside:     %8ld numbers moved\n", tile, moved);
  }
  printf("outputs differ by less than 1e-6: %s\n", worst < 1e-6F ? "yes" : "no");
  return !(worst < 1e-6F);
}
