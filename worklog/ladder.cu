// The ladder's harness: checks every step against float64, then times them all.
//   ladder            check and time everything; figures as JSON on standard output
//   ladder --check    the small shapes alone, for compute-sanitizer
//   ladder --once K   launch step K once on the first timed shape, for a profiler
//
// Small shapes are checked in every row, the timed ones in sampled rows; what a step
// computed first it must compute again, bit for bit, in the timed runs.
#include "problem.cuh"

#include <algorithm>
#include <string.h>
#include <unistd.h>

static const step *const kSteps[] = {&k0_naive, &k1_tiled,       &k2_mma_sync, &k3_tma,
                                     &k4_wgmma, &k5_specialised, &k6_overlap};
static const int kStepCount = sizeof(kSteps) / sizeof(kSteps[0]);

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
