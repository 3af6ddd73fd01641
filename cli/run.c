/* fa3 run: attention on files. */
#include <argp.h>
#include <stdio.h>
#include <string.h>

#include "attention.h"
#include "attention_options.h"
#include "commands.h"
#include "cuda.h"
#include "device.h"
#include "dtype.h"
#include "failure.h"
#include "fp8.h"
#include "operands.h"
#include "outputs.h"
#include "progress.h"
#include "reference.h"
#include "saved_tensor.h"

struct run_options {
  struct attention_options attention;
  struct device_options device;
  fa3_dtype output_dtype; /* 0: query's */
  bool accumulate;
  bool quiet;
  struct fp8_options fp8;
};

enum { KEY_OUT = 0x500, KEY_LSE, KEY_OUT_DTYPE, KEY_ACCUMULATE, KEY_QUIET };

static const struct argp_option options[] = {
    {.doc = "Outputs:", .group = 2},
    {.name = "out",
     .key = KEY_OUT,
     .arg = "FILE",
     .doc = "Where the output goes: a .npy, or a .safetensors with the tensor output"},
    {.name = "lse",
     .key = KEY_LSE,
     .arg = "FILE",
     .doc = "Where the log-sum-exp goes, if it is wanted; the same .safetensors file as the "
            "output's takes both"},
    {.name = "out-dtype",
     .key = KEY_OUT_DTYPE,
     .arg = "same|fp32|fp16|bf16",
     .doc = "The output's elements: query's dtype (the default), or float32; of FP8 codes float32 "
            "(the "
            "default), fp16 or bf16"},
    {.name = "quiet",
     .key = KEY_QUIET,
     .doc = "Print nothing of what was understood and how long it took; which device it was stays"},
    {.name = "accumulate",
     .key = KEY_ACCUMULATE,
     .doc = "Add the gradients to those that their files hold",
     .group = 5},
    {0}};

static void check(const struct run_options *run, struct argp_state *state) {
  const struct attention_options *attention = &run->attention;
  const bool gradients = has_gradient_files(attention);
  if (!attention->files[TENSOR_output] && !gradients) argp_error(state, "--out is missing");
  if ((attention->gradients_wanted || run->accumulate) && !gradients)
    argp_error(state, "--grad, which says where the gradients go, is missing");
  if (gradients) gradient_options_check(attention, state);
  if (run->accumulate && attention->gradient_dtype)
    argp_error(state, "--accumulate takes the dtype that the files have: not with --grad-dtype");
  for (int i = 0; i < TENSORS; i++) {
    const char *file = attention->files[i];
    if (file && !saved_tensor_knows(file))
      argp_error(state, "%s: expected a name that ends in .npy or .safetensors", file);
  }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct run_options *run = state->input;
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &run->attention;
      state->child_inputs[1] = &run->device;
      state->child_inputs[2] = &run->fp8;
      return 0;
    case KEY_OUT:
      run->attention.files[TENSOR_output] = arg;
      return 0;
    case KEY_LSE:
      run->attention.files[TENSOR_lse] = arg;
      return 0;
    case KEY_OUT_DTYPE:
      run->output_dtype = dtype_from_name(arg);
      if (!run->output_dtype && strcmp(arg, "same") != 0)
        argp_error(state, "--out-dtype %s: expected same, fp32, fp16 or bf16", arg);
      return 0;
    case KEY_QUIET:
      run->quiet = true;
      return 0;
    case KEY_ACCUMULATE:
      run->accumulate = true;
      return 0;
    case ARGP_KEY_END:
      check(run, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

static int prepare_gradients(const struct run_options *run, struct operands *operands) {
  const struct attention_options *attention = &run->attention;
  TRY(operands_read_gradients(attention, operands));
  TRY(operands_make_gradients(attention, operands));
  if (!run->accumulate) return 0;
  operands->backward.args.backward.flags |= FA3_ACCUMULATE;
  return operands_load_gradients(attention, operands);
}

static int begin_outputs(const struct attention_options *attention, const struct operands *operands,
                         struct outputs *outputs) {
  struct output list[OUTPUT_FILES];
  int count = 0;
  for (enum tensor i = 0; i < TENSORS; i++)
    if (operands->loaded[i].given && file_of(attention, i))
      list[count++] = (struct output){option_of(i), file_of(attention, i), tensor_rows[i].name,
                                      &operands->loaded[i]};
  return outputs_begin(list, count, outputs);
}

/* Products of queries and keys, under a causal mask half of them, as their operations are counted.
 */
static double products(const fa3_forward_args *args) {
  double sum = 0;
  for (int64_t b = 0; b < reference_batch(args); b++)
    sum += (double)reference_seqlen_q(args, b) * (double)reference_seqlen_k(args, b);
  return args->flags & FA3_CAUSAL ? sum / 2 : sum;
}

static void print_time(const struct operands *operands, const char *what, double work,
                       double seconds) {
  const fa3_forward_args *args = &operands->forward.args.forward;
  const fa3_tensor *query = &args->query, *value = &args->value;
  const double heads = (double)query->shape[query->rank - 2];
  const double dims = (double)(query->shape[query->rank - 1] + value->shape[value->rank - 1]);
  const double operations = 2 * work * heads * dims * products(args);
  const bool copied = call_device(&operands->forward).type == FA3_CUDA;
  printf("%-11s %.3g ms, %.3g TFLOP/s%s\n", what, 1e3 * seconds, operations / seconds * 1e-12,
         copied ? ", copies to and from the GPU included" : "");
}

/* What was understood: a file in another layout has other axes. */
static void print_tensors(const struct operands *operands) {
  for (enum tensor i = 0; i < TENSORS; i++) {
    char text[160];
    if (!operands->loaded[i].given) continue;
    operands_describe(operands, i, text, sizeof text);
    printf("%-11s %s\n", tensor_rows[i].name, text);
  }
}

static int compute(const struct run_options *run, const struct operands *operands) {
  const bool gradients = run->attention.gradients_wanted;
  const double begin = seconds_now();
  TRY(coded_run(operands));
  const double start = seconds_now();
  TRY(attention_run(&operands->forward));
  const double middle = seconds_now();
  if (gradients) TRY(attention_run(&operands->backward));
  if (run->quiet) return 0;
  print_tensors(operands);
  if (run->fp8.given) printf("%-11s %.3g ms\n", "quantize", 1e3 * (start - begin));
  print_time(operands, "attention", 1, middle - start);
  if (gradients) print_time(operands, "gradients", 2.5, seconds_now() - middle);
  return 0;
}

static int run_files(const struct run_options *run, struct operands *operands,
                     struct outputs *outputs) {
  const struct attention_options *attention = &run->attention;
  const bool gradients = attention->gradients_wanted;
  TRY(device_check(&run->device));
  TRY(operands_read(attention, operands));
  if (run->fp8.given) TRY(fp8_prepare(&run->fp8.coding, operands));
  TRY(operands_make(operands, TENSOR_output, run->output_dtype));
  if (attention->files[TENSOR_lse] || gradients) TRY(operands_make(operands, TENSOR_lse, 0));
  if (gradients) TRY(prepare_gradients(run, operands));
  TRY(begin_outputs(attention, operands, outputs));
  TRY(operands_choose_device(operands, gradients ? 2 : 1, &run->device));
  TRY(compute(run, operands));
  return outputs_write(outputs);
}

int command_run(int argc, char **argv) {
  static const struct argp_child children[] = {
      {&attention_argp, 0, NULL, 0}, {&device_argp, 0, NULL, 0}, {&fp8_argp, 0, NULL, 0}, {0}};
  static const struct argp argp = {
      options,
      parse,
      "--q TENSOR --k TENSOR --v TENSOR --out FILE\n--in FILE --out FILE",
      "Compute attention on tensors in files: softmax(scale * query * key^T + mask) * value\v"
      "TENSOR is FILE.npy, FILE.safetensors:NAME, or :NAME in the --in file. Without a name it is "
      "the tensor called as the option: query or q, key or k, value or v, sink, cu_seqlens_q...\n"
      "\n"
      "With --grad the gradients of query, key, value and sink are computed too, from the "
      "output's, "
      "which is --grad-output or the tensor grad_output of the --in file. --out may then be left "
      "out.\n"
      "\n"
      "No output is left half-written: it gets its name when it is complete. It may have the name "
      "of an input.",
      children,
      NULL,
      NULL};
  struct run_options run = {0};
  static struct operands operands;
  static struct outputs outputs;
  if (argp_parse(&argp, argc, argv, 0, NULL, &run)) return fail(EXIT_USAGE, "%m");
  int code = run_files(&run, &operands, &outputs);
  outputs_discard(&outputs);
  operands_free(&operands);
  cuda_close();
  return code;
}
