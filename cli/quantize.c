/* fa3 quantize: query, key and value in files become E4M3 codes and scales. */
#include <argp.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "coded.h"
#include "commands.h"
#include "cuda.h"
#include "failure.h"
#include "numbers.h"
#include "path.h"
#include "saved_tensor.h"
#include "source_options.h"

struct quantize_options {
  struct attention_options attention; /* its sources and rules alone */
  struct device_options device;
  const char *out;
  int64_t seed; /* -1: not given */
  struct coding coding;
  bool quiet;
};

enum { KEY_SOURCES = 0x100 };
enum { KEY_OUT = 0x500, KEY_ROWS, KEY_ROTATE, KEY_SEED, KEY_MEAN, KEY_QUIET };

static const struct argp_option options[] = {
    {.doc = "Tensors:", .group = 1},
    {.name = "q",
     .key = KEY_SOURCES + TENSOR_query,
     .arg = "TENSOR",
     .doc = "Query: (batch, seqlen, heads, head_dim), or 3-d without batch"},
    {.name = "k", .key = KEY_SOURCES + TENSOR_key, .arg = "TENSOR", .doc = "Key"},
    {.name = "v", .key = KEY_SOURCES + TENSOR_value, .arg = "TENSOR", .doc = "Value"},
    {.name = "cu-seqlens-q",
     .key = KEY_SOURCES + TENSOR_cu_seqlens_q,
     .arg = "LIST",
     .doc = "Where each sequence of a packed query (total, heads, head_dim) begins, and the total"},
    {.name = "cu-seqlens-k",
     .key = KEY_SOURCES + TENSOR_cu_seqlens_k,
     .arg = "LIST",
     .doc = "Where each sequence of a packed key and value begins, and the total"},
    {.doc = "Codes and scales:", .group = 2},
    {.name = "out",
     .key = KEY_OUT,
     .arg = "FILE",
     .doc = "The .safetensors file that gets query, query_scale, query_scale_rows and so on"},
    {.name = "rows",
     .key = KEY_ROWS,
     .arg = "N|all|tensor",
     .doc = "How many rows of a head share a scale (default: 128); all: those of a sequence; "
            "tensor: one scale for everything"},
    {.name = "rotate",
     .key = KEY_ROTATE,
     .doc = "Rotate query and key by random signs and a Hadamard transform, which spreads "
            "outliers; scores stay as they are"},
    {.name = "seed", .key = KEY_SEED, .arg = "N", .doc = "Of the signs (default: 0)"},
    {.name = "subtract-mean",
     .key = KEY_MEAN,
     .doc = "Take each head's mean off the keys; the output stays as it is, but not with a "
            "softcap or a sink, and the log-sum-exp does not"},
    {.name = "quiet", .key = KEY_QUIET, .doc = "Print nothing of what was written"},
    {0}};

static void check(const struct quantize_options *quantize, struct argp_state *state) {
  bool any = quantize->attention.rules.container;
  for (int i = 0; i < INPUTS; i++) any = any || quantize->attention.sources[inputs[i]];
  if (!any) argp_error(state, "--q, --k and --v are missing, and there is no --in");
  if (!quantize->out) argp_error(state, "--out is missing");
  if (quantize->out && !path_has_suffix(quantize->out, ".safetensors"))
    argp_error(state, "--out %s: expected a .safetensors file: .npy has no type for E4M3",
               quantize->out);
  if (quantize->seed >= 0 && !quantize->coding.rotate) argp_error(state, "--seed needs --rotate");
}

static void parse_rows(const char *text, int64_t *rows, struct argp_state *state) {
  if (strcmp(text, "all") == 0)
    *rows = SCALE_PER_SEQUENCE;
  else if (strcmp(text, "tensor") == 0)
    *rows = SCALE_PER_TENSOR;
  else if (!parse_integer(text, 1, INT64_MAX, rows))
    argp_error(state, "--rows %s: expected a number of 1 or more, all or tensor", text);
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct quantize_options *quantize = state->input;
  if (key >= KEY_SOURCES && key < KEY_SOURCES + TENSORS) {
    quantize->attention.sources[key - KEY_SOURCES] = arg;
    return 0;
  }
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &quantize->attention.rules;
      state->child_inputs[1] = &quantize->device;
      return 0;
    case KEY_OUT:
      quantize->out = arg;
      return 0;
    case KEY_ROWS:
      parse_rows(arg, &quantize->coding.rows, state);
      return 0;
    case KEY_ROTATE:
      quantize->coding.rotate = true;
      return 0;
    case KEY_SEED:
      if (!parse_integer(arg, 0, INT64_MAX, &quantize->seed))
        argp_error(state, "--seed %s: expected a number of 0 or more", arg);
      quantize->coding.seed = (uint64_t)quantize->seed;
      return 0;
    case KEY_MEAN:
      quantize->coding.subtract_mean = true;
      return 0;
    case KEY_QUIET:
      quantize->quiet = true;
      return 0;
    case ARGP_KEY_END:
      check(quantize, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

/* What is not in the files, or is said of a tensor that is not there. */
static int check_given(const struct quantize_options *quantize, const struct operands *operands) {
  const struct loaded_tensor *loaded = operands->loaded;
  const bool query = loaded[TENSOR_query].given, key = loaded[TENSOR_key].given;
  const bool value = loaded[TENSOR_value].given;
  if (!query && !key && !value)
    return fail(EXIT_INPUT, "%s: has no tensor 'query', 'key' or 'value'",
                quantize->attention.rules.container);
  if (quantize->coding.rotate && !query && !key)
    return fail(EXIT_USAGE, "--rotate: there is no query and no key");
  if (quantize->coding.subtract_mean && !key)
    return fail(EXIT_USAGE, "--subtract-mean: there is no key");
  if (loaded[TENSOR_cu_seqlens_q].given && !query)
    return fail(EXIT_USAGE, "--cu-seqlens-q: there is no query");
  if (loaded[TENSOR_cu_seqlens_k].given && !key && !value)
    return fail(EXIT_USAGE, "--cu-seqlens-k: there is no key and no value");
  return 0;
}

/* On a GPU the library does not look at them. */
static int check_starts(const struct operands *operands, enum tensor tensor) {
  const fa3_forward_args *forward = &operands->forward.args.forward;
  const int64_t rows = argument_in(forward, find_argument(FA3_FORWARD, tensor))->shape[0];
  const struct loaded_tensor *loaded = &operands->loaded[tensor_rows[tensor].shape->packed_by];
  const int32_t *starts = loaded->data;
  if (loaded->given && loaded->shape[0] == 0)
    return fail(EXIT_INPUT, "%s: expected one dimension of batch + 1", loaded->origin);
  for (int64_t b = 0; loaded->given && b < loaded->shape[0]; b++)
    if (starts[b] < (b ? starts[b - 1] : 0) || starts[b] > rows || (b == 0 && starts[b] > 0))
      return fail(EXIT_INPUT,
                  "%s: entry %" PRId64 " is %" PRId32
                  ": expected 0, and then no less than the one "
                  "before, and no more than the %" PRId64 " rows of %s",
                  loaded->origin, b, starts[b], rows, operands->loaded[tensor].origin);
  return 0;
}

/* Codes, scales, and how many rows share one. */
static size_t results(struct operands *operands, struct saved_tensor tensors[SAVED_TENSORS]) {
  static const char *const rows_names[INPUTS] = {"query_scale_rows", "key_scale_rows",
                                                 "value_scale_rows"};
  size_t count = 0;
  for (int i = 0; i < INPUTS; i++) {
    const enum tensor scale = operands_scale_of(inputs[i]);
    const int64_t *rows = operands_scale_rows(operands, scale);
    if (!operands->loaded[inputs[i]].given) continue;
    tensors[count++] = saved_tensor_of(tensor_rows[inputs[i]].name, &operands->loaded[inputs[i]]);
    tensors[count++] = saved_tensor_of(tensor_rows[scale].name, &operands->loaded[scale]);
    if (*rows) tensors[count++] = (struct saved_tensor){rows_names[i], rows, FA3_INT64, 1, {1}};
  }
  return count;
}

/* Room in the file is taken before the work. */
static int quantize_to(const struct quantize_options *quantize, struct operands *operands,
                       const struct output_file *file) {
  struct saved_tensor tensors[SAVED_TENSORS];
  for (int i = 0; i < INPUTS; i++) {
    if (!operands->loaded[inputs[i]].given) continue;
    TRY(check_starts(operands, inputs[i]));
    TRY(coded_add(&quantize->coding, inputs[i], operands));
  }
  const size_t count = results(operands, tensors);
  TRY(saved_tensor_reserve(file, tensors, count));
  TRY(operands_choose_device(operands, 0, &quantize->device));
  TRY(coded_run(operands));
  return saved_tensor_write(file, tensors, count);
}

static void print(const struct operands *operands) {
  for (int i = 0; i < INPUTS; i++)
    if (operands->loaded[inputs[i]].given)
      printf("%-8s %" PRId64 " codes, %" PRId64 " scales\n", tensor_rows[inputs[i]].name,
             loaded_tensor_elements(&operands->loaded[inputs[i]]),
             loaded_tensor_elements(&operands->loaded[operands_scale_of(inputs[i])]));
}

static int quantize_files(const struct quantize_options *quantize, struct operands *operands,
                          struct output_file *file) {
  TRY(device_check(&quantize->device));
  TRY(operands_read_some(&quantize->attention, operands));
  TRY(check_given(quantize, operands));
  TRY(output_file_begin(quantize->out, file));
  const int code = quantize_to(quantize, operands, file);
  if (code) {
    output_file_discard(file);
    return code;
  }
  TRY(output_file_commit(file));
  if (!quantize->quiet) print(operands);
  return 0;
}

int command_quantize(int argc, char **argv) {
  static const struct argp_child children[] = {
      {&source_argp, 0, NULL, 0}, {&device_argp, 0, NULL, 0}, {0}};
  static const struct argp argp = {
      options,
      parse,
      "--q TENSOR --k TENSOR --v TENSOR --out FILE\n--in FILE --out FILE",
      "Turn query, key and value, or some of them, into E4M3 codes and their scales\v"
      "Each scale is the largest magnitude of its rows divided by 448. The file that is written "
      "can be the --in file of fa3 run and fa3 verify: a tensor of codes, NAME, has its scales "
      "beside "
      "it in NAME_scale, and in NAME_scale_rows how many rows share one.",
      children,
      NULL,
      NULL};
  struct quantize_options quantize = {.coding.rows = 128, .seed = -1};
  static struct operands operands;
  static struct output_file file;
  if (argp_parse(&argp, argc, argv, 0, NULL, &quantize)) return fail(EXIT_USAGE, "%m");
  const int code = quantize_files(&quantize, &operands, &file);
  operands_free(&operands);
  cuda_close();
  return code;
}
