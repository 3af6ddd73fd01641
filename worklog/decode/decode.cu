// The harness of flash decode: checks every step against float64, then times them.
//   decode            check and time; figures as JSON on standard output
//   decode --check    the small shapes alone, for compute-sanitizer
//
// Timed is a graph of launches, each on a cache of its own, so that all of it comes from
// memory: 256 MB at least between two uses of the same. The time of one is the graph's over
// their number.
#include "decode.cuh"
#include "parallel.cuh"

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#define CUDA(call)                                                                               \
  do {                                                                                           \
    const cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      exit(2);                                                                                   \
    }                                                                                            \
  } while (0)

static const step *const kSteps[] = {&d0_block, &d1_split, &d2_combine, &d3_packed, &d4_pages};
static const int kStepCount = sizeof(kSteps) / sizeof(kSteps[0]);

struct shape {
  int batch, heads_q, keys;
};

static uint64_t random_bits(uint64_t *state)  // splitmix64
{
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static float bf16_value(uint16_t bits) {
  const uint32_t u = (uint32_t)bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// Of both signs, between 2^-3 and 2: any 7 bits of mantissa, 4 exponents.
static std::vector<uint16_t> random_values(size_t count, uint64_t seed) {
  std::vector<uint16_t> values(count);
  for (uint16_t &value : values) {
    const uint64_t bits = random_bits(&seed);
    value = (uint16_t)((bits & 0x8000) | (124 + (bits >> 16 & 3)) << 7 | (bits & 0x7f));
  }
  return values;
}

template <typename T>
static T *upload(const std::vector<T> &values) {
  T *p;
  CUDA(cudaMalloc(&p, values.size() * sizeof(T)));
  CUDA(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

// A problem: the cache as it is, and the same in pages.
struct problem {
  decoding dense, paged;
  std::vector<uint16_t> query, key, value, out;
  std::vector<double> expected, bound;  // of each output
  int copies;                           // of the caches, for timing
  size_t cache_elements, pool_elements;
};

static const size_t kGuard = 1024;  // elements on either side of the output
static const uint16_t kNan = 0xffff;

// The pool: pages in random order, NaN where no key is.
static std::vector<uint16_t> make_pool(const std::vector<uint16_t> &cache, const decoding &d,
                                       const std::vector<int> &table) {
  const size_t row = (size_t)d.heads_k * kHeadDim;
  const int pages = (d.keys + kPageRows - 1) / kPageRows;
  std::vector<uint16_t> pool((table.size() + 1) * kPageRows * row, kNan);
  for (int b = 0; b < d.batch; ++b)
    for (int key = 0; key < d.keys; ++key) {
      const size_t to = (size_t)table[b * pages + key / kPageRows] * kPageRows + key % kPageRows;
      std::copy_n(&cache[((size_t)b * d.keys + key) * row], row, &pool[to * row]);
    }
  return pool;
}

static std::vector<int> make_page_table(const decoding &d) {
  std::vector<int> table((size_t)d.batch * ((d.keys + kPageRows - 1) / kPageRows));
  for (size_t i = 0; i < table.size(); ++i) table[i] = (int)i + 1;  // page 0 is nobody's
  uint64_t state = 7;
  for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[random_bits(&state) % i]);
  return table;
}

// The same values `copies` times, one after the other.
static bf16 *upload_copies(const std::vector<uint16_t> &values, int copies) {
  uint16_t *p;
  CUDA(cudaMalloc(&p, values.size() * 2 * copies));
  for (int i = 0; i < copies; ++i)
    CUDA(cudaMemcpy(p + i * values.size(), values.data(), values.size() * 2,
                    cudaMemcpyHostToDevice));
  return (bf16 *)p;
}

// Attention in float64 of one head. An output may be off by its rounding to bf16, and by 2^-16 of
// sum p |v|: scores of up to 30 have an error of 2^-19 in float32, exponentials one of 2^-22.
static void attend_in_double(const decoding &d, problem &p, int batch, int head) {
  const size_t first = ((size_t)batch * d.heads_q + head) * kHeadDim;
  const uint16_t *q = &p.query[first];
  double *out = &p.expected[first], *bound = &p.bound[first];
  std::vector<double> score(d.keys);
  double top = -INFINITY, sum = 0.0;
  for (int j = 0; j < d.keys; ++j) {
    const size_t at = (((size_t)batch * d.keys + j) * d.heads_k + head / kGroup) * kHeadDim;
    double x = 0.0;
    for (int c = 0; c < kHeadDim; ++c) x += (double)bf16_value(q[c]) * bf16_value(p.key[at + c]);
    score[j] = x / sqrt((double)kHeadDim);
    top = fmax(top, score[j]);
  }
  for (double &x : score) sum += x = exp(x - top);
  for (int j = 0; j < d.keys; ++j) {
    const size_t at = (((size_t)batch * d.keys + j) * d.heads_k + head / kGroup) * kHeadDim;
    for (int c = 0; c < kHeadDim; ++c) {
      const double one = score[j] / sum * bf16_value(p.value[at + c]);
      out[c] += one;
      bound[c] += fabs(one) * 0x1p-16;
    }
  }
  for (int c = 0; c < kHeadDim; ++c) bound[c] += fabs(out[c]) * 0x1p-8;
}

static problem make_problem(const shape &s, bool timed) {
  problem p;
  decoding &d = p.dense;
  d = {s.batch, s.heads_q, s.heads_q / kGroup, s.keys};
  const size_t outputs = (size_t)d.batch * d.heads_q * kHeadDim;
  p.cache_elements = (size_t)d.batch * d.keys * d.heads_k * kHeadDim;
  p.copies = timed ? 1 + (int)((256 << 20) / (p.cache_elements * 4)) : 1;
  p.query = random_values(outputs, s.keys);
  p.key = random_values(p.cache_elements, s.keys + 1);
  p.value = random_values(p.cache_elements, s.keys + 2);
  p.out.resize(outputs + 2 * kGuard);
  d.query = (bf16 *)upload(p.query);
  d.out = (bf16 *)upload(p.out) + kGuard;
  d.key = upload_copies(p.key, p.copies);
  d.value = upload_copies(p.value, p.copies);
  CUDA(cudaMalloc(&d.partials, (size_t)d.batch * d.heads_q * kMostSplits * sizeof(partial)));
  CUDA(cudaMalloc(&d.arrived, (size_t)d.batch * d.heads_q * sizeof(int)));
  CUDA(cudaMemset(d.arrived, 0, (size_t)d.batch * d.heads_q * sizeof(int)));
  const std::vector<int> table = make_page_table(d);
  const std::vector<uint16_t> keys = make_pool(p.key, d, table);
  p.pool_elements = keys.size();
  p.paged = d;
  p.paged.page_table = upload(table);
  p.paged.key = upload_copies(keys, p.copies);
  p.paged.value = upload_copies(make_pool(p.value, d, table), p.copies);
  p.expected.assign(outputs, 0.0);
  p.bound.assign(outputs, 0.0);
  in_parallel((size_t)d.batch * d.heads_q,
              [&](size_t i) { attend_in_double(d, p, (int)i / d.heads_q, (int)i % d.heads_q); });
  return p;
}

static void free_problem(const problem &p) {
  for (const void *one :
       {(const void *)p.dense.query, (const void *)(p.dense.out - kGuard),
        (const void *)p.dense.key, (const void *)p.dense.value, (const void *)p.dense.partials,
        (const void *)p.dense.arrived, (const void *)p.paged.page_table, (const void *)p.paged.key,
        (const void *)p.paged.value})
    CUDA(cudaFree((void *)one));
}

// The step's problem, on copy `copy` of the cache, in as many splits as fill the card once.
static decoding problem_of(const step *s, const problem &p, int copy) {
  decoding d = s->pages ? p.paged : p.dense;
  const size_t elements = s->pages ? p.pool_elements : p.cache_elements;
  d.key += copy * elements;
  d.value += copy * elements;
  int at_once, processors;
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, s->kernel, kThreads, 0));
  CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  const int rows = d.batch * d.heads_q / s->heads_of_block;  // of blocks
  const int most = std::min(kMostSplits, (d.keys + 63) / 64);
  d.splits = s->splits ? std::max(1, std::min(most, at_once * processors / rows)) : 1;
  return d;
}

// Checks -----------------------------------------------------------------------

static bool output_is_right(const step *s, problem &p, bool report) {
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(p.out.data(), p.dense.out - kGuard, p.out.size() * 2, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < kGuard; ++i)
    if (p.out[i] != kNan || p.out[p.out.size() - 1 - i] != kNan) {
      fprintf(stderr, "FAILED %s: a write beside the output\n", s->name);
      return false;
    }
  for (size_t i = 0; i < p.expected.size(); ++i) {
    const double got = bf16_value(p.out[kGuard + i]);
    if (!(fabs(got - p.expected[i]) <= p.bound[i])) {
      if (report)
        fprintf(stderr, "FAILED %s: %d keys, head %zu, column %zu is %g, not %g\n", s->name,
                p.dense.keys, i / kHeadDim, i % kHeadDim, got, p.expected[i]);
      return false;
    }
  }
  return true;
}

static bool check(const step *s, problem &p) {
  CUDA(cudaMemset(p.dense.out - kGuard, 0xff, p.out.size() * 2));
  if (output_is_right(s, p, false)) {
    fprintf(stderr, "FAILED: the check accepts an output that nothing has written\n");
    return false;
  }
  for (int i = 0; i < 2; ++i) s->launch(problem_of(s, p, 0), 0);  // twice: the counters are 0 again
  CUDA(cudaGetLastError());
  return output_is_right(s, p, true);
}

// Timing -----------------------------------------------------------------------

// Microseconds of one of `count` launches in a graph.
struct timer {
  cudaGraphExec_t graph;
  int count;
  std::vector<float> times;
};

static cudaStream_t stream;

template <typename Launch>
static timer capture(int count, const Launch &launch) {
  timer t = {NULL, count, {}};
  cudaGraph_t graph;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) launch(i);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&t.graph, graph, 0));
  CUDA(cudaGraphDestroy(graph));
  return t;
}

static void replay(timer &t) {
  cudaEvent_t from, to;
  float milliseconds;
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  CUDA(cudaEventRecord(from, stream));
  CUDA(cudaGraphLaunch(t.graph, stream));
  CUDA(cudaEventRecord(to, stream));
  CUDA(cudaEventSynchronize(to));
  CUDA(cudaEventElapsedTime(&milliseconds, from, to));
  CUDA(cudaEventDestroy(from));
  CUDA(cudaEventDestroy(to));
  t.times.push_back(milliseconds * 1000.0f / t.count);
}

static double median(timer &t) {
  std::sort(t.times.begin(), t.times.end());
  return t.times[t.times.size() / 2];
}

// The yardstick: how fast a gigabyte is read.
static __global__ void read_all(const uint4 *from, size_t count, uint32_t *to) {
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
       i += (size_t)gridDim.x * blockDim.x)
    sum += from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
  if (sum == 0x12345678) *to = sum;  // so that the compiler keeps the loads
}

static double read_bandwidth(void) {
  const size_t bytes = (size_t)1 << 30;
  uint4 *memory;
  CUDA(cudaMalloc(&memory, bytes));
  CUDA(cudaMemset(memory, 1, bytes));
  timer t = capture(1, [&](int) {
    read_all<<<132 * 16, 512, 0, stream>>>(memory, bytes / 16, (uint32_t *)memory);
  });
  for (int i = 0; i < 20; ++i) replay(t);
  CUDA(cudaFree(memory));
  return bytes / median(t) * 1e-3;
}

static bool measure(const shape &one, bool first) {
  problem p = make_problem(one, true);
  timer timers[kStepCount];
  bool right = true;
  for (int i = 0; i < kStepCount; ++i) {
    const step *s = kSteps[i];
    right = check(s, p) && right;
    const int count = std::max(p.copies, 20);
    timers[i] = capture(count, [&](int j) { s->launch(problem_of(s, p, j % p.copies), stream); });
  }
  for (int round = 0; round < 12; ++round)
    for (int i = 0; i < kStepCount; ++i) replay(timers[i]);
  for (int i = 0; i < kStepCount; ++i) right = output_is_right(kSteps[i], p, true) && right;
  const double bytes = p.cache_elements * 4.0;
  for (int i = 0; i < kStepCount; ++i) {
    const int splits = problem_of(kSteps[i], p, 0).splits;
    const double us = median(timers[i]);
    printf(
        "%s\n  {\"step\": \"%s\", \"batch\": %d, \"heads_q\": %d, \"heads_k\": %d, \"keys\": %d, "
        "\"splits\": %d, \"us\": %.2f, \"gb_per_s\": %.0f}",
        first ? "" : ",", kSteps[i]->name, one.batch, one.heads_q, p.dense.heads_k, one.keys,
        splits, us, bytes / us * 1e-3);
    fprintf(stderr, "%-12s batch %3d, %6d keys, %4d splits: %8.2f us, %5.0f GB/s\n",
            kSteps[i]->name, one.batch, one.keys, splits, us, bytes / us * 1e-3);
    first = false;
  }
  free_problem(p);
  return right;
}

int main(int argc, char **argv) {
  const shape small[] = {{1, 4, 1}, {2, 8, 37}, {3, 4, 1000}, {1, 32, 2049}};
  const shape large[] = {{1, 32, 1024}, {1, 32, 8192}, {1, 32, 65536}, {16, 32, 4096}};
  const bool check_only = argc == 2 && strcmp(argv[1], "--check") == 0;
  if (argc > 1 && !check_only) {
    fprintf(stderr, "usage: decode [--check]\n");
    return 2;
  }
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  bool right = true;
  for (const shape &one : small) {
    problem p = make_problem(one, false);
    for (int i = 0; i < kStepCount; ++i) right = check(kSteps[i], p) && right;
    free_problem(p);
  }
  fprintf(stderr, "small shapes: %s\n", right ? "right" : "WRONG");
  if (check_only || !right) return right ? 0 : 1;

  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  const double bandwidth = read_bandwidth();
  fprintf(stderr, "a read of 1 GiB: %.0f GB/s\n", bandwidth);
  printf(
      "{\"gpu\": \"%s\", \"multiprocessors\": %d, \"compiler\": \"nvcc %d.%d.%d\", "
      "\"read_gb_per_s\": %.0f,\n \"steps\": [",
      device.name, device.multiProcessorCount, __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__,
      __CUDACC_VER_BUILD__, bandwidth);
  for (int i = 0; i < kStepCount; ++i) {
    cudaFuncAttributes attributes;
    CUDA(cudaFuncGetAttributes(&attributes, kSteps[i]->kernel));
    printf("%s\n  {\"name\": \"%s\", \"idea\": \"%s\", \"threads\": %d, \"registers\": %d}",
           i ? "," : "", kSteps[i]->name, kSteps[i]->idea, kThreads, attributes.numRegs);
  }
  printf("],\n \"results\": [");
  for (size_t i = 0; i < sizeof(large) / sizeof(large[0]) && right; ++i)
    right = measure(large[i], i == 0) && right;
  printf("]}\n");
  return right ? 0 : 1;
}
