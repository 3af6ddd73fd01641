/* fa3 run: attention on files. */
#include <argp.h>
#include <string.h>

#include "attention.h"
#include "attention_options.h"
#include "commands.h"
#include "cuda.h"
#include "device.h"
#include "failure.h"
#include "gradients.h"
#include "operands.h"
#include "outputs.h"
#include "saved_tensor.h"

struct run_options {
  struct attention_options attention;
  struct gradient_options gradients;
  struct device_options device;
  const char *output;
  const char *lse;
  fa3_dtype output_dtype; /* 0: query's */
  bool accumulate;
};

enum { KEY_OUT = 0x500, KEY_LSE, KEY_OUT_DTYPE, KEY_ACCUMULATE };

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
    {.name = "accumulate",
     .key = KEY_ACCUMULATE,
     .doc = "Add the gradients to those that their files hold",
     .group = 5},
    {0}};

/* Where the gradients go; false if nowhere. */
static bool has_gradient_files(const struct gradient_options *chosen) {
  for (int i = 0; i < GRADIENTS; i++)
    if (gradient_file(chosen, (enum gradient)i)) return true;
  return false;
}

static void check(const struct run_options *run, struct argp_state *state) {
  const bool gradients = has_gradient_files(&run->gradients);
  if (!run->output && !gradients) argp_error(state, "--out is missing");
  if ((run->gradients.wanted || run->accumulate) && !gradients)
    argp_error(state, "--grad, which says where the gradients go, is missing");
  if (gradients) gradient_options_check(&run->gradients, &run->attention, state);
  if (run->accumulate && run->gradients.dtype)
    argp_error(state, "--accumulate takes the dtype that the files have: not with --grad-dtype");
  const char *outputs[2 + GRADIENTS] = {run->output, run->lse};
  for (int i = 0; i < GRADIENTS; i++)
    outputs[2 + i] = gradient_file(&run->gradients, (enum gradient)i);
  for (int i = 0; i < 2 + GRADIENTS; i++) {
    if (outputs[i] && !saved_tensor_knows(outputs[i]))
      argp_error(state, "%s: expected a name that ends in .npy or .safetensors", outputs[i]);
  }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct run_options *run = state->input;
  switch (key) {
    case ARGP_KEY_INIT:
      state->child_inputs[0] = &run->attention;
      state->child_inputs[1] = &run->gradients;
      state->child_inputs[2] = &run->device;
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

/* The tensors of a run and the files that they go to. */
struct files {
  struct operands operands;
  struct gradients gradients;
  struct outputs outputs;
};

static int prepare_gradients(const struct run_options *run, struct files *files) {
  const struct gradient_options *chosen = &run->gradients;
  const struct source_rules *rules = &run->attention.rules;
  TRY(gradients_read(chosen, rules, &files->operands, &files->gradients));
  TRY(gradients_make(chosen, &files->operands, &files->gradients));
  if (!run->accumulate) return 0;
  files->gradients.args.flags |= FA3_ACCUMULATE;
  return gradients_load(chosen, rules, &files->operands, &files->gradients);
}

static int begin_outputs(const struct run_options *run, struct files *files) {
  struct output list[2 + GRADIENTS] = {{"--out", run->output, "output", &files->operands.output},
                                       {"--lse", run->lse, "lse", &files->operands.lse}};
  for (int i = 0; i < GRADIENTS; i++) {
    const struct loaded_tensor *tensor = &files->gradients.tensors[i];
    list[2 + i] =
        (struct output){gradient_option_names[i],
                        tensor->rank ? gradient_file(&run->gradients, (enum gradient)i) : NULL,
                        gradient_tensor_names[i][0], tensor};
  }
  return outputs_begin(list, 2 + GRADIENTS, &files->outputs);
}

static int run_files(const struct run_options *run, struct files *files) {
  struct operands *operands = &files->operands;
  const bool gradients = run->gradients.wanted;
  TRY(device_check(&run->device));
  TRY(operands_read(&run->attention, operands));
  TRY(operands_make_output(operands, run->output_dtype, run->lse || gradients));
  if (gradients) TRY(prepare_gradients(run, files));
  TRY(begin_outputs(run, files));
  TRY(gradients ? gradients_choose_device(operands, &files->gradients, &run->device)
                : operands_choose_device(operands, &run->device));
  TRY(attention_run(&operands->args));
  if (gradients) TRY(attention_run_backward(&files->gradients.args));
  return outputs_write(&files->outputs);
}

int command_run(int argc, char **argv) {
  static const struct argp_child children[] = {
      {&attention_argp, 0, NULL, 0}, {&gradient_argp, 0, NULL, 0}, {&device_argp, 0, NULL, 0}, {0}};
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
  static struct files files;
  if (argp_parse(&argp, argc, argv, 0, NULL, &run)) return fail(EXIT_USAGE, "%m");
  int code = run_files(&run, &files);
  outputs_discard(&files.outputs);
  gradients_free(&files.gradients);
  operands_free(&files.operands);
  cuda_close();
  return code;
}
