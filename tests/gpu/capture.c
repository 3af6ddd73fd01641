/* CUDA graphs: a captured call, replayed on other contents; and a capture under way while the
 * library has yet to load its kernels. */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu_spec.h"
#include "mirror.h"
#include "test.h"

enum { TRIALS = 60, GLOBAL = 0 };

static const size_t arena_bytes = (size_t)256 << 20;

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

static void replay(struct mirror *mirror, gpu_graph_exec exec, struct rng *rng) {
  mirror_upload(mirror);
  GPU(cuGraphLaunch, exec, mirror->stream);
  mirror_download(mirror);
  trial_check(mirror->trial, rng, 30000);
}

static void run(uint64_t number, struct gpu_arena *arena, gpu_stream stream) {
  struct rng rng = rng_for(number);
  struct spec spec = gpu_spec_random(&rng);
  struct trial trial = gpu_trial_new(&spec, &rng);
  struct mirror mirror = mirror_new(&trial, arena, stream, rng_chance(&rng, 0.5));
  gpu_graph_exec exec = capture(&mirror);
  replay(&mirror, exec, &rng);
  gpu_trial_refill(&trial, &rng);
  replay(&mirror, exec, &rng);
  replay(&mirror, exec, &rng);
  GPU(cuGraphExecDestroy, exec);
  mirror_free(&mirror);
  trial_free(&trial);
}

static void test_replay(void **state) {
  (void)state;
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  gpu_stream stream;
  GPU(cuStreamCreate, &stream, 1);
  for (uint64_t number = 0; number < TRIALS; number++) run(number, &arena, stream);
  GPU(cuStreamDestroy, stream);
  gpu_arena_free(&arena);
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
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_replay)};
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) result = 1;
  if (result == 0) printf("passed: %d captures\n", TRIALS + 1);
  return result;
}
