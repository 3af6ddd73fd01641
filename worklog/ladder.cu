// The ladder's harness: checks every step against float64, then times them all.
//   ladder            check and time everything; figures as JSON on standard output
//   ladder --check    the small shapes alone, for compute-sanitizer
//   ladder --quick    one round in place of two
//   ladder --once K   launch step K once on the first timed shape, for a profiler
//
// Small shapes are checked in every row, the timed ones in sampled rows; what a step
// computed first it must compute again, bit for bit, in the timed runs.
#include "problem.cuh"

#include <algorithm>
#include <string.h>
#include <unistd.h>

static const step *const kSteps[] = {&k0_naive,   &k1_tiled, &k2_mma_sync,
                                     &k3_tma,     &k4_wgmma, &k5_specialised,
                                     &k6_overlap, &k7_fp8,   &k8_incoherent};
static const int kStepCount = sizeof(kSteps) / sizeof(kSteps[0]);

// Timing ---------------------------------------------------------------------

static float timed(void (*call)(const step *, const problem &), const step *s, const problem &p) {
  static cudaEvent_t from = NULL, to = NULL;
  if (from == NULL) {
    CUDA(cudaEventCreate(&from));
    CUDA(cudaEventCreate(&to));
  }
  float milliseconds;
  CUDA(cudaEventRecord(from));
  call(s, p);
  CUDA(cudaEventRecord(to));
  CUDA(cudaEventSynchronize(to));
  CUDA(cudaEventElapsedTime(&milliseconds, from, to));
  return milliseconds;
}

struct timings {
  std::vector<float> run, quantise;  // milliseconds
};

// A round: 200 ms of warming up, so that clock and power settle to what the step
// draws and not to what the one before it drew; then ten runs (one if it is long).
static void time_round(const step *s, const problem &p, timings &times) {
  quantise(s, p);  // the codes are those of the step before
  float spent = 0.0f, longest = 0.0f;
  while (spent < 200.0f) {
    longest = timed(run, s, p);
    spent += longest;
  }
  const int runs = longest > 30.0f ? 1 : 10;
  for (int i = 0; i < runs; ++i) times.run.push_back(timed(run, s, p));
  if (s->quantise != NULL)
    for (int i = 0; i < runs; ++i) times.quantise.push_back(timed(quantise, s, p));
}

static double median(std::vector<float> &times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
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

struct shape {
  int batch, heads, seqlen;
};

// Every row of small problems.
static bool check_small_shapes(void) {
  const shape small[] = {{2, 3, 128}, {1, 2, 384}, {2, 1, 1152}};
  bool right = true;
  for (const shape &one : small)
    for (int causal = 0; causal < 2; ++causal) {
      problem p = make_problem(one.batch, one.heads, one.seqlen, causal, false, 0);
      for (int i = 0; i < kStepCount; ++i) {
        errors e;
        if (!take_scores(kSteps[i], p)) exit(2);
        right = check(kSteps[i], p, &e) && right;
        drop_scores(p);
      }
      free_problem(p);
    }
  fprintf(stderr, "small shapes: %s\n", right ? "right" : "WRONG");
  return right;
}

// The errors on inputs with outliers, as FlashAttention-3's paper has them.
static bool measure_errors(void) {
  problem p = make_problem(1, 16, 4096, false, true, 4096);
  bool right = true;
  printf(
      "\"outliers\": {\"batch\": %d, \"heads\": %d, \"seqlen\": %d, \"causal\": false, "
      "\"results\": [",
      p.a.batch, p.a.heads, p.a.seqlen);
  for (int i = 0; i < kStepCount; ++i) {
    errors e = {};
    if (!take_scores(kSteps[i], p)) exit(2);
    right = check(kSteps[i], p, &e) && right;
    drop_scores(p);
    printf("%s\n  {\"step\": \"%s\", \"rms_error\": %.3e, \"own_rms_error\": %.3e}", i ? "," : "",
           kSteps[i]->name, e.all, e.own);
    fprintf(stderr, "%-16s outliers: rms error %.2e, of its own arithmetic %.2e\n", kSteps[i]->name,
            e.all, e.own);
  }
  printf("]},\n ");
  free_problem(p);
  return right;
}

static void print_result(const step *s, const problem &p, timings &t, const errors &e, bool first) {
  const attention &a = p.a;
  const double flops = (a.causal ? 2.0 : 4.0) * a.seqlen * a.seqlen * kHeadDim * a.heads * a.batch;
  const double ms = median(t.run);
  printf(
      "%s\n  {\"step\": \"%s\", \"batch\": %d, \"heads\": %d, \"seqlen\": %d, "
      "\"causal\": %s, \"runs\": %zu, \"ms\": %.4f, \"ms_low\": %.4f, "
      "\"ms_high\": %.4f, \"tflops\": %.1f, \"rms_error\": %.3e, "
      "\"plain_rms_error\": %.3e",
      first ? "" : ",", s->name, a.batch, a.heads, a.seqlen, a.causal ? "true" : "false",
      t.run.size(), ms, t.run[t.run.size() / 10], t.run[t.run.size() * 9 / 10], flops / ms * 1e-9,
      e.all, p.expected.rms_bound);
  fprintf(stderr, "%-16s seqlen %5d %-6s %8.3f ms %7.1f TFLOP/s, rms error %.2e (%.2e)", s->name,
          a.seqlen, a.causal ? "causal" : "full", ms, flops / ms * 1e-9, e.all,
          p.expected.rms_bound);
  if (s->quantise != NULL) {
    const double quantise_ms = median(t.quantise);
    printf(", \"own_rms_error\": %.3e, \"quantise_ms\": %.4f", e.own, quantise_ms);
    fprintf(stderr, ", its own %.2e; quantised in %.3f ms", e.own, quantise_ms);
  }
  printf("}");
  fprintf(stderr, "\n");
}

// Checks and times all steps on one shape. They take turns, so that all see the same states
// of the card.
static bool measure(const shape &one, bool causal, int rounds, bool first) {
  problem p = make_problem(one.batch, one.heads, one.seqlen, causal, false, 64);
  bool right = true, fits[kStepCount];
  errors e[kStepCount];
  timings times[kStepCount];
  std::vector<uint16_t> checked[kStepCount];
  for (int i = 0; i < kStepCount; ++i) {
    fits[i] = take_scores(kSteps[i], p);
    if (fits[i]) {
      right = check(kSteps[i], p, &e[i]) && right;
      checked[i] = p.out;
    }
    drop_scores(p);
  }
  for (int round = 0; round < rounds && right; ++round)
    for (int i = 0; i < kStepCount; ++i)
      if (fits[i] && take_scores(kSteps[i], p)) {
        poison(p);
        time_round(kSteps[i], p, times[i]);
        drop_scores(p);
        if (round == rounds - 1) right = output_is_the_same(kSteps[i], p, checked[i]) && right;
      }
  for (int i = 0; i < kStepCount && right; ++i)
    if (fits[i]) {
      print_result(kSteps[i], p, times[i], e[i], first);
      first = false;
    }
  free_problem(p);
  return right;
}

static int run_once(const shape &one, const char *name) {
  problem p = make_problem(one.batch, one.heads, one.seqlen, false, false, 4);
  for (int i = 0; i < kStepCount; ++i)
    if (strcmp(kSteps[i]->name, name) == 0 && take_scores(kSteps[i], p)) {
      quantise(kSteps[i], p);
      run(kSteps[i], p);
      CUDA(cudaDeviceSynchronize());
      return 0;
    }
  fprintf(stderr, "no step of that name\n");
  return 2;
}

int main(int argc, char **argv) {
  const shape large[] = {{4, 16, 4096}, {1, 16, 16384}};
  if (argc == 3 && strcmp(argv[1], "--once") == 0) return run_once(large[0], argv[2]);
  const bool check_only = argc == 2 && strcmp(argv[1], "--check") == 0;
  const bool quick = argc == 2 && strcmp(argv[1], "--quick") == 0;
  if (argc > 1 && !check_only && !quick) {
    fprintf(stderr, "usage: ladder [--check | --quick | --once STEP]\n");
    return 2;
  }
  bool right = check_small_shapes();
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
  printf("],\n ");
  right = measure_errors();
  printf("\"results\": [");
  bool first = true;
  for (const shape &one : large)
    for (int causal = 0; causal < 2 && right; ++causal) {
      right = measure(one, causal, quick ? 1 : 2, first);
      first = false;
    }
  printf("]}\n");
  return right ? 0 : 1;
}
