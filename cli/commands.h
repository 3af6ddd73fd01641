/* The program's commands. Each takes its own arguments, argv[0] being "fa3 COMMAND", and returns
 * an exit code; if that is not 0, failure_text says why. */
#ifndef FA3_CLI_COMMANDS_H
#define FA3_CLI_COMMANDS_H

int command_run(int argc, char **argv);
int command_quantize(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_info(int argc, char **argv);

#endif
