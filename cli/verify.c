/* fa3 verify: an output against the float64 reference. */
#include <argp.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "attention.h"
#include "attention_options.h"
#include "commands.h"
#include "comparison.h"
#include "cuda.h"
#include "device.h"
#include "failure.h"
#include "fp8.h"
#include "numbers.h"
#include "operands.h"
#include "path.h"
#include "reference.h"
#include "verify_report.h"

struct verify_options {
  struct attention_options attention; /* without a file of the output it is computed */
  struct device_options device;
  bool backward;
  const char *originals; /* the file of the tensors before they were quantised, or null */
  struct fp8_options fp8;
  int64_t rows;
  uint64_t seed;
  bool json;
};

enum { KEY_OUT = 0x500, KEY_LSE, KEY_BACKWARD, KEY_ORIGINALS, KEY_ROWS, KEY_SEED, KEY_JSON };

static const struct argp_option options[] = {
    {.doc = "What to verify:", .group = 2},
    {.name = "out",
     .key = KEY_OUT,
     .arg = "TENSOR",
     .doc = "The output (default: what the device computes)"},
    {.name = "lse", .key = KEY_LSE, .arg = "TENSOR", .doc = "The output's log-sum-exp"},
    {.name = "backward",
     .key = KEY_BACKWARD,
     .doc = "Also gradients, which are computed here from --grad-output, or the tensor grad_output "
            "of the --in file; those of files, --grad and its like, go with the --out and the "
            "--lse that they were computed from"},
    {.name = "originals",
     .key = KEY_ORIGINALS,
     .arg = "FILE",
     .doc = "A .safetensors file with query, key and value as they were before fa3 quantize: say "
            "how far the output is from theirs"},
    {.name = "rows",
     .key = KEY_ROWS,
     .arg = "N|all",
     .doc = "How many rows to compute in float64, spread over all (default: 128)"},
    {.name = "seed", .key = KEY_SEED, .arg = "N", .doc = "Which rows (default: 1)"},
    {.name = "json", .key = KEY_JSON, .doc = "Print JSON"},
    {0}};

static void check(const struct verify_options *verify, struct argp_state *state) {
  const struct attention_options *attention = &verify->attention;
  const bool output = attention->files[TENSOR_output], lse = attention->files[TENSOR_lse];
  const bool gradients = has_gradient_files(attention);
  if (lse && !output) argp_error(state, "--lse needs --out");
  if (verify->device.given && output)
    argp_error(state, "--device and --threads compute the output, and --out has it already");
  if (verify->fp8.given && output)
    argp_error(state, "--fp8 computes the output of codes made here, and --out has it already");
  if (verify->fp8.given && verify->originals)
    argp_error(state, "--originals is for codes that were read: --fp8 knows what it made them of");
  if (verify->backward && output)
    argp_error(state, "--backward computes the gradients, from an output computed here, not --out");
  if (verify->backward && gradients)
    argp_error(state, "--backward computes the gradients, and --grad has them already");
  if (gradients && !(output && lse))
    argp_error(state,
               "--grad and its like verify gradients with what they were computed from: %s is "
               "missing (fa3 run writes it too), or --backward, which computes everything here",
               output ? "--lse" : "--out");
  if (gradients && (attention->gradient_dtype || attention->deterministic))
    argp_error(state, "--grad-dtype and --deterministic compute gradients, and --grad has them");
  if (attention->gradients_wanted && !verify->backward && !gradients)
    argp_error(state, "gradients: expected --backward to compute them, or --grad to read them");
  if (verify->backward || gradients) gradient_options_check(attention, state);
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct verify_options *verify = state->input;
  int64_t seed;
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &verify->attention;
      state->child_inputs[1] = &verify->device;
      state->child_inputs[2] = &verify->fp8;
      return 0;
    case KEY_OUT:
      verify->attention.files[TENSOR_output] = arg;
      return 0;
    case KEY_LSE:
      verify->attention.files[TENSOR_lse] = arg;
      return 0;
    case KEY_BACKWARD:
      verify->backward = true;
      return 0;
    case KEY_ORIGINALS:
      if (!path_has_suffix(arg, ".safetensors"))
        argp_error(state, "--originals %s: expected a .safetensors file", arg);
      verify->originals = arg;
      return 0;
    case KEY_ROWS:
      if (strcmp(arg, "all") == 0)
        verify->rows = INT64_MAX;
      else if (!parse_integer(arg, 1, INT64_MAX, &verify->rows))
        argp_error(state, "--rows %s: expected a number of 1 or more, or all", arg);
      return 0;
    case KEY_SEED:
      if (!parse_integer(arg, 0, INT64_MAX, &seed))
        argp_error(state, "--seed %s: expected a number of 0 or more", arg);
      verify->seed = (uint64_t)seed;
      return 0;
    case KEY_JSON:
      verify->json = true;
      return 0;
    case ARGP_KEY_END:
      check(verify, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

/* `code` is the verdict so far. What is wrong comes before what has no bound. */
static int judge(const char *what, const struct loaded_tensor *tensor,
                 const struct error_statistics *statistics, int code) {
  const int64_t *at = statistics->worst.at;
  if (code == EXIT_DIFFERS || (code && !statistics->outside)) return code;
  if (!statistics->outside && !statistics->unbounded) return 0;
  if (!statistics->outside)
    return fail(EXIT_NO_BOUND,
                "%s: %" PRId64 " %s values have no bound: the scores are too large for one",
                tensor->origin, statistics->unbounded, what);
  return fail(EXIT_DIFFERS,
              "%s: %" PRId64 " of %" PRId64
              " %s values checked are off by more than their bound: "
              "first batch %" PRId64 ", row %" PRId64 ", head %" PRId64 ", column %" PRId64
              " is %.9g, expected %.9g within %.3g",
              tensor->origin, statistics->outside, statistics->count, what, at[0], at[1], at[2],
              at[3], statistics->worst.value, statistics->worst.expected, statistics->worst.bound);
}

/* The largest magnitude; infinity if there is a NaN. */
static double largest(const struct loaded_tensor *tensor) {
  const fa3_tensor all = {.data = tensor->data, .dtype = tensor->dtype};
  int64_t count = tensor->given ? loaded_tensor_elements(tensor) : 0;
  double result = 0;
  for (int64_t i = 0; i < count; i++) {
    double magnitude = fabs(reference_load(&all, i));
    if (isnan(magnitude)) return INFINITY;
    result = fmax(result, magnitude);
  }
  return result;
}

/* The output is a mean of values, so from finite inputs comes a finite output, if it can hold the
 * values with room for rounding. This looks at all of it, not at samples. */
static int check_finite(const struct operands *operands) {
  const struct loaded_tensor *loaded = operands->loaded, *output = &loaded[TENSOR_output];
  int64_t coordinates[4];
  const double scale = loaded[TENSOR_value_scale].given ? largest(&loaded[TENSOR_value_scale]) : 1;
  if (largest(&loaded[TENSOR_value]) * scale > comparison_overflow(output->dtype) / 2) return 0;
  if (!comparison_find_not_finite(&operands->forward.args.forward, coordinates)) return 0;
  return fail(EXIT_DIFFERS,
              "%s: batch %" PRId64 ", row %" PRId64 ", head %" PRId64 ", column %" PRId64
              " is not finite, though all inputs are",
              output->origin, coordinates[0], coordinates[1], coordinates[2], coordinates[3]);
}

static bool has_finite_inputs(const struct operands *operands) {
  static const enum tensor all[] = {TENSOR_query,     TENSOR_query_scale, TENSOR_key,
                                    TENSOR_key_scale, TENSOR_value,       TENSOR_value_scale,
                                    TENSOR_sink,      TENSOR_grad_output, TENSOR_grad_lse};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!isfinite(largest(&operands->loaded[all[i]]))) return false;
  return true;
}

static int compute(const struct verify_options *verify, const struct verify_report *report,
                   struct operands *operands) {
  char name[32];
  fa3_device_info info = {.struct_size = sizeof info};
  if (verify->fp8.given) TRY(fp8_prepare(&verify->fp8.coding, operands));
  TRY(operands_make(operands, TENSOR_output, 0));
  TRY(operands_make(operands, TENSOR_lse, 0));
  if (verify->backward) {
    TRY(operands_read_gradients(&verify->attention, operands));
    TRY(operands_make_gradients(&verify->attention, operands));
  }
  TRY(operands_choose_device(operands, verify->backward ? 2 : 1, &verify->device));
  TRY(coded_run(operands));
  TRY(attention_run(&operands->forward));
  if (verify->backward) TRY(attention_run(&operands->backward));
  const fa3_device device = call_device(&operands->forward);
  (void)fa3_get_device_info(device, &info);
  verify_report_device(report, device_name(device, name), &info);
  return 0;
}

static int read_files(const struct verify_options *verify, struct operands *operands) {
  static const enum tensor outputs[] = {TENSOR_output, TENSOR_lse};
  const struct attention_options *attention = &verify->attention;
  for (int i = 0; i < 2; i++)
    if (attention->files[outputs[i]])
      TRY(operands_load(attention, outputs[i], attention->files[outputs[i]], operands));
  /* An output may have been converted since to another floating dtype. */
  struct call call = operands->forward;
  fa3_forward_args *args = &call.args.forward;
  const bool converted = args->output.dtype == FA3_FLOAT16 || args->output.dtype == FA3_BFLOAT16;
  if (converted && args->query.dtype != FA3_FLOAT8_E4M3) args->output.dtype = args->query.dtype;
  TRY(operands_check(operands, &call));
  if (!attention->gradients_wanted) return 0;
  TRY(operands_read_gradients(attention, operands));
  return operands_load_gradients(attention, operands);
}

/* Of all that was compared. */
static int judge_all(const struct operands *operands, const struct comparison *comparison,
                     const struct verify_report *report) {
  int code = 0;
  for (enum tensor i = 0; i < TENSORS; i++) {
    char name[32];
    const char *of = strncmp(tensor_rows[i].name, "grad_", 5) ? NULL : tensor_rows[i].name + 5;
    if (!operands->loaded[i].given || !is_output(i)) continue;
    (void)snprintf(name, sizeof name, "%s%s", of ? "d" : "", of ? of : tensor_rows[i].name);
    verify_report_tensor(report, name, &comparison->statistics[i]);
    code = judge(name, &operands->loaded[i], &comparison->statistics[i], code);
  }
  return code;
}

/* The error that quantising made, with nothing to judge it by: the output beside what the float64
 * reference gives for the tensors before. */
static void compare_with_originals(const struct verify_options *verify,
                                   const struct operands *originals,
                                   const struct verify_report *report) {
  fa3_forward_args args = originals->forward.args.forward;
  args.lse = (fa3_tensor){0};
  struct comparison comparison = {.forward = &args};
  comparison_sample(&comparison, verify->rows, verify->seed, "verify");
  verify_report_originals(report, &comparison.statistics[TENSOR_output]);
}

/* Compares, and gives the verdict. Without codes there are no originals. */
static int compare(const struct verify_options *verify, const struct operands *operands,
                   const struct operands *originals, struct verify_report *report) {
  const bool gradients = verify->attention.gradients_wanted || verify->backward;
  const fa3_forward_args *args = &operands->forward.args.forward;
  const bool finite = has_finite_inputs(operands);
  struct comparison comparison = {.forward = args,
                                  .backward = gradients ? &operands->backward.args.backward : NULL};
  for (int i = 0; i < TENSORS; i++) comparison.statistics[i].finite = finite;
  int64_t total = comparison_rows(args);
  int64_t rows = verify->rows < total ? verify->rows : total;
  comparison_sample(&comparison, verify->rows, verify->seed, "verify");
  verify_report_rows(report, rows, total, verify->seed);
  int code = judge_all(operands, &comparison, report);
  if (originals) compare_with_originals(verify, originals, report);
  if (!code && finite) code = check_finite(operands);
  return verify_report_end(report, code);
}

static int verify_files(const struct verify_options *verify, struct operands *operands,
                        struct verify_report *report) {
  const struct attention_options *attention = &verify->attention;
  static struct operands originals;
  TRY(device_check(&verify->device));
  TRY(operands_read(attention, operands));
  TRY(attention->files[TENSOR_output] ? read_files(verify, operands)
                                      : compute(verify, report, operands));
  if (!verify->originals && !verify->fp8.given) return compare(verify, operands, NULL, report);
  originals = *operands;
  int code = coded_read_originals(attention, verify->originals, &originals);
  if (!code) code = compare(verify, operands, &originals, report);
  coded_free_originals(&originals);
  return code;
}

int command_verify(int argc, char **argv) {
  static const struct argp_child children[] = {
      {&attention_argp, 0, NULL, 0}, {&device_argp, 0, NULL, 0}, {&fp8_argp, 0, NULL, 0}, {0}};
  static const struct argp argp = {
      options,
      parse,
      "--q TENSOR --k TENSOR --v TENSOR [--out TENSOR]\n--in FILE [--out TENSOR]",
      "Compare an attention output with a float64 reference, on a sample of its rows\v"
      "Give the inputs and masks that the output was computed with, as to fa3 run; without --out "
      "it "
      "is computed here, on the device, and its log-sum-exp too. The bound of "
      "each value follows from the inputs and from what rounding in float32, and in the inputs' "
      "and the output's dtypes, can do at most. Where inputs that are not finite make the "
      "reference NaN, NaN is right, and nothing else. The exit code is 0 if every value checked "
      "is right, 1 if one is not, and 7 if nothing is wrong, but there are values without a bound.",
      children,
      NULL,
      NULL};
  struct verify_options verify = {.rows = 128, .seed = 1};
  static struct operands operands;
  if (argp_parse(&argp, argc, argv, 0, NULL, &verify)) return fail(EXIT_USAGE, "%m");
  struct verify_report report = verify_report_begin(verify.json);
  int code = verify_files(&verify, &operands, &report);
  yyjson_mut_doc_free(report.document);
  operands_free(&operands);
  cuda_close();
  return code;
}
