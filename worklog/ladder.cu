// The ladder's harness: checks every step against float64, then times them all.
//   ladder            check and time everything; figures as JSON on standard output
//   ladder --check    the small shapes alone, for compute-sanitizer
//   ladder --once K   launch step K once on the first timed shape, for a profiler
//
// Checks: small shapes in every row; the timed shapes in sampled rows. Outputs start
// as NaN between guard zones; no NaN may remain, no guard byte may change, and what
// the step computed first it must compute again, bit for bit, in the timed runs.
// A step's error is compared with that of plain 16-bit attention (scores,
// probabilities and output rounded to bf16), on the same rows.
#include "ladder.cuh"

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

static const step *const kSteps[] = {&k0_naive, &k1_tiled,       &k2_mma_sync, &k3_tma,
                                     &k4_wgmma, &k5_specialised, &k6_overlap};
static const int kStepCount = sizeof(kSteps) / sizeof(kSteps[0]);

#define CUDA(call)                                                                               \
  do {                                                                                           \
    const cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      exit(2);                                                                                   \
    }                                                                                            \
  } while (0)

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

struct row {
  int batch, row, head;
};

struct problem {
  attention a;
  size_t count;  // elements of a tensor
  std::vector<uint16_t> query, key, value, out;
  bf16 *out_zone;                 // kGuard, the output, kGuard
  std::vector<row> rows;          // those compared
  std::vector<double> reference;  // [row][kHeadDim]
  std::vector<double> bound;      // of the error of each, see reference_rows
  double plain_rms;               // the error of plain 16-bit attention
};

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

// `samples` rows, or all of them if that is 0.
static problem make_problem(int batch, int heads, int seqlen, bool causal, int samples) {
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

static void free_problem(problem &p) {
  CUDA(cudaFree((void *)p.a.query));
  CUDA(cudaFree((void *)p.a.key));
  CUDA(cudaFree((void *)p.a.value));
  CUDA(cudaFree(p.out_zone));
}

// K0's scores, for as long as it needs them. False if the card has no room.
static bool take_scores(const step *s, problem &p) {
  if (s != &k0_naive) return true;
  const size_t bytes = (size_t)p.a.batch * p.a.heads * p.a.seqlen * p.a.seqlen * 4;
  return bytes <= (size_t)5 << 30 && cudaMalloc(&p.a.scores, bytes) == cudaSuccess;
}

static void drop_scores(problem &p) {
  CUDA(cudaFree(p.a.scores));
  p.a.scores = NULL;
}

// Checks ---------------------------------------------------------------------

static void poison(problem &p) {
  CUDA(cudaMemset(p.out_zone, 0xff, (p.count + 2 * kGuard) * 2));  // NaN, all of it
}

static void run(const step *s, const problem &p) {
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

static bool output_is_the_same(const step *s, problem &p, const std::vector<uint16_t> &checked) {
  CUDA(cudaMemcpy(p.out.data(), p.out_zone, p.out.size() * 2, cudaMemcpyDeviceToHost));
  if (p.out == checked) return true;
  fprintf(stderr, "FAILED %s: a timed run computed something else\n", s->name);
  return false;
}

static bool check(const step *s, problem &p, double *rms) {
  poison(p);
  if (output_is_right(s, p, rms, false)) {
    fprintf(stderr, "FAILED: the check accepts an output that nothing has written\n");
    return false;
  }
  run(s, p);
  return output_is_right(s, p, rms, true);
}

// Timing ---------------------------------------------------------------------

static float timed(const step *s, const problem &p, cudaEvent_t from, cudaEvent_t to) {
  float milliseconds;
  CUDA(cudaEventRecord(from));
  run(s, p);
  CUDA(cudaEventRecord(to));
  CUDA(cudaEventSynchronize(to));
  CUDA(cudaEventElapsedTime(&milliseconds, from, to));
  return milliseconds;
}

// A round: 200 ms of warming up, so that clock and power settle to what the step
// draws and not to what the one before it drew; then ten runs (one if it is long).
static void time_round(const step *s, const problem &p, std::vector<float> &times) {
  cudaEvent_t from, to;
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  float spent = 0.0f, longest = 0.0f;
  while (spent < 200.0f) {
    longest = timed(s, p, from, to);
    spent += longest;
  }
  const int runs = longest > 30.0f ? 1 : 10;
  for (int i = 0; i < runs; ++i) times.push_back(timed(s, p, from, to));
  CUDA(cudaEventDestroy(from));
  CUDA(cudaEventDestroy(to));
}

static void print_step(const step *s, bool first) {
  cudaFuncAttributes attributes;
  CUDA(cudaFuncGetAttributes(&attributes, s->kernel));
  printf(
      "%s\n  {\"name\": \"%s\", \"idea\": \"%s\", \"threads\": %d, \"registers\": %d, "
      "\"shared_bytes\": %d, \"local_bytes\": %d}",
      first ? "" : ",", s->name, s->idea, s->threads, attributes.numRegs,
      (int)attributes.sharedSizeBytes + s->shared_bytes, (int)attributes.localSizeBytes);
}

int main(int argc, char **argv) {
  const struct {
    int batch, heads, seqlen;
  } small[] = {{2, 3, 128}, {1, 2, 384}, {2, 1, 1152}}, large[] = {{4, 16, 4096}, {1, 16, 16384}};
  const int kRounds = 4;

  if (argc == 3 && strcmp(argv[1], "--once") == 0) {
    problem p = make_problem(large[0].batch, large[0].heads, large[0].seqlen, false, 4);
    for (int i = 0; i < kStepCount; ++i)
      if (strcmp(kSteps[i]->name, argv[2]) == 0 && take_scores(kSteps[i], p)) {
        run(kSteps[i], p);
        CUDA(cudaDeviceSynchronize());
        return 0;
      }
    fprintf(stderr, "no step of that name\n");
    return 2;
  }
  const bool check_only = argc == 2 && strcmp(argv[1], "--check") == 0;
  if (argc > 1 && !check_only) {
    fprintf(stderr, "usage: ladder [--check | --once STEP]\n");
    return 2;
  }

  bool right = true;
  for (const auto &shape : small)
    for (int causal = 0; causal < 2; ++causal) {
      problem p = make_problem(shape.batch, shape.heads, shape.seqlen, causal, 0);
      for (int i = 0; i < kStepCount; ++i) {
        double rms;
        if (!take_scores(kSteps[i], p)) return 2;
        right = check(kSteps[i], p, &rms) && right;
        drop_scores(p);
      }
      free_problem(p);
    }
  fprintf(stderr, "small shapes: %s\n", right ? "right" : "WRONG");
  if (check_only || !right) return right ? 0 : 1;

  cudaDeviceProp device;
  int driver, runtime;
  CUDA(cudaGetDeviceProperties(&device, 0));
  CUDA(cudaDriverGetVersion(&driver));
  CUDA(cudaRuntimeGetVersion(&runtime));
  printf(
      "{\"gpu\": \"%s\", \"multiprocessors\": %d, \"cuda_driver\": %d, \"cuda_runtime\": %d,\n"
      " \"compiler\": \"nvcc %d.%d.%d\",\n \"steps\": [",
      device.name, device.multiProcessorCount, driver, runtime, __CUDACC_VER_MAJOR__,
      __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__);
  for (int i = 0; i < kStepCount; ++i) print_step(kSteps[i], i == 0);
  printf("],\n \"results\": [");

  bool first = true;
  for (const auto &shape : large)
    for (int causal = 0; causal < 2; ++causal) {
      problem p = make_problem(shape.batch, shape.heads, shape.seqlen, causal, 64);
      const double flops =
          (causal ? 2.0 : 4.0) * shape.seqlen * shape.seqlen * kHeadDim * shape.heads * shape.batch;
      double rms[kStepCount];
      bool fits[kStepCount];
      std::vector<float> times[kStepCount];
      std::vector<uint16_t> checked[kStepCount];
      for (int i = 0; i < kStepCount; ++i) {
        fits[i] = take_scores(kSteps[i], p);
        if (fits[i]) {
          right = check(kSteps[i], p, &rms[i]) && right;
          checked[i] = p.out;
        }
        drop_scores(p);
      }
      // The steps take turns, so that all see the same states of the card.
      for (int round = 0; round < kRounds && right; ++round)
        for (int i = 0; i < kStepCount; ++i)
          if (fits[i] && take_scores(kSteps[i], p)) {
            poison(p);
            time_round(kSteps[i], p, times[i]);
            drop_scores(p);
            if (round == kRounds - 1) right = output_is_the_same(kSteps[i], p, checked[i]) && right;
          }
      for (int i = 0; i < kStepCount && right; ++i) {
        if (!fits[i]) continue;
        std::vector<float> &t = times[i];
        std::sort(t.begin(), t.end());
        const double median = t[t.size() / 2];
        printf(
            "%s\n  {\"step\": \"%s\", \"batch\": %d, \"heads\": %d, \"seqlen\": %d, "
            "\"causal\": %s, \"runs\": %zu, \"ms\": %.4f, \"ms_low\": %.4f, "
            "\"ms_high\": %.4f, \"tflops\": %.1f, \"rms_error\": %.3e, "
            "\"plain_rms_error\": %.3e}",
            first ? "" : ",", kSteps[i]->name, shape.batch, shape.heads, shape.seqlen,
            causal ? "true" : "false", t.size(), median, t[t.size() / 10], t[t.size() * 9 / 10],
            flops / median * 1e-9, rms[i], p.plain_rms);
        first = false;
        fprintf(stderr, "%-16s seqlen %5d %-6s %8.3f ms %7.1f TFLOP/s, rms error %.2e (%.2e)\n",
                kSteps[i]->name, shape.seqlen, causal ? "causal" : "full", median,
                flops / median * 1e-9, rms[i], p.plain_rms);
      }
      free_problem(p);
    }
  printf("]}\n");
  return right ? 0 : 1;
}
