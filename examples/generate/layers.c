/* What a layer is made of, and the gradient of each part. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Goes over b in blocks of rows that stay in the cache, and over four of them at once, so that a
 * row of out is loaded and stored once for four multiplications. Compilers turn the innermost loop
 * into vector instructions. */
void matmul_add(float *restrict out, const float *restrict a, const float *restrict b, int64_t rows,
                int64_t inner, int64_t columns) {
  enum { BLOCK = 64 };
  for (int64_t start = 0; start < inner; start += BLOCK) {
    const int64_t end = start + BLOCK < inner ? start + BLOCK : inner;
    for (int64_t row = 0; row < rows; row++) {
      float *to = out + row * columns;
      const float *x = a + row * inner;
      int64_t i = start;
      for (; i + 4 <= end; i += 4) {
        const float *b0 = b + i * columns, *b1 = b0 + columns;
        const float *b2 = b1 + columns, *b3 = b2 + columns;
        for (int64_t c = 0; c < columns; c++)
          to[c] += x[i] * b0[c] + x[i + 1] * b1[c] + x[i + 2] * b2[c] + x[i + 3] * b3[c];
      }
      for (; i < end; i++)
        for (int64_t c = 0; c < columns; c++) to[c] += x[i] * b[i * columns + c];
    }
  }
}

void matmul(float *out, const float *a, const float *b, int64_t rows, int64_t inner,
            int64_t columns) {
  memset(out, 0, (size_t)(rows * columns) * sizeof *out);
  matmul_add(out, a, b, rows, inner, columns);
}

static float *transposed(const float *x, int64_t rows, int64_t columns) {
  float *out = allocate(rows * columns, sizeof *out);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t c = 0; c < columns; c++) out[c * rows + row] = x[row * columns + c];
  return out;
}

void matmul_backward(float *grad_a, float *grad_b, const float *grad_out, const float *a,
                     const float *b, int64_t count, int64_t inputs, int64_t outputs) {
  float *a_transposed = transposed(a, count, inputs),
        *b_transposed = transposed(b, inputs, outputs);
  matmul_add(grad_a, grad_out, b_transposed, count, outputs, inputs);
  matmul_add(grad_b, a_transposed, grad_out, inputs, count, outputs);
  free(a_transposed);
  free(b_transposed);
}

static float norm_factor(const float *x, int64_t width) {
  float squares = 0;
  for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
  return 1 / sqrtf(squares / (float)width + 1e-6F);
}

void norm(float *out, const float *x, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += width, out += width) {
    const float factor = norm_factor(x, width);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor;
  }
}

void norm_backward(float *grad_x, const float *grad_out, const float *x, int64_t rows,
                   int64_t width) {
  for (int64_t row = 0; row < rows; row++, x += width, grad_out += width, grad_x += width) {
    const float factor = norm_factor(x, width);
    float along = 0; /* the part along x, which the norm takes away */
    for (int64_t i = 0; i < width; i++) along += grad_out[i] * x[i];
    along *= factor * factor / (float)width;
    for (int64_t i = 0; i < width; i++) grad_x[i] += factor * (grad_out[i] - along * x[i]);
  }
}

void relu_squared(float *out, const float *x, int64_t count) {
  for (int64_t i = 0; i < count; i++) out[i] = x[i] > 0 ? x[i] * x[i] : 0;
}

void relu_squared_backward(float *grad_x, const float *grad_out, const float *x, int64_t count) {
  for (int64_t i = 0; i < count; i++) grad_x[i] = x[i] > 0 ? 2 * x[i] * grad_out[i] : 0;
}

/* (RoFormer, arXiv 2104.09864) */
struct rotary rotary_new(int64_t positions, int64_t head_dim) {
  const int64_t pairs = head_dim / 2;
  struct rotary rotary = {positions, allocate(positions * pairs, sizeof *rotary.cos),
                          allocate(positions * pairs, sizeof *rotary.sin)};
  for (int64_t position = 0; position < positions; position++)
    for (int64_t i = 0; i < pairs; i++) {
      const double angle = (double)position * pow(10000, -(double)i / (double)pairs);
      rotary.cos[position * pairs + i] = (float)cos(angle);
      rotary.sin[position * pairs + i] = (float)sin(angle);
    }
  return rotary;
}

void rotary_free(struct rotary *rotary) {
  free(rotary->cos);
  free(rotary->sin);
}

static void reserve(struct workspace *workspace, size_t size) {
  if (size <= workspace->size) return;
  free(workspace->memory);
  workspace->memory = allocate((int64_t)size, 1);
  workspace->size = size;
}

void attention(fa3_forward_args *args, struct workspace *workspace) {
  if (fa3_forward_workspace(args, &args->workspace_size)) fail("fa3_forward: %s", fa3_last_error());
  reserve(workspace, args->workspace_size);
  args->workspace = workspace->memory;
  if (fa3_forward(args)) fail("fa3_forward: %s", fa3_last_error());
}

void attention_backward(fa3_backward_args *args, struct workspace *workspace) {
  if (fa3_backward_workspace(args, &args->workspace_size))
    fail("fa3_backward: %s", fa3_last_error());
  reserve(workspace, args->workspace_size);
  args->workspace = workspace->memory;
  if (fa3_backward(args)) fail("fa3_backward: %s", fa3_last_error());
}
