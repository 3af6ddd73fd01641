// What is right: attention in float64, and how far from it a step may be.
//
// K0 to K6 are compared with plain 16-bit attention (scores, probabilities and output
// rounded to bf16) on the same rows: they may have no larger root mean square error. K7 and
// K8 compute from codes. The codes have to be the nearest to what they stand for, and the
// output is compared with float64 attention from just these codes.
#include "problem.cuh"

#include <algorithm>
#include <string.h>

static double rounded(double x)  // to bf16
{
  const float f = (float)x;
  uint32_t u;
  memcpy(&u, &f, 4);
  u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
  float nearest;
  memcpy(&nearest, &u, 4);
  return nearest;
}

// The scores of a row, and for each key the sum of the products' sizes. Returns the greatest.
static double row_scores(const problem &p, const values &x, row at, std::vector<double> &score,
                         std::vector<double> &size) {
  const attention &a = p.a;
  const float *q = &x.query[row_at(a, at.batch, at.row, at.head)];
  double top = -INFINITY;
  for (size_t j = 0; j < score.size(); ++j) {
    const float *k = &x.key[row_at(a, at.batch, (int)j, at.head)];
    double sum = 0.0, sizes = 0.0;
    for (int d = 0; d < kHeadDim; ++d) {
      const double product = (double)q[d] * k[d];
      sum += product;
      sizes += fabs(product);
    }
    score[j] = sum / sqrt((double)kHeadDim);
    size[j] = sizes / sqrt((double)kHeadDim);
    top = fmax(top, score[j]);
  }
  return top;
}

static expectation empty_expectation(const problem &p) {
  const size_t count = p.rows.size() * kHeadDim;
  return {std::vector<double>(count, 0.0), std::vector<double>(count, 0.0), 0.0};
}

// Of the sums of squares of each row.
static double root_of_mean(const std::vector<double> &squares) {
  double sum = 0.0;
  for (double one : squares) sum += one;
  return sqrt(sum / ((double)squares.size() * kHeadDim));
}

// The bound is what two roundings to bf16, of P and of O, can do at most (2^-8 of sum p |v|
// each), and a quarter more for the arithmetic in float32.
expectation expect_16_bits(const problem &p) {
  expectation e = empty_expectation(p);
  std::vector<double> squares(p.rows.size());
  in_parallel(p.rows.size(), [&](size_t i) {
    const row at = p.rows[i];
    const int keys = p.a.causal ? at.row + 1 : p.a.seqlen;
    std::vector<double> score(keys), size(keys), plain_score(keys);
    const double top = row_scores(p, p.inputs, at, score, size);
    double sum = 0.0, plain_sum = 0.0;
    const double plain_top = rounded(top);
    for (int j = 0; j < keys; ++j) {
      plain_sum += plain_score[j] = exp(rounded(score[j]) - plain_top);
      sum += score[j] = exp(score[j] - top);
    }
    double *out = &e.out[i * kHeadDim], *bound = &e.bound[i * kHeadDim], plain[kHeadDim] = {};
    for (int j = 0; j < keys; ++j) {
      const float *v = &p.inputs.value[row_at(p.a, at.batch, j, at.head)];
      const double weight = score[j] / sum, plain_weight = rounded(plain_score[j] / plain_sum);
      for (int d = 0; d < kHeadDim; ++d) {
        out[d] += weight * v[d];
        bound[d] += weight * fabs((double)v[d]) * 1.25 * 0x1p-7;
        plain[d] += plain_weight * v[d];
      }
    }
    for (int d = 0; d < kHeadDim; ++d) {
      const double error = rounded(plain[d]) - out[d];
      squares[i] += error * error;
    }
  });
  e.rms_bound = root_of_mean(squares);
  return e;
}

// What a step on codes may lose, with sums that keep 13 bits and cut off the rest:
// - P's code: 2^-4 of it, or 2^-18 of the row's greatest where it is too small for that;
// - a score: 2^-11 of the sum of its products' sizes (four instructions of 32 each);
// - O: 2^-12 of what is summed, in each instruction of 32 keys; and its rounding to bf16.
// The root mean square takes the first two as independent errors, with those of P spread
// evenly (a third of the square), and the third as half of the last bit each time.
expectation expect_codes(const problem &p, const values &decoded) {
  const double kCode = 0x1p-4, kSmallCode = 0x1p-18, kScore = 0x1p-11, kSum = 0x1p-12;
  expectation e = empty_expectation(p);
  std::vector<double> squares(p.rows.size());
  in_parallel(p.rows.size(), [&](size_t i) {
    const row at = p.rows[i];
    const int keys = p.a.causal ? at.row + 1 : p.a.seqlen;
    const double instructions = (keys + 31) / 32;
    std::vector<double> score(keys), size(keys);
    const double top = row_scores(p, decoded, at, score, size);
    double sum = 0.0;
    for (double &x : score) sum += x = exp(x - top);
    double *out = &e.out[i * kHeadDim], *bound = &e.bound[i * kHeadDim], square[kHeadDim] = {};
    for (int j = 0; j < keys; ++j) {
      const float *v = &decoded.value[row_at(p.a, at.batch, j, at.head)];
      const double weight = score[j] / sum, of_score = size[j] * kScore;
      for (int d = 0; d < kHeadDim; ++d) {
        const double one = weight * v[d];
        out[d] += one;
        bound[d] += fabs(one) * (kCode + 2.0 * of_score + instructions * kSum) +
                    kSmallCode / sum * fabs((double)v[d]);
        square[d] += one * one * (kCode * kCode / 3.0 + of_score * of_score);
      }
    }
    for (int d = 0; d < kHeadDim; ++d) {
      const double cut = instructions * kSum / 2.0 * out[d], last = out[d] * 0x1p-8;
      bound[d] += fabs(last);
      squares[i] += square[d] + cut * cut + last * last;
    }
  });
  e.rms_bound = root_of_mean(squares);
  return e;
}

// Codes ------------------------------------------------------------------------

static double code_value(uint8_t code)  // E4M3
{
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  double x = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
  if ((code & 0x7f) == 0x7f) x = NAN;
  return code & 0x80 ? -x : x;
}

static void hadamard(double (&x)[kHeadDim]) {
  for (int bit = 1; bit < kHeadDim; bit *= 2)
    for (int j = 0; j < kHeadDim; ++j)
      if ((j & bit) == 0) {
        const double low = x[j], high = x[j + bit];
        x[j] = low + high;
        x[j + bit] = low - high;
      }
}

// A block: each code is the nearest to its number (half a step of the format, and what
// float32 loses on the way), and the greatest is 448.
static bool block_is_right(const attention &a, const float *inputs, const uint8_t *codes,
                           float scale, bool rotated) {
  int greatest = 0;
  for (int row = 0; row < kBlockRows; ++row) {
    const size_t at = (size_t)row * a.heads * kHeadDim;
    double x[kHeadDim];
    for (int d = 0; d < kHeadDim; ++d)
      x[d] = inputs[at + d] * (rotated ? random_sign(d) / sqrt((double)kHeadDim) : 1.0);
    if (rotated) hadamard(x);
    for (int d = 0; d < kHeadDim; ++d) {
      const double error = fabs(code_value(codes[at + d]) * scale - x[d]);
      if (!(error <= fmax(fabs(x[d]) * 0x1p-4, scale * 0x1p-10) + scale * 448.0 * 0x1p-18))
        return false;
      greatest = std::max(greatest, codes[at + d] & 0x7f);
    }
  }
  return greatest == 0x7e;
}

// One tensor's codes, downloaded: the numbers that they stand for, and whether they are right.
static bool tensor_is_right(const problem &p, const std::vector<float> &inputs,
                            const uint8_t *codes, const float *scales, bool rotated,
                            std::vector<float> *decoded) {
  const attention &a = p.a;
  const int blocks = a.seqlen / kBlockRows;
  std::vector<uint8_t> code(p.count);
  std::vector<float> scale((size_t)a.batch * a.heads * blocks);
  CUDA(cudaMemcpy(code.data(), codes, code.size(), cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(scale.data(), scales, scale.size() * sizeof(float), cudaMemcpyDeviceToHost));
  float value[256];
  for (int i = 0; i < 256; ++i) value[i] = (float)code_value((uint8_t)i);
  decoded->resize(p.count);
  std::atomic<bool> right(true);
  in_parallel(scale.size(), [&](size_t of_block) {
    const int block = (int)(of_block % blocks), head = (int)(of_block / blocks % a.heads);
    const int64_t at = row_at(a, (int)(of_block / blocks / a.heads), block * kBlockRows, head);
    for (int row = 0; row < kBlockRows; ++row)
      for (int d = 0; d < kHeadDim; ++d) {
        const int64_t one = at + (int64_t)row * a.heads * kHeadDim + d;
        (*decoded)[one] = value[code[one]] * scale[of_block];
      }
    if (!block_is_right(a, &inputs[at], &code[at], scale[of_block], rotated)) right = false;
  });
  return right;
}

bool codes_are_right(const step *s, const problem &p, values *decoded) {
  const quantised &codes = p.a.codes;
  const bool right =
      tensor_is_right(p, p.inputs.query, codes.query, codes.query_scale, s->rotates,
                      &decoded->query) &&
      tensor_is_right(p, p.inputs.key, codes.key, codes.key_scale, s->rotates, &decoded->key) &&
      tensor_is_right(p, p.inputs.value, codes.value, codes.value_scale, false, &decoded->value);
  if (!right) fprintf(stderr, "FAILED %s: a block's codes\n", s->name);
  return right;
}
