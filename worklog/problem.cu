// Checks: outputs start as NaN between guard zones; no NaN may remain and no guard
// byte may change; what is right is said in reference.cu.
#include "problem.cuh"

#include <string.h>

static CUtensorMap make_map(const attention &a, const void *tensor, int rows, bool codes) {
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
  const cuuint64_t row_bytes = kHeadDim * (codes ? 1 : 2);
  const cuuint64_t extents[4] = {kHeadDim, seqlen, heads, batch};
  const cuuint64_t strides[3] = {heads * row_bytes, row_bytes, seqlen * heads * row_bytes};
  const cuuint32_t columns = codes ? 128 : 64;  // 128 bytes, the swizzle's width
  const cuuint32_t box[4] = {columns, (cuuint32_t)rows, 1, 1}, every[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, codes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             (void *)tensor, extents, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fprintf(stderr, "cuTensorMapEncodeTiled: error %d\n", status);
    exit(2);
  }
  return map;
}

CUtensorMap tile_map(const attention &a, const bf16 *tensor, int rows) {
  return make_map(a, tensor, rows, false);
}

CUtensorMap code_map(const attention &a, const uint8_t *codes, int rows) {
  return make_map(a, codes, rows, true);
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

// In [0, 1), by 16 of the bits.
static double uniform(uint64_t bits) {
  return (double)(bits & 0xffff) * 0x1p-16;
}

// Sums of four uniform numbers: mean 0, variance 1, normal enough for attention.
static double ordinary_value(uint64_t *state) {
  const uint64_t bits = random_bits(state);
  const double sum =
      uniform(bits) + uniform(bits >> 16) + uniform(bits >> 32) + uniform(bits >> 48);
  return (sum - 2.0) * sqrt(3.0);
}

// Normal numbers, by Box and Muller.
static double normal_value(uint64_t *state) {
  const double radius = sqrt(-2.0 * log((double)(random_bits(state) >> 11 | 1) * 0x1p-53));
  return radius * cos(2.0 * M_PI * (double)(random_bits(state) >> 11) * 0x1p-53);
}

static double value_with_outliers(uint64_t *state) {
  double x = normal_value(state);
  if (random_bits(state) % 1000 == 0) x += 10.0 * normal_value(state);
  return x;
}

static std::vector<uint16_t> random_values(size_t count, bool outliers, uint64_t seed) {
  const size_t kRun = 1 << 16;  // numbers that one thread draws
  std::vector<uint16_t> values(count);
  in_parallel((count + kRun - 1) / kRun, [&](size_t run) {
    uint64_t state = seed + ((uint64_t)run << 48);
    state = random_bits(&state);
    for (size_t i = run * kRun; i < count && i < (run + 1) * kRun; ++i)
      values[i] = bf16_bits(outliers ? value_with_outliers(&state) : ordinary_value(&state));
  });
  return values;
}

static std::vector<float> numbers(const std::vector<uint16_t> &values) {
  std::vector<float> x(values.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = (float)bf16_value(values[i]);
  return x;
}

// A problem with its data, on host and device ----------------------------------

static const size_t kGuard = 4096;  // elements on either side of the output

static bf16 *upload(const std::vector<uint16_t> &values) {
  void *p;
  CUDA(cudaMalloc(&p, values.size() * 2));
  CUDA(cudaMemcpy(p, values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  return (bf16 *)p;
}

// Random inputs on the device; `x` is what they are.
static bf16 *random_tensor(size_t count, bool outliers, uint64_t seed, std::vector<float> *x) {
  const std::vector<uint16_t> values = random_values(count, outliers, seed);
  *x = numbers(values);
  return upload(values);
}

static void allocate_codes(problem &p) {
  quantised &codes = p.a.codes;
  const size_t scales = p.count / kHeadDim / kBlockRows;
  for (uint8_t **tensor : {&codes.query, &codes.key, &codes.value})
    CUDA(cudaMalloc(tensor, p.count));
  for (float **tensor : {&codes.query_scale, &codes.key_scale, &codes.value_scale})
    CUDA(cudaMalloc(tensor, scales * sizeof(float)));
}

problem make_problem(int batch, int heads, int seqlen, bool causal, bool outliers, int samples) {
  problem p;
  p.a = {batch, heads, seqlen, causal, NULL, NULL, NULL, NULL, NULL, {}};
  p.count = (size_t)batch * seqlen * heads * kHeadDim;
  const uint64_t seed = (uint64_t)seqlen << 32 | batch << 16 | heads << 8 | (causal ? 4 : 0);
  p.a.query = random_tensor(p.count, outliers, seed, &p.inputs.query);
  p.a.key = random_tensor(p.count, outliers, seed + 1, &p.inputs.key);
  p.a.value = random_tensor(p.count, outliers, seed + 2, &p.inputs.value);
  p.out.resize(p.count + 2 * kGuard);
  p.out_zone = upload(p.out);
  p.a.out = p.out_zone + kGuard;
  allocate_codes(p);
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
  p.expected = expect_16_bits(p);
  return p;
}

void free_problem(problem &p) {
  CUDA(cudaFree((void *)p.a.query));
  CUDA(cudaFree((void *)p.a.key));
  CUDA(cudaFree((void *)p.a.value));
  CUDA(cudaFree(p.out_zone));
  quantised &codes = p.a.codes;
  for (uint8_t *tensor : {codes.query, codes.key, codes.value}) CUDA(cudaFree(tensor));
  for (float *tensor : {codes.query_scale, codes.key_scale, codes.value_scale})
    CUDA(cudaFree(tensor));
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

void quantise(const step *s, const problem &p) {
  if (s->quantise == NULL) return;
  s->quantise(p.a);
  CUDA(cudaGetLastError());
}

void run(const step *s, const problem &p) {
  s->launch(p.a);
  CUDA(cudaGetLastError());
}

static void download(problem &p) {
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(p.out.data(), p.out_zone, p.out.size() * 2, cudaMemcpyDeviceToHost));
}

static double rms_error(const problem &p, const expectation &expected) {
  double squares = 0.0;
  for (size_t i = 0; i < p.rows.size(); ++i) {
    const row at = p.rows[i];
    const uint16_t *out = &p.out[kGuard + row_at(p.a, at.batch, at.row, at.head)];
    for (int d = 0; d < kHeadDim; ++d) {
      const double error = bf16_value(out[d]) - expected.out[i * kHeadDim + d];
      squares += error * error;
    }
  }
  return sqrt(squares / (p.rows.size() * kHeadDim));
}

// Looks at the output as it stands; false, with a line that says why, if it is wrong.
static bool output_is_right(const step *s, problem &p, const expectation &expected, bool report) {
  const attention &a = p.a;
  download(p);
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
  for (size_t i = 0; i < p.rows.size(); ++i) {
    const row at = p.rows[i];
    const uint16_t *out = &p.out[kGuard + row_at(a, at.batch, at.row, at.head)];
    for (int d = 0; d < kHeadDim; ++d) {
      const double want = expected.out[i * kHeadDim + d];
      if (!(fabs(bf16_value(out[d]) - want) <= expected.bound[i * kHeadDim + d])) {
        if (report)
          fprintf(stderr, "FAILED %s: (%d, %d, %d, %d) is %g, not %g\n", what, at.batch, at.row,
                  at.head, d, bf16_value(out[d]), want);
        return false;
      }
    }
  }
  const double rms = rms_error(p, expected);
  if (!(rms <= expected.rms_bound)) {
    if (report)
      fprintf(stderr, "FAILED %s: rms error %g, more than %g\n", what, rms, expected.rms_bound);
    return false;
  }
  return true;
}

bool output_is_the_same(const step *s, problem &p, const std::vector<uint16_t> &checked) {
  download(p);
  if (p.out == checked) return true;
  fprintf(stderr, "FAILED %s: a timed run computed something else\n", s->name);
  return false;
}

bool check(const step *s, problem &p, errors *e) {
  poison(p);
  if (output_is_right(s, p, p.expected, false)) {
    fprintf(stderr, "FAILED: the check accepts an output that nothing has written\n");
    return false;
  }
  bool right;
  if (s->quantise == NULL) {
    run(s, p);
    right = output_is_right(s, p, p.expected, true);
    e->own = rms_error(p, p.expected);
  } else {
    quantise(s, p);
    values decoded;
    if (!codes_are_right(s, p, &decoded)) return false;
    const expectation expected = expect_codes(p, decoded);
    run(s, p);
    right = output_is_right(s, p, expected, true);
    e->own = rms_error(p, expected);
  }
  e->all = rms_error(p, p.expected);
  return right;
}
