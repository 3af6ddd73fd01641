/* fa3 quantize: query, key and value in files become E4M3 codes and scales. */
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "coded.h"
#include "commands.h"
#include "cuda.h"
#include "device.h"
#include "failure.h"
#include "lengths.h"
#include "library.h"
#include "loaded_tensor.h"
#include "numbers.h"
#include "path.h"
#include "saved_tensor.h"
#include "source_options.h"

enum { INPUTS = 3 };

/* What may be quantised. */
static const struct {
  const char *name;
  const char *names[3]; /* in a file */
  const char *scale;
  const char *scale_rows;
} inputs[INPUTS] = {
    {"query", {"query", "q", NULL}, "query_scale", "query_scale_rows"},
    {"key", {"key", "k", NULL}, "key_scale", "key_scale_rows"},
    {"value", {"value", "v", NULL}, "value_scale", "value_scale_rows"},
};
enum { QUERY, KEY, VALUE };

struct quantize_options {
  const char *sources[INPUTS];
  const char *starts[2]; /* of queries; of keys and values */
  struct source_rules rules;
  struct device_options device;
  const char *out;
  int64_t rows; /* that share a scale, or SCALE_PER_SEQUENCE, or SCALE_PER_TENSOR */
  int64_t seed; /* -1: not given */
  bool rotate;
  bool subtract_mean;
  bool quiet;
};

enum { KEY_SOURCES = 0x500, KEY_STARTS = 0x510 };
enum { KEY_OUT = 0x520, KEY_ROWS, KEY_ROTATE, KEY_SEED, KEY_MEAN, KEY_QUIET };

static const struct argp_option options[] = {
    {.doc = "Tensors:", .group = 1},
    {.name = "q",
     .key = KEY_SOURCES + QUERY,
     .arg = "TENSOR",
     .doc = "Query: (batch, seqlen, heads, head_dim), or 3-d without batch"},
    {.name = "k", .key = KEY_SOURCES + KEY, .arg = "TENSOR", .doc = "Key"},
    {.name = "v", .key = KEY_SOURCES + VALUE, .arg = "TENSOR", .doc = "Value"},
    {.name = "cu-seqlens-q",
     .key = KEY_STARTS,
     .arg = "LIST",
     .doc = "Where each sequence of a packed query (total, heads, head_dim) begins, and the total"},
    {.name = "cu-seqlens-k",
     .key = KEY_STARTS + 1,
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
  bool any = quantize->rules.container;
  for (int i = 0; i < INPUTS; i++) any = any || quantize->sources[i];
  if (!any) argp_error(state, "--q, --k and --v are missing, and there is no --in");
  if (!quantize->out) argp_error(state, "--out is missing");
  if (quantize->out && !path_has_suffix(quantize->out, ".safetensors"))
    argp_error(state, "--out %s: expected a .safetensors file: .npy has no type for E4M3",
               quantize->out);
  if (quantize->seed >= 0 && !quantize->rotate) argp_error(state, "--seed needs --rotate");
}

static void parse_rows(const char *text, struct quantize_options *quantize,
                       struct argp_state *state) {
  if (strcmp(text, "all") == 0)
    quantize->rows = SCALE_PER_SEQUENCE;
  else if (strcmp(text, "tensor") == 0)
    quantize->rows = SCALE_PER_TENSOR;
  else if (!parse_integer(text, 1, INT64_MAX, &quantize->rows))
    argp_error(state, "--rows %s: expected a number of 1 or more, all or tensor", text);
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct quantize_options *quantize = state->input;
  if (key >= KEY_SOURCES && key < KEY_SOURCES + INPUTS) {
    quantize->sources[key - KEY_SOURCES] = arg;
    return 0;
  }
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &quantize->rules;
      state->child_inputs[1] = &quantize->device;
      return 0;
    case KEY_STARTS:
    case KEY_STARTS + 1:
      quantize->starts[key - KEY_STARTS] = arg;
      return 0;
    case KEY_OUT:
      quantize->out = arg;
      return 0;
    case KEY_ROWS:
      parse_rows(arg, quantize, state);
      return 0;
    case KEY_ROTATE:
      quantize->rotate = true;
      return 0;
    case KEY_SEED:
      if (!parse_integer(arg, 0, INT64_MAX, &quantize->seed))
        argp_error(state, "--seed %s: expected a number of 0 or more", arg);
      return 0;
    case KEY_MEAN:
      quantize->subtract_mean = true;
      return 0;
    case KEY_QUIET:
      quantize->quiet = true;
      return 0;
    case ARGP_KEY_ARG:
      argp_error(state, "'%s' is no option: expected options alone", arg);
      return EINVAL;
    case ARGP_KEY_END:
      check(quantize, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

/* One input and what comes of it. */
struct input {
  struct loaded_tensor tensor;
  struct loaded_tensor starts;
  struct coded coded;
};

/* On a GPU the library does not look at them. */
static int check_starts(const struct input *input) {
  const int32_t *starts = input->starts.data;
  for (int64_t b = 0; b < input->starts.shape[0]; b++)
    if (starts[b] < (b ? starts[b - 1] : 0) || starts[b] > input->tensor.shape[0] ||
        (b == 0 && starts[b] > 0))
      return fail(EXIT_INPUT,
                  "%s: entry %" PRId64 " is %" PRId32
                  ": expected 0, and then no less than the one "
                  "before, and no more than the %" PRId64 " rows of %s",
                  input->starts.origin, b, starts[b], input->tensor.shape[0], input->tensor.origin);
  return 0;
}

static int read_input(const struct quantize_options *quantize, int which, struct input *input) {
  const char *const *names = inputs[which].names;
  const char *source = quantize->sources[which];
  const char *starts = quantize->starts[which > 0];
  const char *const starts_names[] = {which ? "cu_seqlens_k" : "cu_seqlens_q", NULL};
  const char *option = which ? "--cu-seqlens-k" : "--cu-seqlens-q";
  static const char elements[] = "float32, float16 or bfloat16";
  if (source)
    TRY(loaded_tensor_read(source, &quantize->rules, names, elements, &input->tensor));
  else if (quantize->rules.container)
    TRY(loaded_tensor_read_beside(NULL, &quantize->rules, names, "", elements, &input->tensor));
  if (!input->tensor.given || !starts) return 0;
  TRY(lengths_read(starts, &quantize->rules, starts_names, option, FA3_INT32, &input->starts));
  if (input->starts.rank == 1 && input->starts.shape[0] > 0) return check_starts(input);
  return fail(EXIT_INPUT, "%s: expected one dimension of batch + 1", input->starts.origin);
}

/* What the API sees: rows before heads, a sequence without a batch as a batch of one. */
static fa3_tensor view_of(const struct loaded_tensor *loaded, bool packed, bool heads_first) {
  const fa3_tensor as_stored = loaded_tensor_view(loaded);
  const int batch = loaded->rank == 3 && !packed, rows = loaded->rank - 3;
  fa3_tensor view = as_stored;
  view.rank += batch;
  view.shape[0] = view.strides[0] = 1;
  for (int d = 0; d < loaded->rank; d++) {
    const int swapped = d == rows ? rows + 1 : d == rows + 1 ? rows : d;
    const int to = batch + (heads_first ? swapped : d);
    view.shape[to] = as_stored.shape[d];
    view.strides[to] = as_stored.strides[d];
  }
  return view;
}

/* The call, and memory for what it writes. */
static int prepare_input(const struct quantize_options *quantize, int which, struct input *input) {
  const struct loaded_tensor *tensor = &input->tensor;
  const bool packed = input->starts.given;
  if (tensor->rank != 3 && (packed || tensor->rank != 4))
    return fail(EXIT_INPUT, "%s: has %d dimensions: expected 3%s", tensor->origin, tensor->rank,
                packed ? ", because of the packed sequences' starts" : " or 4");
  const struct coding coding = {.rows = quantize->rows,
                                .rotate = quantize->rotate && which != VALUE,
                                .subtract_mean = quantize->subtract_mean && which == KEY,
                                .seed = quantize->seed < 0 ? 0 : (uint64_t)quantize->seed};
  const fa3_tensor view = view_of(tensor, packed, quantize->rules.heads_first);
  const fa3_tensor starts =
      packed ? fa3_vector(input->starts.data, FA3_INT32, input->starts.shape[0]) : (fa3_tensor){0};
  return coded_make(tensor, &view, &starts, &coding, &input->coded);
}

/* Whether a device takes the calls of all inputs that there are. */
static fa3_status takes(fa3_device device, const void *context) {
  const struct input *list = context;
  for (int i = 0; i < INPUTS; i++) {
    struct call call = list[i].coded.call;
    size_t bytes;
    if (!list[i].tensor.given) continue;
    call_set_device(&call, device, 0);
    const fa3_status status = library_check(&call, &bytes);
    if (status) return status;
  }
  return FA3_OK;
}

static int quantize_inputs(const struct quantize_options *quantize, struct input *list) {
  fa3_device device;
  TRY(device_choose(&quantize->device, takes, list, &device));
  for (int i = 0; i < INPUTS; i++) {
    if (!list[i].tensor.given) continue;
    call_set_device(&list[i].coded.call, device, quantize->device.num_threads);
    TRY(attention_run(&list[i].coded.call));
  }
  return 0;
}

static size_t results(const struct input *list, struct saved_tensor tensors[SAVED_TENSORS]) {
  size_t count = 0;
  for (int i = 0; i < INPUTS; i++) {
    if (!list[i].tensor.given) continue;
    tensors[count++] = saved_tensor_of(inputs[i].name, &list[i].coded.codes);
    tensors[count++] = saved_tensor_of(inputs[i].scale, &list[i].coded.scale);
    const int64_t *rows = &list[i].coded.call.args.quantize.codes_scale_rows;
    if (*rows)
      tensors[count++] = (struct saved_tensor){inputs[i].scale_rows, rows, FA3_INT64, 1, {1}};
  }
  return count;
}

/* Room in the file is taken before the work. */
static int quantize_to(const struct quantize_options *quantize, struct input *list,
                       const struct output_file *file) {
  struct saved_tensor tensors[SAVED_TENSORS];
  for (int i = 0; i < INPUTS; i++)
    if (list[i].tensor.given) TRY(prepare_input(quantize, i, &list[i]));
  const size_t count = results(list, tensors);
  TRY(saved_tensor_reserve(file, tensors, count));
  TRY(quantize_inputs(quantize, list));
  return saved_tensor_write(file, tensors, count);
}

static void print(const struct input *list) {
  for (int i = 0; i < INPUTS; i++)
    if (list[i].tensor.given)
      printf("%-8s %" PRId64 " codes, %" PRId64 " scales\n", inputs[i].name,
             loaded_tensor_elements(&list[i].coded.codes),
             loaded_tensor_elements(&list[i].coded.scale));
}

/* An option that says something of a tensor which is not there. */
static int check_given(const struct quantize_options *quantize, const struct input *list) {
  const bool query = list[QUERY].tensor.given, key = list[KEY].tensor.given;
  const bool value = list[VALUE].tensor.given;
  if (quantize->rotate && !query && !key)
    return fail(EXIT_USAGE, "--rotate: there is no query and no key");
  if (quantize->subtract_mean && !key) return fail(EXIT_USAGE, "--subtract-mean: there is no key");
  if (quantize->starts[0] && !query) return fail(EXIT_USAGE, "--cu-seqlens-q: there is no query");
  if (quantize->starts[1] && !key && !value)
    return fail(EXIT_USAGE, "--cu-seqlens-k: there is no key and no value");
  return 0;
}

static int quantize_files(const struct quantize_options *quantize, struct input *list,
                          struct output_file *file) {
  bool any = false;
  TRY(device_check(&quantize->device));
  for (int i = 0; i < INPUTS; i++) {
    TRY(read_input(quantize, i, &list[i]));
    any = any || list[i].tensor.given;
  }
  if (!any)
    return fail(EXIT_INPUT, "%s: has no tensor 'query', 'key' or 'value'",
                quantize->rules.container);
  TRY(check_given(quantize, list));
  TRY(output_file_begin(quantize->out, file));
  const int code = quantize_to(quantize, list, file);
  if (code) {
    output_file_discard(file);
    return code;
  }
  TRY(output_file_commit(file));
  if (!quantize->quiet) print(list);
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
  struct quantize_options quantize = {.rows = 128, .seed = -1};
  struct input list[INPUTS] = {0};
  static struct output_file file;
  if (argp_parse(&argp, argc, argv, 0, NULL, &quantize)) return fail(EXIT_USAGE, "%m");
  const int code = quantize_files(&quantize, list, &file);
  for (int i = 0; i < INPUTS; i++) {
    loaded_tensor_free(&list[i].tensor);
    loaded_tensor_free(&list[i].starts);
    loaded_tensor_free(&list[i].coded.codes);
    loaded_tensor_free(&list[i].coded.scale);
  }
  cuda_close();
  return code;
}
