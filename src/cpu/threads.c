/* A pool of helpers. A call publishes a job with seats; helpers take seats, and then tasks until
 * there are none left. Whoever finds no job looks out for one for a short time and then sleeps, so
 * idle helpers cost nothing and calls that follow each other closely need wake nobody.
 *
 * There are as many helpers as the largest call so far has asked for. Calls at the same time share
 * them, so that they do not have more threads than processors. */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "integer.h"

enum {
  LOOK_OUT_NANOSECONDS = 200000, /* a few times what it takes to wake a thread */
  NAP_NANOSECONDS = 50000,
  SHORT_NANOSECONDS = 4000000, /* of work; who loses a processor waits about as long for it */
  SHORTEST_CROWD_NANOSECONDS = 20000000,
  LONGEST_CROWD_NANOSECONDS = 1280000000,
  CALLS_WITHOUT_CROWD = 16, /* after so many with helpers it is gone */
  STACK_BYTES = 1 << 20,    /* the tasks' needs are small, address space may be short */
  CACHE_LINE = 64,
  WOKEN_BY_ONE = 2 /* whoever is woken wakes others: many are up soon */
};

struct job {
  _Alignas(CACHE_LINE) atomic_llong next_task;
  _Alignas(CACHE_LINE) atomic_int helpers; /* at work */
  int32_t threads;
  int32_t seats; /* taken so far */
  int64_t tasks;
  task_work *work;
  void *argument;
  struct job *next;
};

static struct {
  pthread_mutex_t lock;
  pthread_cond_t published;
  pthread_cond_t left;      /* the last helper, a job */
  struct job *_Atomic jobs; /* those with free seats */
  int32_t helpers;
  int32_t looking_out;
  atomic_int callers; /* that sleep until their helpers have left */
  _Atomic int64_t crowded_until;
  int64_t crowd_nanoseconds; /* how long that was */
  int64_t calls;             /* with helpers since then */
} pool = {.lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP,
          .published = PTHREAD_COND_INITIALIZER,
          .left = PTHREAD_COND_INITIALIZER};

static void pause_briefly(void) {
#if defined __x86_64__ || defined __i386__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds_of(clockid_t clock) {
  struct timespec now;
  (void)clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int64_t nanoseconds(void) {
  return nanoseconds_of(CLOCK_MONOTONIC);
}

/* A bounded wait without sleep: false if `ready` did not come true. */
static bool look_out(bool (*ready)(const void *), const void *argument) {
  const int64_t end = nanoseconds() + LOOK_OUT_NANOSECONDS;
  do {
    for (int i = 0; i < 16; i++) {
      if (ready(argument)) return true;
      pause_briefly();
    }
  } while (nanoseconds() < end);
  return false;
}

static bool do_task(struct job *job, int32_t seat) {
  const int64_t task = atomic_fetch_add_explicit(&job->next_task, 1, memory_order_relaxed);
  if (task >= job->tasks) return false;
  job->work(job->argument, task, seat);
  return true;
}

static void do_tasks(struct job *job, int32_t seat) {
  while (do_task(job, seat)) continue;
}

/* A crowd: other threads want the processors too, as those of an OpenMP runtime that spin after
 * their work. A helper may then lose its processor in the middle of a task, for milliseconds, and
 * its caller waits; or the caller loses its own to a helper. So calls begin alone, and have helpers
 * only if they are long; idle helpers sleep at once. A crowd is seen where a call takes more than
 * twice the processor time of its caller, and believed in for a time that grows while the first
 * calls after it see it again. */
bool threads_crowded(void) {
  const int64_t until = atomic_load_explicit(&pool.crowded_until, memory_order_relaxed);
  return until && nanoseconds() < until;
}

static void see_crowd(int64_t now) {
  pthread_mutex_lock(&pool.lock);
  const bool again = pool.calls <= CALLS_WITHOUT_CROWD;
  const int64_t longer = again ? 4 * pool.crowd_nanoseconds : 0;
  pool.crowd_nanoseconds =
      smaller(larger(longer, SHORTEST_CROWD_NANOSECONDS), LONGEST_CROWD_NANOSECONDS);
  pool.crowded_until = now + pool.crowd_nanoseconds;
  pool.calls = 0;
  pthread_mutex_unlock(&pool.lock);
}

/* Whether all of the job's tasks take longer than a short call's, as those say that took so long.
 */
static bool is_long(const struct job *job, int64_t took, int64_t done) {
  return (double)took * (double)job->tasks > (double)SHORT_NANOSECONDS * (double)done;
}

/* False as soon as the tasks done say that all of them would take long; some may then be left. Time
 * in which the caller has no processor either does not count; but as the clock of its own time is a
 * system call, and that is where a caller loses its processor, it is asked only where the call
 * looks long by the other clock. */
static bool do_short_work(struct job *job) {
  const int64_t start = nanoseconds();
  int64_t done = 0;
  do {
    if (!do_task(job, 0)) return true;
    done++;
  } while (!is_long(job, nanoseconds() - start, done));

  const int64_t own_start = nanoseconds_of(CLOCK_THREAD_CPUTIME_ID);
  for (done = 1; do_task(job, 0); done++)
    if (is_long(job, nanoseconds_of(CLOCK_THREAD_CPUTIME_ID) - own_start, done)) return false;
  return true;
}

/* The functions from here to help() are called with the pool locked. */

static void withdraw(const struct job *job) {
  struct job *before = NULL, *at = pool.jobs;
  for (; at && at != job; at = at->next) before = at;
  if (!at) return;
  if (before)
    before->next = at->next;
  else
    pool.jobs = at->next;
}

static void wake_helpers(void) {
  const struct job *job = pool.jobs;
  if (!job) return;
  const int64_t wanted = smaller(job->threads - job->seats - pool.looking_out, WOKEN_BY_ONE);
  for (int64_t i = 0; i < wanted; i++) pthread_cond_signal(&pool.published);
}

static bool any_job(const void *unused) {
  (void)unused;
  return atomic_load_explicit(&pool.jobs, memory_order_relaxed);
}

static struct job *wait_for_job(void) {
  if (!pool.jobs && !threads_crowded()) {
    pool.looking_out++;
    pthread_mutex_unlock(&pool.lock);
    (void)look_out(any_job, NULL);
    pthread_mutex_lock(&pool.lock);
    pool.looking_out--;
  }
  while (!pool.jobs) pthread_cond_wait(&pool.published, &pool.lock);
  return pool.jobs;
}

/* The pool is not locked, and the job may be gone as soon as nobody is at work on it. */
static void leave(struct job *job) {
  if (atomic_fetch_sub(&job->helpers, 1) > 1 || !atomic_load(&pool.callers)) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_broadcast(&pool.left);
  pthread_mutex_unlock(&pool.lock);
}

static void *help(void *unused) {
  (void)unused;
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    struct job *job = wait_for_job();
    const int32_t seat = job->seats++;
    if (job->seats == job->threads) withdraw(job);
    atomic_fetch_add_explicit(&job->helpers, 1, memory_order_relaxed);
    wake_helpers();
    pthread_mutex_unlock(&pool.lock);
    do_tasks(job, seat);
    leave(job);
    pthread_mutex_lock(&pool.lock);
  }
  return NULL;
}

/* In the child of a fork there is none of the helpers. */
static void before_fork(void) {
  pthread_mutex_lock(&pool.lock);
}
static void after_fork(void) {
  pthread_mutex_unlock(&pool.lock);
}
static void after_fork_in_child(void) {
  pool.jobs = NULL;
  pool.helpers = pool.looking_out = 0;
  pool.callers = 0;
  pool.crowded_until = 0;
  pool.published = pool.left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.lock = (pthread_mutex_t)PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
}
static bool follows_fork;
static void follow_fork(void) {
  follows_fork = pthread_atfork(before_fork, after_fork, after_fork_in_child) == 0;
}

/* Helpers take none of the program's signals, and run where its first thread may run, which need
 * not be where the calling thread is bound to. */
static bool create_helper(const pthread_attr_t *attributes) {
  pthread_t thread;
  if (pthread_create(&thread, attributes, help, NULL)) return false;
  (void)pthread_setname_np(thread, "fa3");
  pool.helpers++;
  return true;
}

static void create_helpers(int32_t wanted) {
  if (pool.helpers >= wanted) return;
  sigset_t most, before;
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes)) return;
  cpu_set_t processors;
  (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
  if (sched_getaffinity(getpid(), sizeof processors, &processors) == 0)
    (void)pthread_attr_setaffinity_np(&attributes, sizeof processors, &processors);
  (void)sigfillset(&most);
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) (void)sigdelset(&most, faults[i]);
  (void)pthread_sigmask(SIG_SETMASK, &most, &before);
  while (pool.helpers < wanted && create_helper(&attributes)) continue;
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_attr_destroy(&attributes);
}

static void publish(struct job *job) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, follow_fork);
  if (!follows_fork) return; /* a child could hang */
  pthread_mutex_lock(&pool.lock);
  create_helpers(job->threads - 1);
  if (!threads_crowded()) pool.calls++;
  if (pool.helpers) {
    job->next = pool.jobs;
    pool.jobs = job;
    wake_helpers();
  }
  pthread_mutex_unlock(&pool.lock);
}

static bool no_helper(const void *argument) {
  const struct job *job = argument;
  return atomic_load(&job->helpers) == 0;
}

static void withdraw_and_wait(struct job *job) {
  pthread_mutex_lock(&pool.lock);
  withdraw(job);
  pthread_mutex_unlock(&pool.lock);
  if (look_out(no_helper, job)) return;
  pthread_mutex_lock(&pool.lock);
  pool.callers++;
  while (!no_helper(job)) pthread_cond_wait(&pool.left, &pool.lock);
  pool.callers--;
  pthread_mutex_unlock(&pool.lock);
}

void threads_for(int32_t threads, int64_t tasks, task_work *work, void *argument) {
  struct job job = {.work = work, .argument = argument, .tasks = tasks, .seats = 1};
  job.threads = (int32_t)smaller(smaller(threads, tasks), MOST_THREADS);
  if (job.threads <= 1) {
    do_tasks(&job, 0);
    return;
  }
  if (threads_crowded() && do_short_work(&job)) return;
  int cancel; /* a caller that is cancelled now is so when its helpers have left */
  (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
  const int64_t start = nanoseconds(), processor = nanoseconds_of(CLOCK_THREAD_CPUTIME_ID);
  publish(&job);
  do_tasks(&job, 0);
  withdraw_and_wait(&job);
  const int64_t end = nanoseconds();
  if (end - start > LOOK_OUT_NANOSECONDS &&
      end - start > 2 * (nanoseconds_of(CLOCK_THREAD_CPUTIME_ID) - processor))
    see_crowd(end);
  (void)pthread_setcancelstate(cancel, NULL);
}

struct awaited {
  const atomic_llong *value;
  long long wanted;
};

static bool has_come(const void *argument) {
  const struct awaited *awaited = argument;
  return atomic_load_explicit(awaited->value, memory_order_acquire) == awaited->wanted;
}

/* By naps: whoever sets the value has nobody to wake then, which is nearly always so. */
void threads_wait(const atomic_llong *value, long long wanted) {
  const struct awaited awaited = {value, wanted};
  while (!look_out(has_come, &awaited)) {
    const struct timespec nap = {.tv_nsec = NAP_NANOSECONDS};
    (void)nanosleep(&nap, NULL);
  }
}
