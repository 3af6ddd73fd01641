/* fa3 run: attention on files. */
#include <argp.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "attention_options.h"
#include "commands.h"
#include "device.h"
#include "failure.h"
#include "operands.h"
#include "path.h"
#include "saved_tensor.h"

struct run_options {
  struct attention_options attention;
  struct device_options device;
  const char *output;
  const char *lse;
  fa3_dtype output_dtype; /* 0: query's */
};

enum { KEY_OUT = 0x500, KEY_LSE, KEY_OUT_DTYPE };

static const struct argp_option options[] = {
    {.doc = "Outputs:", .group = 4},
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
     .arg = "same|fp32",
     .doc = "The output's elements: query's dtype (the default), or float32"},
    {0}};

static void check(const struct run_options *run, struct argp_state *state) {
  if (!run->output) argp_error(state, "--out is missing");
  const char *outputs[] = {run->output, run->lse};
  for (int i = 0; i < 2; i++) {
    if (outputs[i] && !saved_tensor_knows(outputs[i]))
      argp_error(state, "%s: expected a name that ends in .npy or .safetensors", outputs[i]);
  }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct run_options *run = state->input;
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &run->attention;
      state->child_inputs[1] = &run->device;
      return 0;
    case KEY_OUT:
      run->output = arg;
      return 0;
    case KEY_LSE:
      run->lse = arg;
      return 0;
    case KEY_OUT_DTYPE:
      if (strcmp(arg, "fp32") == 0)
        run->output_dtype = FA3_FLOAT32;
      else if (strcmp(arg, "same") != 0)
        argp_error(state, "--out-dtype %s: expected same or fp32", arg);
      return 0;
    case ARGP_KEY_END:
      check(run, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

static struct saved_tensor saved(const char *name, const struct loaded_tensor *tensor) {
  struct saved_tensor result = {name, tensor->data, tensor->dtype, tensor->rank, {0}};
  memcpy(result.shape, tensor->shape, sizeof result.shape);
  return result;
}

static int write_and_commit(struct output_file *output, struct output_file *lse,
                            const struct operands *operands) {
  const struct saved_tensor tensors[] = {saved("output", &operands->output),
                                         saved("lse", &operands->lse)};
  bool both = operands->args.lse.data && lse->descriptor < 0;
  TRY(saved_tensor_write(output, tensors, both ? 2 : 1));
  if (lse->descriptor >= 0) TRY(saved_tensor_write(lse, &tensors[1], 1));
  TRY(output_file_commit(output));
  return lse->descriptor >= 0 ? output_file_commit(lse) : 0;
}

/* Outputs that can't be written are found before the work. */
static int begin_outputs(const struct run_options *run, struct output_file *output,
                         struct output_file *lse) {
  output->descriptor = lse->descriptor = -1;
  TRY(output_file_begin(run->output, output));
  if (!run->lse) return 0;
  TRY(output_file_begin(run->lse, lse));
  if (strcmp(output->target, lse->target) != 0) return 0;
  output_file_discard(lse); /* the output's file takes both */
  if (!path_has_suffix(run->output, ".npy")) return 0;
  return fail(EXIT_USAGE, "%s: --out and --lse are the same file: expected a .safetensors for both",
              run->output);
}

static int run_files(const struct run_options *run, struct operands *operands) {
  struct output_file output;
  struct output_file lse;
  fa3_device device;
  TRY(device_choose(&run->device, &device));
  TRY(operands_read(&run->attention, operands));
  operands->args.device = device;
  operands->args.num_threads = run->device.num_threads;
  TRY(operands_make_output(operands, run->output_dtype, run->lse != NULL));

  int code = begin_outputs(run, &output, &lse);
  if (!code) {
    fa3_status status = attention_run(&operands->args);
    free(operands->args.workspace);
    code = status ? operands_failure(operands, status) : write_and_commit(&output, &lse, operands);
  }
  output_file_discard(&output);
  output_file_discard(&lse);
  return code;
}

int command_run(int argc, char **argv) {
  static const struct argp_child children[] = {
      {&attention_argp, 0, NULL, 0}, {&device_argp, 0, NULL, 0}, {0}};
  static const struct argp argp = {
      options,
      parse,
      NULL,
      "Compute attention on tensors in files: softmax(scale * query * key^T + mask) * value\v"
      "TENSOR is FILE.npy, FILE.safetensors:NAME, or :NAME in the --in file. Without a name it is "
      "the tensor called as the option: query or q, key or k, value or v, sink, cu_seqlens_q...\n"
      "\n"
      "No output is left half-written: it gets its name when it is complete. It may have the name "
      "of an input.",
      children,
      NULL,
      NULL};
  struct run_options run = {0};
  struct operands operands = {0};
  if (argp_parse(&argp, argc, argv, 0, NULL, &run)) return fail(EXIT_USAGE, "%m");
  int code = run_files(&run, &operands);
  operands_free(&operands);
  return code;
}
