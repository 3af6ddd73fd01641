/* The CPU engine's threads as the process's: what happens to calls when it forks, is out of memory
 * for threads, gets signals, or cancels a thread; and that its threads cost nothing between calls.
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fa3.h"
#include "rng.h"
#include "test.h"

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define SANITIZED 1
#elif defined __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { SEQLEN = 256, HEADS = 4, HEAD_DIM = 64, ELEMENTS = SEQLEN * HEADS * HEAD_DIM, THREADS = 4 };
enum { QUERY, KEY, VALUE, GRAD_OUTPUT, INPUTS, OUTPUT = INPUTS, GRAD_QUERY, GRAD_KEY, GRAD_VALUE };
enum { TENSORS = GRAD_VALUE + 1, MOST_BYTES = 64 << 20 };

/* Worth several threads, and the same bits on any number of them. */
struct attention {
  union {
    float tensors[TENSORS][ELEMENTS];
    char bytes[(size_t)TENSORS * ELEMENTS * sizeof(float)];
  };
  float lse[HEADS * SEQLEN];
  char workspace[MOST_BYTES];
};

static float inputs[INPUTS][ELEMENTS];
static struct attention alone, again;

static fa3_tensor tensor(float *data, int64_t seqlen) {
  return fa3_dense(data, FA3_FLOAT32, 1, seqlen, HEADS, HEAD_DIM);
}

static fa3_status attend(struct attention *a, int64_t seqlen, int32_t threads) {
  memset(a->tensors, 0xff, sizeof a->tensors);
  memcpy(a->tensors, inputs, sizeof inputs);
  fa3_forward_args forward = {.struct_size = sizeof forward,
                              .query = tensor(a->tensors[QUERY], seqlen),
                              .key = tensor(a->tensors[KEY], seqlen),
                              .value = tensor(a->tensors[VALUE], seqlen),
                              .output = tensor(a->tensors[OUTPUT], seqlen),
                              .lse = fa3_lse(a->lse, 1, HEADS, seqlen),
                              .num_threads = threads,
                              .workspace = a->workspace,
                              .workspace_size = sizeof a->workspace};
  fa3_status status = fa3_forward(&forward);
  if (status) return status;
  fa3_backward_args backward = {.struct_size = sizeof backward,
                                .query = forward.query,
                                .key = forward.key,
                                .value = forward.value,
                                .output = forward.output,
                                .lse = forward.lse,
                                .grad_output = tensor(a->tensors[GRAD_OUTPUT], seqlen),
                                .grad_query = tensor(a->tensors[GRAD_QUERY], seqlen),
                                .grad_key = tensor(a->tensors[GRAD_KEY], seqlen),
                                .grad_value = tensor(a->tensors[GRAD_VALUE], seqlen),
                                .num_threads = threads,
                                .workspace = a->workspace,
                                .workspace_size = sizeof a->workspace};
  return fa3_backward(&backward);
}

/* 0 if the calls give what they gave alone: an exit status. */
static int attend_again(int32_t threads) {
  if (attend(&again, SEQLEN, threads)) return 1;
  return memcmp(alone.bytes, again.bytes, sizeof alone.bytes) ? 2 : 0;
}

/* Runs in a child that may take a minute, and fails unless it ends with 0. */
static void in_child(int (*act)(void)) {
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    (void)alarm(60);
    _exit(act());
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) fail_msg("the child was ended by signal %d", WTERMSIG(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static int attend_in_child(void) {
  for (int i = 0; i < 3; i++) {
    const int result = attend_again(THREADS);
    if (result) return result;
  }
  return 0;
}

static int attend_in_child_of_child(void) {
  in_child(attend_in_child);
  return attend_in_child();
}

static void test_child_of_a_fork(void **state) {
  (void)state;
  assert_int_equal(attend_again(THREADS), 0);
  in_child(attend_in_child_of_child);
  assert_int_equal(attend_again(THREADS), 0);
}

static atomic_bool stop;

static void *attend_until_stopped(void *argument) {
  struct attention *own = argument;
  while (!stop)
    if (attend(own, SEQLEN, THREADS)) return "failed";
  return NULL;
}

static void test_child_of_a_fork_beside_a_call(void **state) {
  (void)state;
  struct attention *own = malloc(sizeof *own);
  assert_non_null(own);
  pthread_t thread;
  stop = false;
  assert_int_equal(pthread_create(&thread, NULL, attend_until_stopped, own), 0);
  for (int i = 0; i < 10; i++) in_child(attend_in_child);
  stop = true;
  void *failure;
  pthread_join(thread, &failure);
  assert_null(failure);
  free(own);
}

/* Address space for a thread or two, and 64 asked for: nothing is printed, and the result is right.
 */
static int attend_without_memory(void) {
  FILE *file = fopen("/proc/self/statm", "re");
  char text[64];
  if (!file || !fgets(text, sizeof text, file)) return 10;
  (void)fclose(file);
  const rlim_t room = strtoul(text, NULL, 10) * (rlim_t)sysconf(_SC_PAGESIZE) + (3 << 20);
  int printed[2];
  if (pipe(printed) || dup2(printed[1], 1) < 0 || dup2(printed[1], 2) < 0) return 11;
  if (setrlimit(RLIMIT_AS, &(struct rlimit){room, room})) return 12;
  const int result = attend_again(64);
  if (result) return result;
  (void)fcntl(printed[0], F_SETFL, O_NONBLOCK);
  char byte;
  return read(printed[0], &byte, 1) > 0 ? 13 : 0;
}

static void test_threads_that_cannot_be_created(void **state) {
  (void)state;
  if (SANITIZED || access("/proc/self/statm", R_OK))
    skip(); /* a sanitizer needs memory of its own */
  in_child(attend_without_memory);
}

static int thread_count(void) {
  DIR *folder = opendir("/proc/self/task");
  if (!folder) return -1;
  int count = 0;
  while (readdir(folder)) count++;
  (void)closedir(folder);
  return count - 2; /* . and .. */
}

static int count_threads(void) {
  if (attend(&again, 1, THREADS) || thread_count() != 1) return 1;
  if (attend(&again, SEQLEN, THREADS) || thread_count() != THREADS) return 2;
  return attend(&again, SEQLEN, 2) || thread_count() != THREADS ? 3 : 0;
}

/* A child begins with one thread. */
static void test_a_tiny_call_runs_on_one_thread(void **state) {
  (void)state;
  if (SANITIZED || thread_count() < 0) skip(); /* a sanitizer may have a thread of its own */
  in_child(count_threads);
}

static double processor_seconds(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void test_idle_threads_sleep(void **state) {
  (void)state;
  assert_int_equal(attend_again(THREADS), 0);
  const double before = processor_seconds();
  (void)nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
  const double used = processor_seconds() - before;
  if (!(used < 0.03)) fail_msg("%g s of processor time between calls", used);
}

/* A signal that all of the program's threads block stays pending: no other thread takes it. */
static void test_signals_are_the_programs(void **state) {
  (void)state;
  assert_int_equal(attend_again(THREADS), 0);
  sigset_t blocked, before, pending;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  assert_int_equal(kill(getpid(), SIGUSR1), 0); /* ends the process where it is not blocked */
  assert_int_equal(attend_again(THREADS), 0);
  sigpending(&pending);
  assert_true(sigismember(&pending, SIGUSR1));
  int taken;
  assert_int_equal(sigwait(&blocked, &taken), 0);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void *attend_until_cancelled(void *argument) {
  struct attention *own = argument;
  for (;;) {
    (void)attend(own, SEQLEN, THREADS);
    pthread_testcancel();
  }
  return NULL;
}

static void test_cancelled_callers(void **state) {
  (void)state;
  struct attention *own = malloc(sizeof *own);
  assert_non_null(own);
  for (int i = 0; i < 10; i++) {
    pthread_t thread;
    void *result;
    assert_int_equal(pthread_create(&thread, NULL, attend_until_cancelled, own), 0);
    (void)nanosleep(&(struct timespec){.tv_nsec = 3000000 + 700000 * i}, NULL);
    assert_int_equal(pthread_cancel(thread), 0);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, PTHREAD_CANCELED);
    memset(own, 0, sizeof *own); /* nobody writes there any more */
    assert_int_equal(attend_again(THREADS), 0);
  }
  free(own);
}

int main(void) {
  struct rng rng = rng_for(0);
  for (int i = 0; i < INPUTS; i++)
    for (int64_t e = 0; e < ELEMENTS; e++) inputs[i][e] = (float)rng_normal(&rng);
  if (attend(&alone, SEQLEN, 1)) {
    (void)fprintf(stderr, "%s\n", fa3_last_error());
    return 1;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_child_of_a_fork),
      cmocka_unit_test(test_child_of_a_fork_beside_a_call),
      cmocka_unit_test(test_threads_that_cannot_be_created),
      cmocka_unit_test(test_a_tiny_call_runs_on_one_thread),
      cmocka_unit_test(test_idle_threads_sleep),
      cmocka_unit_test(test_signals_are_the_programs),
      cmocka_unit_test(test_cancelled_callers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
