/* fa3 run: attention on files. */
#include <argp.h>
#include <string.h>

#include "attention.h"
#include "attention_options.h"
#include "commands.h"
#include "cuda.h"
#include "device.h"
#include "failure.h"
#include "operands.h"
#include "outputs.h"
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

static int run_files(const struct run_options *run, struct operands *operands,
                     struct outputs *outputs) {
  const struct output list[] = {{"--out", run->output, "output", &operands->output},
                                {"--lse", run->lse, "lse", &operands->lse}};
  TRY(device_check(&run->device));
  TRY(operands_read(&run->attention, operands));
  TRY(operands_make_output(operands, run->output_dtype, run->lse != NULL));
  TRY(operands_choose_device(operands, &run->device));
  TRY(outputs_begin(list, 2, outputs));
  TRY(attention_run(&operands->args));
  return outputs_write(outputs);
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
  struct outputs outputs = {0};
  if (argp_parse(&argp, argc, argv, 0, NULL, &run)) return fail(EXIT_USAGE, "%m");
  int code = run_files(&run, &operands, &outputs);
  outputs_discard(&outputs);
  operands_free(&operands);
  cuda_close();
  return code;
}
