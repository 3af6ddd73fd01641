/* fa3 bench: how fast. */
#include <argp.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_cell.h"
#include "bench_report.h"
#include "commands.h"
#include "cuda.h"
#include "device.h"
#include "dtype.h"
#include "failure.h"
#include "numbers.h"
#include "path.h"
#include "progress.h"

/* What is 0 has a default. */
struct bench_options {
  struct device_options device;
  int64_t batch;
  int64_t heads;
  int64_t heads_k;
  int64_t seqlens[MAX_LIST];
  size_t seqlen_count;
  int64_t head_dims[MAX_LIST];
  size_t head_dim_count;
  fa3_dtype dtypes[MAX_DTYPES]; /* with decode of the cache */
  size_t dtype_count;
  bool causal;
  bool backward;
  bool deterministic;
  bool decode;
  int64_t page_size;
  int64_t repeat;
  bool json;
  const char *plot; /* the file, or null */
};

enum {
  KEY_BATCH = 0x500,
  KEY_HEADS,
  KEY_HEADS_K,
  KEY_SEQLEN,
  KEY_HEAD_DIM,
  KEY_DTYPE,
  KEY_CAUSAL,
  KEY_BACKWARD,
  KEY_DETERMINISTIC,
  KEY_DECODE,
  KEY_PAGE_SIZE,
  KEY_REPEAT,
  KEY_JSON,
  KEY_PLOT
};

static const struct argp_option options[] = {
    {.doc = "Shapes (LIST: one or more, with commas between them):", .group = 1},
    {.name = "batch",
     .key = KEY_BATCH,
     .arg = "N",
     .doc = "Sequences (default: 1; on a GPU 16384/seqlen)"},
    {.name = "heads",
     .key = KEY_HEADS,
     .arg = "N",
     .doc = "Query heads (default: 8; on a GPU 2048/head_dim)"},
    {.name = "heads-k",
     .key = KEY_HEADS_K,
     .arg = "N",
     .doc = "Key and value heads (default: as many as query heads)"},
    {.name = "seqlen",
     .key = KEY_SEQLEN,
     .arg = "LIST",
     .doc = "Of query and key; 64k is 65536 (default: 512,2048,4096, with --backward 512,2048; "
            "on a GPU 512,2048,8192)"},
    {.name = "head-dim",
     .key = KEY_HEAD_DIM,
     .arg = "LIST",
     .doc = "Multiples of 8 up to 256 (default: 64,128; on a GPU 64,128,256)"},
    {.name = "dtype",
     .key = KEY_DTYPE,
     .arg = "LIST",
     .doc = "Of fp32, fp16, bf16, or float32 and so on (default: bf16,fp32; on a GPU bf16)"},
    {.name = "causal", .key = KEY_CAUSAL, .doc = "With the causal mask, counted as half the work"},
    {.name = "backward",
     .key = KEY_BACKWARD,
     .doc = "The backward pass, counted as 2.5 times the work"},
    {.name = "deterministic",
     .key = KEY_DETERMINISTIC,
     .doc = "With --backward: ask for gradients that are bitwise the same every time; they are "
            "without it too"},
    {.name = "decode",
     .key = KEY_DECODE,
     .doc = "One query of each sequence and a cache of --seqlen keys (default: 1024,8192,32768), "
            "counted in bytes of the cache, on the CPU beside a plain read of it; --dtype is the "
            "cache's, e4m3 too (default: bf16,fp32,e4m3; on a GPU bf16), and --head-dim 128"},
    {.name = "page-size",
     .key = KEY_PAGE_SIZE,
     .arg = "N",
     .doc = "With --decode: a cache in pages of N keys, in random order"},
    {.doc = "Measuring:", .group = 7},
    {.name = "repeat",
     .key = KEY_REPEAT,
     .arg = "N",
     .doc = "Timed runs, after one to warm up (default: 10)"},
    {.name = "json", .key = KEY_JSON, .doc = "Print JSON"},
    {.name = "plot",
     .key = KEY_PLOT,
     .arg = "FILE.svg",
     .doc = "Draw the speeds too, as a picture that a browser shows"},
    {0}};

static void parse_dtypes(const char *list, struct bench_options *bench, struct argp_state *state) {
  bench->dtype_count = 0;
  for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
    char name[12];
    (void)snprintf(name, sizeof name, "%.*s", (int)strcspn(at, ","), at);
    fa3_dtype dtype = strcmp(name, "e4m3") == 0 ? FA3_FLOAT8_E4M3 : dtype_from_name(name);
    if (!dtype || bench->dtype_count == MAX_DTYPES)
      argp_error(state,
                 "--dtype %s: expected fp32, fp16 or bf16, or with --decode e4m3, with commas "
                 "between them",
                 list);
    bench->dtypes[bench->dtype_count++] = dtype;
  }
}

static void parse_positive(const char *option, const char *text, int64_t *value,
                           struct argp_state *state) {
  if (!parse_integer(text, 1, INT32_MAX, value))
    argp_error(state, "--%s %s: expected a number of 1 or more", option, text);
}

static void parse_seqlens(const char *list, struct bench_options *bench, struct argp_state *state) {
  if (!parse_integers(list, 1, INT32_MAX, bench->seqlens, MAX_LIST, &bench->seqlen_count))
    argp_error(state, "--seqlen %s: expected up to %d numbers from 1 to %d with commas between",
               list, MAX_LIST, INT32_MAX);
}

static void parse_head_dims(const char *list, struct bench_options *bench,
                            struct argp_state *state) {
  bool good = parse_integers(list, 8, 256, bench->head_dims, MAX_LIST, &bench->head_dim_count);
  for (size_t i = 0; good && i < bench->head_dim_count; i++) good = bench->head_dims[i] % 8 == 0;
  if (!good)
    argp_error(state,
               "--head-dim %s: expected up to %d multiples of 8 up to 256 with commas between",
               list, MAX_LIST);
}

static void check_decode(const struct bench_options *bench, struct argp_state *state) {
  if (bench->page_size && !bench->decode) argp_error(state, "--page-size is for --decode");
  for (size_t i = 0; i < bench->dtype_count; i++)
    if (bench->dtypes[i] == FA3_FLOAT8_E4M3 && !bench->decode)
      argp_error(state, "--dtype e4m3 is for --decode");
  if (bench->decode && (bench->backward || bench->causal || bench->plot))
    argp_error(state, "--%s is not for --decode",
               bench->backward ? "backward"
               : bench->causal ? "causal"
                               : "plot");
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct bench_options *bench = state->input;
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &bench->device;
      return 0;
    case KEY_BATCH:
      parse_positive("batch", arg, &bench->batch, state);
      return 0;
    case KEY_HEADS:
      parse_positive("heads", arg, &bench->heads, state);
      return 0;
    case KEY_HEADS_K:
      parse_positive("heads-k", arg, &bench->heads_k, state);
      return 0;
    case KEY_SEQLEN:
      parse_seqlens(arg, bench, state);
      return 0;
    case KEY_HEAD_DIM:
      parse_head_dims(arg, bench, state);
      return 0;
    case KEY_DTYPE:
      parse_dtypes(arg, bench, state);
      return 0;
    case KEY_CAUSAL:
      bench->causal = true;
      return 0;
    case KEY_BACKWARD:
      bench->backward = true;
      return 0;
    case KEY_DETERMINISTIC:
      bench->deterministic = true;
      return 0;
    case KEY_DECODE:
      bench->decode = true;
      return 0;
    case KEY_PAGE_SIZE:
      parse_positive("page-size", arg, &bench->page_size, state);
      return 0;
    case KEY_REPEAT:
      parse_positive("repeat", arg, &bench->repeat, state);
      return 0;
    case KEY_JSON:
      bench->json = true;
      return 0;
    case KEY_PLOT:
      if (!path_has_suffix(arg, ".svg")) argp_error(state, "--plot %s: expected a .svg file", arg);
      bench->plot = arg;
      return 0;
    case ARGP_KEY_END:
      if (bench->heads && bench->heads_k && bench->heads % bench->heads_k)
        argp_error(state, "--heads-k %" PRId64 ": expected a divisor of --heads %" PRId64,
                   bench->heads_k, bench->heads);
      if (bench->deterministic && !bench->backward)
        argp_error(state, "--deterministic is for --backward");
      check_decode(bench, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

static size_t cell_count(const struct bench_options *bench) {
  return bench->seqlen_count * bench->head_dim_count * bench->dtype_count;
}

/* The cells in the order they are printed. */
static struct bench_cell cell_at(const struct bench_options *bench, size_t index) {
  const bool cpu = bench->device.device.type == FA3_CPU;
  struct bench_cell cell = {.device = bench->device.device,
                            .batch = bench->batch,
                            .heads = bench->heads,
                            .heads_k = bench->heads_k,
                            .causal = bench->causal,
                            .backward = bench->backward,
                            .deterministic = bench->deterministic,
                            .num_threads = bench->device.num_threads};
  cell.seqlen = bench->seqlens[index % bench->seqlen_count];
  if (bench->decode) {
    cell.keys = cell.seqlen;
    cell.seqlen = 1;
    cell.page_size = bench->page_size;
    if (!cell.batch) cell.batch = 1;
  }
  index /= bench->seqlen_count;
  cell.head_dim = bench->head_dims[index % bench->head_dim_count];
  cell.dtype = cell.cache_dtype = bench->dtypes[index / bench->head_dim_count];
  if (cell.dtype == FA3_FLOAT8_E4M3) cell.dtype = FA3_BFLOAT16;
  if (!cell.batch) cell.batch = cpu || cell.seqlen > 16384 ? 1 : 16384 / cell.seqlen;
  if (!cell.heads) cell.heads = cpu ? 8 : 2048 / cell.head_dim;
  if (!cell.heads_k) cell.heads_k = cell.heads;
  return cell;
}

/* Not every pass has kernels for every head dim. */
static bool takes_next_head_dim(const struct bench_options *given) {
  struct bench_options bench = *given;
  bench.head_dim_count++;
  const struct bench_cell cell = cell_at(&bench, bench.seqlen_count * given->head_dim_count);
  return !bench_check_size(&cell) && bench_supported(&cell) == FA3_OK;
}

/* With the defaults for a device: on a GPU the setting of the FlashAttention papers, 16384 tokens
 * in all and a hidden size of 2048; on the CPU what takes some seconds on two cores. */
static struct bench_options with_defaults(const struct bench_options *given, fa3_device device) {
  static const int64_t seqlens[2][3] = {{512, 2048, 8192}, {512, 2048, 4096}};
  static const int64_t keys[3] = {1024, 8192, 32768};
  static const int64_t head_dims[] = {64, 128, 256};
  const bool cpu = device.type == FA3_CPU;
  struct bench_options bench = *given;
  bench.device.device = device;
  if (!bench.seqlen_count) {
    bench.seqlen_count = cpu && bench.backward ? 2 : 3;
    memcpy(bench.seqlens, bench.decode ? keys : seqlens[cpu], sizeof keys);
  }
  if (!bench.head_dim_count) {
    bench.head_dim_count = 1;
    memcpy(bench.head_dims, head_dims, sizeof head_dims);
    if (bench.decode) bench.head_dims[0] = 128;
  }
  if (!bench.dtype_count) {
    bench.dtype_count = !cpu ? 1 : bench.decode ? 3 : 2;
    bench.dtypes[0] = FA3_BFLOAT16;
    bench.dtypes[1] = FA3_FLOAT32;
    bench.dtypes[2] = FA3_FLOAT8_E4M3;
  }
  if (!given->head_dim_count && !bench.decode)
    while (bench.head_dim_count < (cpu ? 2 : 3) && takes_next_head_dim(&bench))
      bench.head_dim_count++;
  return bench;
}

/* Whether a device takes all cells. */
static fa3_status takes(fa3_device device, const void *given) {
  const struct bench_options bench = with_defaults(given, device);
  for (size_t i = 0; i < cell_count(&bench); i++) {
    struct bench_cell cell = cell_at(&bench, i);
    fa3_status status = bench_supported(&cell);
    if (status) return status;
  }
  return FA3_OK;
}

/* Before it is known which device that is. */
static int check_sizes(const struct bench_options *given) {
  static const fa3_device devices[] = {{FA3_CPU, 0}, {FA3_CUDA, 0}};
  for (int d = 0; d < 2; d++) {
    const struct bench_options bench = with_defaults(given, devices[d]);
    for (size_t i = 0; i < cell_count(&bench); i++) {
      struct bench_cell cell = cell_at(&bench, i);
      TRY(bench_check_size(&cell));
    }
  }
  return 0;
}

static int run_cells(const struct bench_options *bench, struct report *report) {
  struct progress progress;
  double total = 0;
  for (size_t i = 0; i < cell_count(bench); i++) {
    struct bench_cell cell = cell_at(bench, i);
    total += bench_flops(&cell) * (double)(bench->repeat + 1);
  }
  progress_begin(&progress, "bench", total);
  for (size_t i = 0; i < cell_count(bench); i++) {
    struct bench_cell cell = cell_at(bench, i);
    struct bench_times times;
    int code = bench_run(&cell, bench->repeat, &progress, &times);
    progress_clear(&progress);
    if (code) return code;
    report_cell(report, &cell, &times);
  }
  return 0;
}

static int run_bench(const struct bench_options *given) {
  fa3_device device;
  TRY(check_sizes(given));
  int code = device_choose(&given->device, takes, given, &device);
  if (code) return code == EXIT_INPUT ? EXIT_USAGE : code; /* the options are the input */
  const struct bench_options bench = with_defaults(given, device);
  static struct report report;
  report.json = bench.json;
  report.decode = bench.decode;
  report.backward = bench.backward;
  report.deterministic = bench.deterministic;
  report.repeat = bench.repeat;
  report.num_threads = bench.device.num_threads;
  if (bench.plot) TRY(output_file_begin(bench.plot, &report.plot));
  report_begin(&report, device);
  code = run_cells(&bench, &report);
  if (!code) code = report_end(&report);
  if (report.plot.path) output_file_discard(&report.plot);
  yyjson_mut_doc_free(report.document);
  return code;
}

int command_bench(int argc, char **argv) {
  static const struct argp_child children[] = {{&device_argp, 0, NULL, 0}, {0}};
  static const struct argp argp = {
      options,
      parse,
      NULL,
      "Measure speed on random tensors, after a check against the float64 reference\v"
      "Every combination of the lists is measured. The work is 4 * batch * heads * seqlen^2 * "
      "head_dim floating point operations, half of that "
      "with --causal, and 2.5 times that with --backward. The spread is that of the middle half of "
      "the runs, relative to the median. "
      "All runs read the same tensors, so what fits the caches stays there. With --decode on the "
      "CPU a run is "
      "as many calls as take 2 ms, and as many plain reads of the cache on the same number of "
      "threads follow each "
      "run; the ratio is the median of the runs'. On a GPU a run is as "
      "many calls as take 5 ms, one after the other, and events on the GPU time it.",
      children,
      NULL,
      NULL};
  struct bench_options bench = {.repeat = 10};
  if (argp_parse(&argp, argc, argv, 0, NULL, &bench)) return fail(EXIT_USAGE, "%m");
  int code = run_bench(&bench);
  cuda_close();
  return code;
}
