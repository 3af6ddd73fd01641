/* CUDA graphs: a captured call of either pass, replayed on other contents; captured calls that run
 * at the same time; and a capture under way while the library has yet to load its kernels. */
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu_trial.h"
#include "test.h"

enum { TRIALS = 60, MANY = 4, GLOBAL = 0 }; /* of each pass */

static const size_t arena_bytes = (size_t)1 << 30; /* 41 sequences in two splits take most */

static gpu_graph_exec end_capture(gpu_stream stream) {
  gpu_graph graph;
  gpu_graph_exec exec;
  GPU(cuStreamEndCapture, stream, &graph);
  GPU(cuGraphInstantiateWithFlags, &exec, graph, 0);
  GPU(cuGraphDestroy, graph);
  return exec;
}

static gpu_graph_exec capture(const struct mirror *mirror) {
  GPU(cuStreamBeginCapture, mirror->stream, GLOBAL);
  mirror_run(mirror);
  return end_capture(mirror->stream);
}

static void replay(struct gpu_trial *trial, gpu_graph_exec exec, struct rng *rng) {
  mirror_upload(&trial->mirror);
  GPU(cuGraphLaunch, exec, trial->mirror.stream);
  mirror_download(&trial->mirror);
  gpu_trial_check(trial, rng, 30000);
}

static void run(const struct gradient_spec *spec, bool backward, struct gpu_arena *arena,
                gpu_stream stream, struct rng *rng) {
  static struct gpu_trial trial;
  gpu_trial_new(&trial, spec, backward, arena, stream, rng);
  gpu_graph_exec exec = capture(&trial.mirror);
  replay(&trial, exec, rng);
  gpu_trial_refill(&trial, rng);
  replay(&trial, exec, rng);
  mirror_upload(&trial.mirror); /* two calls of the stream's own between */
  mirror_run(&trial.mirror);
  if (!(spec->flags & FA3_ACCUMULATE)) mirror_run(&trial.mirror);
  mirror_download(&trial.mirror);
  gpu_trial_check(&trial, rng, 30000);
  replay(&trial, exec, rng);
  GPU(cuGraphExecDestroy, exec);
  gpu_trial_free(&trial);
}

/* More sequences than a warp numbers the tiles of at a time. */
static void run_many(bool backward, struct gpu_arena *arena, gpu_stream stream) {
  for (int i = 0; i < MANY; i++) {
    struct rng rng = rng_for(1000 + (uint64_t)i);
    const bool longer = i < 2, causal = i % 2;
    const struct gradient_spec spec =
        gpu_spec_many(backward, longer ? 41 : 300, longer ? 3000 : 40, causal, &rng);
    run(&spec, backward, arena, stream, &rng);
  }
}

static void test_replay(bool backward) {
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  gpu_stream stream;
  GPU(cuStreamCreate, &stream, 1);
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng = rng_for(number);
    const struct gradient_spec spec = gpu_spec_random(backward, &rng);
    run(&spec, backward, &arena, stream, &rng);
  }
  run_many(backward, &arena, stream);
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

/* Two captured calls, replayed at the same time on two streams, and on a third, which captured
 * them, calls of its own. Each has more tiles than multiprocessors, and counts them. All values are
 * the same number, and so is all of the output. */
static void test_side_by_side(void **state) {
  enum { CALLS = 3, ROUNDS = 20, SEQLEN = 2048, HEADS = 20, BYTES = SEQLEN * HEADS * 64 * 2 };
  (void)state;
  static char expected[BYTES], output[BYTES];
  memset(expected, 0x3c, sizeof expected);
  struct gpu_arena arena = gpu_arena_new(arena_bytes);
  const gpu_pointer input = gpu_arena_take(&arena, BYTES);
  gpu_stream streams[CALLS];
  gpu_graph_exec execs[CALLS];
  fa3_forward_args args[CALLS];
  for (int c = 0; c < CALLS; c++) {
    GPU(cuStreamCreate, &streams[c], 1);
    const fa3_tensor tensor = fa3_dense((void *)input, FA3_BFLOAT16, 1, SEQLEN, HEADS, 64);
    args[c] = (fa3_forward_args){.struct_size = sizeof args[c],
                                 .device = {FA3_CUDA, 0},
                                 .stream = streams[0],
                                 .query = tensor,
                                 .key = tensor,
                                 .value = tensor,
                                 .output = tensor,
                                 .flags = FA3_CAUSAL,
                                 .reserved_multiprocessors = 90}; /* of 132 */
    args[c].output.data = (void *)gpu_arena_take(&arena, BYTES);
    if (fa3_forward_workspace(&args[c], &args[c].workspace_size)) fail_msg("%s", fa3_last_error());
    args[c].workspace = (void *)gpu_arena_take(&arena, args[c].workspace_size);
    if (c > 0) GPU(cuStreamBeginCapture, streams[0], GLOBAL);
    if (fa3_forward(&args[c])) fail_msg("fa3_forward: %s", fa3_last_error());
    if (c > 0) execs[c] = end_capture(streams[0]);
  }
  GPU(cuMemsetD8Async, input, 0x3c, BYTES, streams[0]);
  GPU(cuStreamSynchronize, streams[0]);
  for (int round = 0; round < ROUNDS; round++) {
    for (int c = 0; c < CALLS; c++)
      GPU(cuMemsetD8Async, (gpu_pointer)args[c].output.data, 0xff, BYTES, streams[c]);
    for (int c = 1; c < CALLS; c++) GPU(cuGraphLaunch, execs[c], streams[c]);
    if (fa3_forward(&args[0])) fail_msg("fa3_forward: %s", fa3_last_error());
    for (int c = 0; c < CALLS; c++) {
      const gpu_pointer from = (gpu_pointer)args[c].output.data;
      GPU(cuMemcpyDtoHAsync, output, from, BYTES, streams[c]);
      GPU(cuStreamSynchronize, streams[c]);
      if (memcmp(output, expected, BYTES) != 0) fail_msg("round %d: call %d is wrong", round, c);
    }
  }
  for (int c = 0; c < CALLS; c++) {
    if (c > 0) GPU(cuGraphExecDestroy, execs[c]);
    GPU(cuStreamDestroy, streams[c]);
  }
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
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_replay_forward),
      cmocka_unit_test(test_replay_backward),
      cmocka_unit_test(test_side_by_side),
  };
  int result = cmocka_run_group_tests(tests, NULL, NULL);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) result = 1;
  if (result == 0) printf("passed: %d captures\n", 2 * (TRIALS + MANY) + 2);
  return result;
}
