/* fa3: attention on files. Finds the command and ends with its exit code. */
#include <argp.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "fa3.h"
#include "failure.h"

static const struct {
  const char *name;
  const char *full_name; /* in the command's own messages */
  int (*run)(int argc, char **argv);
} commands[] = {{"run", "fa3 run", command_run},
                {"verify", "fa3 verify", command_verify},
                {"quantize", "fa3 quantize", command_quantize},
                {"bench", "fa3 bench", command_bench},
                {"info", "fa3 info", command_info}};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static void print_version(FILE *stream, struct argp_state *state) {
  (void)state;
  (void)fprintf(stream, "fa3 %s\n", fa3_version());
}

/* The command is the first argument; what follows is the command's to parse.
 * argp's type. NOLINTNEXTLINE(readability-non-const-parameter) */
static error_t parse(int key, char *arg, struct argp_state *state) {
  int *command = state->input;
  if (key == ARGP_KEY_NO_ARGS)
    argp_state_help(state, stderr, (ARGP_HELP_STD_HELP & ~ARGP_HELP_EXIT_OK) | ARGP_HELP_EXIT_ERR);
  if (key != ARGP_KEY_ARG) return ARGP_ERR_UNKNOWN;
  *command = state->next - 1;
  state->next = state->argc;
  (void)arg;
  return 0;
}

/* -h, help and help COMMAND are other words for --help. */
static void translate_help(int argc, char **argv) {
  static char option[] = "--help";
  for (int i = 1; i < argc && i <= 2; i++) {
    if (strcmp(argv[i], "-h") == 0) argv[i] = option;
  }
  if (argc < 2 || strcmp(argv[1], "help") != 0) return;
  argv[1] = argc > 2 ? argv[2] : option;
  if (argc > 2) argv[2] = option;
}

/* A full disk or a closed pipe behind stdout is a failure too. */
static int flush(void) {
  const bool failed_before = ferror(stdout);
  if (fflush(stdout)) return fail(EXIT_OUTPUT, "standard output: %m");
  return failed_before ? fail(EXIT_OUTPUT, "standard output: not all was written") : 0;
}

/* Of what argp prints before it ends the program by itself: help, usage, version. */
static bool flushed;
static void flush_at_exit(void) {
  if (flushed || !flush()) return;
  (void)fprintf(stderr, "fa3: %s\n", failure_text());
  _exit(EXIT_OUTPUT);
}

/* `name` is the command's, in what is said of wrong options: as argp says it. */
static int end(int code, const char *name) {
  flushed = true;
  if (!code)
    code = flush();
  else
    (void)fflush(stdout);
  if (code == EXIT_USAGE)
    (void)fprintf(stderr, "%s: %s\nTry `%s --help' or `%s --usage' for more information.\n", name,
                  failure_text(), name, name);
  else if (code)
    (void)fprintf(stderr, "fa3: %s\n", failure_text());
  return code;
}

/* A file must not get the number of a standard stream that the caller has closed. What is opened in
 * its place refuses what the stream is for, as a closed one does. */
static void open_standard_streams(void) {
  static const int wrong_ways[] = {O_WRONLY, O_RDONLY, O_RDONLY};
  for (int stream = 0; stream <= 2; stream++)
    if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", wrong_ways[stream]) != stream)
      _exit(EXIT_FAILED);
}

int main(int argc, char **argv) {
  open_standard_streams();
  /* Room for a whole report, so that what fails is the last flush, which tells why. */
  static char report[1 << 16];
  (void)setvbuf(stdout, report, _IOFBF, sizeof report);
  (void)atexit(flush_at_exit);
  static const struct argp argp = {
      NULL,
      parse,
      "COMMAND [OPTION...]",
      "FlashAttention-3 on tensors in .npy and .safetensors files\v"
      "Commands:\n"
      "  run      compute attention on tensors in files\n"
      "  verify   compare an output with a float64 reference\n"
      "  quantize turn tensors into FP8 codes and scales\n"
      "  bench    measure speed\n"
      "  info     show devices and compiled kernels\n"
      "fa3 COMMAND --help, or -h, says more.\n"
      "\n"
      "Exit codes:\n"
      "  0  all went well\n"
      "  1  verify, bench: an output or a gradient is off by more than its bound\n"
      "  2  wrong options\n"
      "  3  an input can't be read, is malformed, or does not match the others\n"
      "  4  an output can't be written\n"
      "  5  this machine, build or engine can't do it\n"
      "  6  it failed while running\n"
      "  7  verify: nothing is wrong, but there are values without a bound\n"
      "\n"
      "Environment:\n"
      "  FA3_CPU_LEVEL         the CPU engine's level, one that fa3 info lists\n"
      "  OMP_NUM_THREADS       CPU threads by default, at most\n"
      "  FA3_CHECK_DEVICE      1: a GPU's lengths and pages are checked before use\n"
      "  FA3_DEPENDENT_LAUNCH  0: a GPU's kernels begin when those before have ended\n"
      "  CUDA_VISIBLE_DEVICES  the GPUs that are there, as to every CUDA program",
      NULL,
      NULL,
      NULL};
  int first = 0;
  translate_help(argc, argv);
  argp_err_exit_status = EXIT_USAGE;
  argp_program_version_hook = print_version;
  if (argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &first)) return EXIT_USAGE;
  for (int i = 0; i < COMMANDS; i++) {
    if (strcmp(argv[first], commands[i].name) != 0) continue;
    argv[first] = (char *)commands[i].full_name;
    return end(commands[i].run(argc - first, argv + first), commands[i].full_name);
  }
  return end(fail(EXIT_USAGE, "no command '%s': expected run, verify, quantize, bench or info",
                  argv[first]),
             "fa3");
}
