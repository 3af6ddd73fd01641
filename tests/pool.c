/* The CPU engine's threads (src/cpu/threads.h) and how many of them there are by default. */
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cpu/processors.h"
#include "cpu/threads.h"
#include "test.h"

enum { TASKS = 1000, ROUNDS = 200, CALLERS = 4 };

struct record {
  int32_t threads;
  atomic_int done[TASKS];
  atomic_int at_seat[MOST_THREADS]; /* tasks at work there now */
  atomic_int mistakes;
};

static void record_task(void *argument, int64_t task, int32_t seat) {
  struct record *record = argument;
  if (seat < 0 || seat >= record->threads || atomic_fetch_add(&record->at_seat[seat], 1) != 0)
    atomic_fetch_add(&record->mistakes, 1);
  atomic_fetch_add(&record->done[task], 1);
  atomic_fetch_sub(&record->at_seat[seat], 1);
}

static int run_rounds(struct record *record, int rounds) {
  static const int32_t threads[] = {1, 2, 3, 8, 5};
  for (int round = 0; round < rounds; round++) {
    record->threads = threads[round % 5];
    threads_for(record->threads, TASKS, record_task, record);
  }
  for (int i = 0; i < TASKS; i++)
    if (record->done[i] != rounds) return 1;
  return record->mistakes;
}

static void test_each_task_once(void **state) {
  (void)state;
  static struct record record;
  assert_int_equal(run_rounds(&record, ROUNDS), 0);
}

static void *run_caller(void *record) {
  return run_rounds(record, ROUNDS) ? "wrong" : NULL;
}

static void test_callers_at_once(void **state) {
  (void)state;
  static struct record records[CALLERS];
  pthread_t threads[CALLERS];
  for (int c = 0; c < CALLERS; c++)
    assert_int_equal(pthread_create(&threads[c], NULL, run_caller, &records[c]), 0);
  for (int c = 0; c < CALLERS; c++) {
    void *wrong;
    pthread_join(threads[c], &wrong);
    assert_null(wrong);
  }
}

static void no_task(void *argument, int64_t task, int32_t seat) {
  (void)argument;
  (void)task;
  (void)seat;
  fail();
}

static void test_no_tasks(void **state) {
  (void)state;
  threads_for(4, 0, no_task, NULL);
  threads_for(4, -1, no_task, NULL);
}

/* Each waits for the one before, as blocks of keys do: they are started in their order. */
static void take_turn(void *argument, int64_t task, int32_t seat) {
  (void)seat;
  atomic_llong *turn = argument;
  if (task % 37 == 5) (void)nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
  threads_wait(turn, task);
  atomic_store(turn, task + 1);
}

static void test_turns(void **state) {
  (void)state;
  for (int round = 0; round < 5; round++) {
    atomic_llong turn = 0;
    threads_for(8, 200, take_turn, &turn);
    assert_int_equal(turn, 200);
  }
}

struct crowd_record {
  double seconds; /* of work in a task */
  atomic_int helped;
};

static double processor_seconds(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* What a crowd does to a call: its helper loses its processor in the middle of a task. The caller
 * waits for it to begin, but not for ever: in a crowd there may be none. */
static void lose_processor(void *argument, int64_t task, int32_t seat) {
  atomic_bool *helped = argument;
  const double end = processor_seconds() + 2e-3;
  (void)task;
  if (seat > 0) {
    atomic_store(helped, true);
    (void)nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  }
  while (!atomic_load(helped) && processor_seconds() < end) sched_yield();
}

static void record_seat(void *argument, int64_t task, int32_t seat) {
  struct crowd_record *record = argument;
  const double end = processor_seconds() + record->seconds;
  (void)task;
  if (seat > 0) atomic_fetch_add(&record->helped, 1);
  while (processor_seconds() < end) continue;
  sched_yield(); /* on one processor it is the helpers' turn */
}

/* Short calls are then done by their caller, long ones have helpers as ever, and so have short ones
 * some time after. Each is tried until the machine, which may be crowded, lets it be seen. */
static void test_calls_in_a_crowd(void **state) {
  (void)state;
  bool alone = false, long_helped = false, helped_again = false;
  for (int i = 0; i < 50 && !(alone && long_helped); i++) {
    atomic_bool helped = false;
    struct crowd_record short_call = {.seconds = 2e-5}, long_call = {.seconds = 1e-3};
    threads_for(2, 2, lose_processor, &helped);
    threads_for(4, 6, record_seat, &short_call);
    threads_for(4, 20, record_seat, &long_call);
    alone |= short_call.helped == 0;
    long_helped |= long_call.helped > 0;
  }
  for (int i = 0; i < 50 && !helped_again; i++) {
    struct crowd_record call = {.seconds = 1e-4};
    (void)nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    threads_for(4, 8, record_seat, &call);
    helped_again = call.helped > 0;
  }
  assert_true(alone);
  assert_true(long_helped);
  assert_true(helped_again);
}

static void test_lists_of_threads(void **state) {
  (void)state;
  static const struct {
    const char *list;
    int32_t threads;
  } cases[] = {
      {NULL, 0}, {"", 0},   {"3", 3},   {"8,4,2", 8},         {" 2", 2},
      {"0", 0},  {"-4", 0}, {"all", 0}, {"1000000000", 1024}, {"99999999999999999999", 1024}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    assert_int_equal(threads_of_list(cases[i].list), cases[i].threads);
}

static void write_file(const char *folder, const char *name, const char *text) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "we");
  assert_non_null(file);
  assert_true(fputs(text, file) >= 0);
  assert_int_equal(fclose(file), 0);
}

/* A control group's limit and its parents'. */
static void test_control_groups(void **state) {
  (void)state;
  char root[] = "/tmp/fa3-groups-XXXXXX", path[256], membership[256];
  assert_non_null(mkdtemp(root));
  snprintf(path, sizeof path, "%s/pod", root);
  assert_int_equal(mkdir(path, 0700), 0);
  snprintf(path, sizeof path, "%s/pod/job", root);
  assert_int_equal(mkdir(path, 0700), 0);
  snprintf(membership, sizeof membership, "%s/membership", root);

  assert_int_equal(processors_of_group(membership, root), 0); /* no such file */
  write_file(root, "membership", "1:cpu:/elsewhere\n0::/pod/job\n");
  assert_int_equal(processors_of_group(membership, root), 0);
  write_file(root, "pod/job/cpu.max", "max 100000\n");
  assert_int_equal(processors_of_group(membership, root), 0);
  write_file(root, "pod/cpu.max", "350000 100000\n");
  assert_int_equal(processors_of_group(membership, root), 4);
  write_file(root, "pod/job/cpu.max", "10000 100000\n");
  assert_int_equal(processors_of_group(membership, root), 1);
  write_file(root, "pod/job/cpu.max", "nonsense\n");
  assert_int_equal(processors_of_group(membership, root), 4);
  write_file(root, "membership", "0::/\n");
  assert_int_equal(processors_of_group(membership, root), 0);
  write_file(root, "cpu.max", "200000 100000\n");
  assert_int_equal(processors_of_group(membership, root), 2);
  write_file(root, "membership", "0::/pod/job\n"); /* in a container, whose group is the root */
  assert_int_equal(processors_of_group(membership, root), 2);

  static const char *const names[] = {"pod/job/cpu.max", "pod/cpu.max", "cpu.max", "membership"};
  for (int i = 0; i < 4; i++) {
    snprintf(path, sizeof path, "%s/%s", root, names[i]);
    (void)unlink(path);
  }
  snprintf(path, sizeof path, "%s/pod/job", root);
  (void)rmdir(path);
  snprintf(path, sizeof path, "%s/pod", root);
  (void)rmdir(path);
  (void)rmdir(root);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_task_once),   cmocka_unit_test(test_callers_at_once),
      cmocka_unit_test(test_no_tasks),         cmocka_unit_test(test_turns),
      cmocka_unit_test(test_calls_in_a_crowd), cmocka_unit_test(test_lists_of_threads),
      cmocka_unit_test(test_control_groups),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
