/* CUDA graphs: a captured call of either pass, replayed on other contents; and a capture under way
 * while the library has yet to load its kernels. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu_trial.h"
#include "test.h"

enum { TRIALS = 60, GLOBAL = 0 }; /* of each pass */

static const size_t arena_bytes = (size_t)512 << 20;

static gpu_graph_exec capture(const struct mirror *mirror) {
  gpu_graph graph;
  gpu_graph_exec exec;
  GPU(cuStreamBeginCapture, mirror->stream, GLOBAL);
  mirror_run(mirror);
  GPU(cuStreamEndCapture, mirror->stream, &graph);
  GPU(cuGraphInstantiateWithFlags, &exec, graph, 0);
  GPU(cuGraphDestroy, graph);
  return exec;
}

static void replay(struct gpu_trial *trial, gpu_graph_exec exec, struct rng *rng) {
  mirror_upload(&trial->mirror);
  GPU(cuGraphLaunch, exec, trial->mirror.stream);
  mirror_download(&trial->mirror);
  gpu_trial_check(trial, rng, 30000);
}

static void run(uint64_t number, bool backward, struct gpu_arena *arena, gpu_stream stream) {
  static struct gpu_trial trial;
  struct rng rng = rng_for(number);
  const struct gradient_spec spec = gpu_spec_random(backward, &rng);
  gpu_trial_new(&trial, &spec, backward, arena, stream, &rng);
  gpu_graph_exec exec = capture(&trial.mirror);
  replay(&trial, exec, &rng);
  gpu_trial_refill(&trial, &rng);
  replay(&trial, exec, &rng);
  mirror_upload(&trial.mirror); /* a call of the stream's own between */
  mirror_run(&trial.mirror);
  mirror_download(&trial.mirror);
  gpu_trial_check(&trial, &rng, 30000);
  replay(&trial, exec, &rng);
  GPU(cuGraphExecDestroy, exec);
  gpu_trial_free(&trial);
}

static void test_replay(bool backward) {
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  gpu_stream stream;
  GPU(cuStreamCreate, &stream, 1);
  for (uint64_t number = 0; number < TRIALS; number++) run(number, backward, &arena, stream);
  GPU(cuStreamDestroy, stream);
  gpu_arena_free(&arena);
}

static void test_replay_forward(void **state) {
  (void)state;
  test_replay(false);
}

static void test_replay_backward(void **state) {
  (void)state;
  test_replay(true);
}

/* The first call of the process is made during a capture that forbids what loading does. */
static void test_first_call(void **state) {
  (void)state;
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  gpu_stream stream;
  gpu_graph graph;
  GPU(cuStreamCreate, &stream, 1);
  fa3_forward_args args = {
      .struct_size = sizeof args, .device = {FA3_CUDA, 0}, .stream = stream, .flags = FA3_CAUSAL};
  fa3_tensor *tensors[] = {&args.query, &args.key, &args.value, &args.output};
  for (int i = 0; i < 4; i++)
    *tensors[i] = fa3_dense((void *)gpu_arena_take(&arena, 1 << 20), FA3_FLOAT16, 1, 100, 2, 64);
  args.workspace = (void *)gpu_arena_take(&arena, 4096);
  args.workspace_size = 4096;
  GPU(cuStreamBeginCapture, stream, GLOBAL);
  if (fa3_forward(&args)) fail_msg("fa3_forward: %s", fa3_last_error());
  GPU(cuStreamEndCapture, stream, &graph);
  GPU(cuGraphDestroy, graph);
}

int main(void) {
  rng_run_seed();
  (void)fflush(stdout);
  /* CUDA does not survive a fork, so the process that has loaded nothing comes first. */
  pid_t child = fork();
  if (child == 0) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_first_call)};
    int result = gpu_open_unprepared() ? cmocka_run_group_tests(tests, NULL, NULL) : TEST_SKIPPED;
    (void)fflush(stdout);
    _exit(result);
  }
  int status;
  waitpid(child, &status, 0);
  if (!gpu_open()) return TEST_SKIPPED;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_replay_forward),
      cmocka_unit_test(test_replay_backward),
  };
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) result = 1;
  if (result == 0) printf("passed: %d captures\n", 2 * TRIALS + 1);
  return result;
}
