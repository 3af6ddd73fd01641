// Checks: outputs start as NaN between guard zones; no NaN may remain and no guard
// byte may change. A step's error is compared with that of plain 16-bit attention
// (scores, probabilities and output rounded to bf16), on the same rows.
#include "problem.cuh"

#include <algorithm>
#include <string.h>

CUtensorMap tile_map(const attention &a, const bf16 *tensor, int rows) {
  typedef CUresult encode_function(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                   const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                   const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static encode_function *encode = NULL;
  if (encode == NULL) {
    cudaDriverEntryPointQueryResult found;
    CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                          cudaEnableDefault, &found));
  }
  const cuuint64_t heads = a.heads, seqlen = a.seqlen, batch = a.batch;
  const cuuint64_t extents[4] = {kHeadDim, seqlen, heads, batch};
  const cuuint64_t strides[3] = {heads * kHeadDim * 2, kHeadDim * 2, seqlen * heads * kHeadDim * 2};
  const cuuint32_t box[4] = {64, (cuuint32_t)rows, 1, 1}, every[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)tensor, extents, strides, box,
             every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fprintf(stderr, "cuTensorMapEncodeTiled: error %d\n", status);
    exit(2);
  }
  return map;
}

// Numbers --------------------------------------------------------------------

static uint64_t random_bits(uint64_t *state)  // splitmix64
{
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static uint16_t bf16_bits(double x)  // to nearest, ties to even; x finite
{
  const float f = (float)x;
  uint32_t u;
  memcpy(&u, &f, 4);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static double bf16_value(uint16_t bits) {
  const uint32_t u = (uint32_t)bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static double rounded(double x) {
  return bf16_value(bf16_bits(x));
}

// Sums of four uniform numbers: mean 0, variance 1, normal enough for attention.
static std::vector<uint16_t> random_values(size_t count, uint64_t seed) {
  std::vector<uint16_t> values(count);
  for (uint16_t &value : values) {
    const uint64_t bits = random_bits(&seed);
    const uint64_t sum =
        (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    value = bf16_bits(((double)sum * 0x1p-16 - 2.0) * sqrt(3.0));
  }
  return values;
}

// A problem with its data, on host and device ----------------------------------

static const size_t kGuard = 4096;  // elements on either side of the output

static bf16 *upload(const std::vector<uint16_t> &values) {
  void *p;
  CUDA(cudaMalloc(&p, values.size() * 2));
  CUDA(cudaMemcpy(p, values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  return (bf16 *)p;
}

// Float64 attention of the chosen rows, and beside it plain 16-bit attention. The
// bound is what two roundings to bf16, of P and of O, can do at most (2^-8 of
// sum p |v| each), and a quarter more for the arithmetic in float32.
static void reference_rows(problem &p) {
  const attention &a = p.a;
  p.reference.assign(p.rows.size() * kHeadDim, 0.0);
  p.bound.assign(p.rows.size() * kHeadDim, 0.0);
  double squares = 0.0;
  std::vector<double> score(a.seqlen), plain_score(a.seqlen);
  std::vector<double> plain(kHeadDim);
  for (size_t i = 0; i < p.rows.size(); ++i) {
    const row at = p.rows[i];
    const int keys = a.causal ? at.row + 1 : a.seqlen;
    const uint16_t *q = &p.query[row_at(a, at.batch, at.row, at.head)];
    double top = -INFINITY, plain_top = -INFINITY;
    for (int j = 0; j < keys; ++j) {
      const uint16_t *k = &p.key[row_at(a, at.batch, j, at.head)];
      double sum = 0.0;
      for (int d = 0; d < kHeadDim; ++d) sum += bf16_value(q[d]) * bf16_value(k[d]);
      score[j] = sum / sqrt((double)kHeadDim);
      plain_score[j] = rounded(score[j]);
      top = fmax(top, score[j]);
      plain_top = fmax(plain_top, plain_score[j]);
    }
    double sum = 0.0, plain_sum = 0.0;
    for (int j = 0; j < keys; ++j) {
      sum += score[j] = exp(score[j] - top);
      plain_sum += plain_score[j] = exp(plain_score[j] - plain_top);
    }
    double *out = &p.reference[i * kHeadDim], *bound = &p.bound[i * kHeadDim];
    std::fill(plain.begin(), plain.end(), 0.0);
    for (int j = 0; j < keys; ++j) {
      const uint16_t *v = &p.value[row_at(a, at.batch, j, at.head)];
      const double weight = score[j] / sum;
      const double plain_weight = rounded(plain_score[j] / plain_sum);
      for (int d = 0; d < kHeadDim; ++d) {
        const double x = bf16_value(v[d]);
        out[d] += weight * x;
        bound[d] += weight * fabs(x) * 1.25 * 0x1p-7;
        plain[d] += plain_weight * x;
      }
    }
    for (int d = 0; d < kHeadDim; ++d) {
      const double error = rounded(plain[d]) - out[d];
      squares += error * error;
    }
  }
  p.plain_rms = sqrt(squares / (p.rows.size() * kHeadDim));
}

problem make_problem(int batch, int heads, int seqlen, bool causal, int samples) {
  problem p;
  p.a = {batch, heads, seqlen, causal, NULL, NULL, NULL, NULL, NULL};
  p.count = (size_t)batch * seqlen * heads * kHeadDim;
  const uint64_t seed = (uint64_t)seqlen << 32 | batch << 16 | heads << 8 | (causal ? 4 : 0);
  p.query = random_values(p.count, seed);
  p.key = random_values(p.count, seed + 1);
  p.value = random_values(p.count, seed + 2);
  p.out.resize(p.count + 2 * kGuard);
  p.a.query = upload(p.query);
  p.a.key = upload(p.key);
  p.a.value = upload(p.value);
  p.out_zone = upload(p.out);
  p.a.out = p.out_zone + kGuard;
  if (samples == 0) {
    for (int b = 0; b < batch; ++b)
      for (int h = 0; h < heads; ++h)
        for (int r = 0; r < seqlen; ++r) p.rows.push_back({b, r, h});
  } else {
    uint64_t state = seed + 3;
    for (int i = 0; i < samples; ++i) {
      const int ends[4] = {0, 127, 128, seqlen - 1};
      p.rows.push_back({(int)(random_bits(&state) % batch),
                        i < 4 ? ends[i] : (int)(random_bits(&state) % seqlen),
                        (int)(random_bits(&state) % heads)});
    }
  }
  reference_rows(p);
  return p;
}

void free_problem(problem &p) {
  CUDA(cudaFree((void *)p.a.query));
  CUDA(cudaFree((void *)p.a.key));
  CUDA(cudaFree((void *)p.a.value));
  CUDA(cudaFree(p.out_zone));
}

bool take_scores(const step *s, problem &p) {
  if (s != &k0_naive) return true;
  const size_t bytes = (size_t)p.a.batch * p.a.heads * p.a.seqlen * p.a.seqlen * 4;
  return bytes <= (size_t)5 << 30 && cudaMalloc(&p.a.scores, bytes) == cudaSuccess;
}

void drop_scores(problem &p) {
  CUDA(cudaFree(p.a.scores));
  p.a.scores = NULL;
}

// Checks ---------------------------------------------------------------------

void poison(problem &p) {
  CUDA(cudaMemset(p.out_zone, 0xff, (p.count + 2 * kGuard) * 2));  // NaN, all of it
}

void run(const step *s, const problem &p) {
  s->launch(p.a);
  CUDA(cudaGetLastError());
}

// Looks at the output as it stands; false, with a line that says why, if it is wrong.
static bool output_is_right(const step *s, problem &p, double *rms, bool report) {
  const attention &a = p.a;
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(p.out.data(), p.out_zone, p.out.size() * 2, cudaMemcpyDeviceToHost));
  char what[128];
  snprintf(what, sizeof(what), "%s, batch %d, heads %d, seqlen %d%s", s->name, a.batch, a.heads,
           a.seqlen, a.causal ? ", causal" : "");
  for (size_t i = 0; i < p.out.size(); ++i) {
    const bool guard = i < kGuard || i >= kGuard + p.count;
    const bool wrong = guard ? p.out[i] != 0xffff : (p.out[i] & 0x7fff) > 0x7f80;
    if (wrong) {
      if (report)
        fprintf(stderr, "FAILED %s: %s at element %lld\n", what, guard ? "a write" : "NaN",
                (long long)i - (long long)kGuard);
      return false;
    }
  }
  double squares = 0.0;
  for (size_t i = 0; i < p.rows.size(); ++i) {
    const row at = p.rows[i];
    const uint16_t *out = &p.out[kGuard + row_at(a, at.batch, at.row, at.head)];
    for (int d = 0; d < kHeadDim; ++d) {
      const double want = p.reference[i * kHeadDim + d];
      const double error = fabs(bf16_value(out[d]) - want);
      squares += error * error;
      if (!(error <= p.bound[i * kHeadDim + d])) {
        if (report)
          fprintf(stderr, "FAILED %s: (%d, %d, %d, %d) is %g, not %g\n", what, at.batch, at.row,
                  at.head, d, bf16_value(out[d]), want);
        return false;
      }
    }
  }
  *rms = sqrt(squares / (p.rows.size() * kHeadDim));
  if (!(*rms <= p.plain_rms)) {
    if (report)
      fprintf(stderr, "FAILED %s: rms error %g, plain 16-bit attention has %g\n", what, *rms,
              p.plain_rms);
    return false;
  }
  return true;
}

bool output_is_the_same(const step *s, problem &p, const std::vector<uint16_t> &checked) {
  CUDA(cudaMemcpy(p.out.data(), p.out_zone, p.out.size() * 2, cudaMemcpyDeviceToHost));
  if (p.out == checked) return true;
  fprintf(stderr, "FAILED %s: a timed run computed something else\n", s->name);
  return false;
}

bool check(const step *s, problem &p, double *rms) {
  poison(p);
  if (output_is_right(s, p, rms, false)) {
    fprintf(stderr, "FAILED: the check accepts an output that nothing has written\n");
    return false;
  }
  run(s, p);
  return output_is_right(s, p, rms, true);
}
