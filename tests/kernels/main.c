#include "kernels.h"

#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu/level.h"
#include "sanitized.h"

enum { SETS = 12, SUBJECTS = 13, CHECKS = SANITIZED ? 33 : 100, SAMPLES = 21 };

static const fa3_dtype dtypes[] = {FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16};
static const char *const dtype_names[] = {"", "float32", "float16", "bfloat16"};

#ifdef FA3_X86
void amx_model_multiply(const struct product *p);
void amx_model_enter(void);
void amx_model_leave(void);

/* AMX's level has all but the product from avx512bf16. */
static bool amx_model_usable(void) {
  return cpu_levels[3].usable();
}

static const struct routines *make_amx_model(void) {
  static struct routines model;
  model = amx_routines;
  model.multiply = amx_model_multiply;
  model.enter = amx_model_enter;
  model.leave = amx_model_leave;
  return &model;
}
#endif

/* Every level's sets of routines, and the model of AMX. */
static int find_targets(struct target targets[SETS]) {
  int count = 0;
  for (int32_t i = 0; i < cpu_level_count; i++) {
    const struct level *level = &cpu_levels[i];
    const struct routines *sets[] = {level->floats, level->bfloats};
    for (int s = 0; s < 2; s++) {
      bool seen = false;
      for (int t = 0; t < count; t++) seen |= targets[t].routines == sets[s];
      if (!seen) targets[count++] = (struct target){level->name, level->usable, sets[s]};
    }
  }
#ifdef FA3_X86
  targets[count++] = (struct target){"amx_model", amx_model_usable, make_amx_model()};
#endif
  return count;
}

static void find_subjects(const struct subject *subjects[SUBJECTS]) {
  static const struct subject *const others[] = {
      &multiply_subject,  &cap_subject, &softmax_subject, &gradient_subject,
      &transpose_subject, &dot_subject, &forward_subject, &backward_subject};
  for (int i = 0; i < 5; i++) subjects[i] = &arrange_subjects[i];
  for (int i = 5; i < SUBJECTS; i++) subjects[i] = others[i - 5];
}

static const struct subject *current;

static void print_name(const struct run *run, char *name, size_t size) {
  snprintf(name, size, "%s/%s%s%s", run->target->name, current->name,
           current->every_dtype ? "/" : "", current->every_dtype ? dtype_names[run->dtype] : "");
}

bool wrong(const struct run *run, const char *format, ...) {
  char name[64];
  print_name(run, name, sizeof name);
  printf("%s: ", name);
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  va_end(arguments);
  printf("\n");
  return false;
}

bool near(const struct run *run, const char *what, int64_t row, int64_t column, double value,
          double expected, double bound) {
  if (value == expected || fabs(value - expected) <= bound) return true;
  return wrong(run, "%s of row %d, column %d is %.9g: expected %.9g within %.2g", what, (int)row,
               (int)column, value, expected, bound);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

void report(const struct run *run, const char *what,
            void (*call)(const struct run *run, void *argument), void *argument, double work,
            const char *unit) {
  const double sample = 2e-3; /* seconds: far above the clock's grain */
  call(run, argument);
  double start = now();
  call(run, argument);
  double once = now() - start;
  int calls = once > 0 && once < sample ? (int)(sample / once) + 1 : 1;
  double seconds[SAMPLES];
  for (int s = 0; s < SAMPLES; s++) {
    start = now();
    for (int i = 0; i < calls; i++) call(run, argument);
    seconds[s] = (now() - start) / calls;
  }
  qsort(seconds, SAMPLES, sizeof *seconds, ascending);
  double median = seconds[SAMPLES / 2];
  double spread = (seconds[SAMPLES * 3 / 4] - seconds[SAMPLES / 4]) / median;
  char name[64];
  print_name(run, name, sizeof name);
  printf("%-36s %-12s %10.3f us  +-%4.1f%%  %8.2f G%s/s\n", name, what, 1e6 * median, 50 * spread,
         work / median * 1e-9, unit);
  (void)fflush(stdout);
}

enum action { LIST, CHECK, BENCH };

/* One routine on one dtype: its outcome as the exit status counts it. */
static bool act(enum action action, const struct target *target, const struct subject *subject,
                fa3_dtype dtype, const char *filter) {
  struct run run = {.target = target, .routines = target->routines, .dtype = dtype};
  char name[64];
  print_name(&run, name, sizeof name);
  if (!strstr(name, filter)) return true;
  if (action == LIST) {
    printf("%-36s%s\n", name, target->usable() ? "" : " not on this machine");
    return true;
  }
  if (!target->usable()) {
    printf("%-36s skipped: not on this machine\n", name);
    return true;
  }
  if (action == BENCH) {
    run.rng = rng_for(0);
    subject->bench(&run);
    return true;
  }
  for (int i = 0; i < CHECKS; i++) {
    run.rng = rng_for((uint64_t)i);
    if (!subject->check(&run)) return false;
  }
  printf("%-36s ok\n", name);
  (void)fflush(stdout);
  return true;
}

static int usage(FILE *stream) {
  fputs(
      "usage: test_kernels --check | --bench | --list [NAME]\n"
      "Checks, times or lists the routines whose name contains NAME.\n"
      "FA3_TEST_SEED repeats a run.\n",
      stream);
  return stream == stdout ? 0 : 2;
}

int main(int argc, char **argv) {
  static const struct option options[] = {{"check", no_argument, NULL, CHECK},
                                          {"bench", no_argument, NULL, BENCH},
                                          {"list", no_argument, NULL, LIST},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
  int option = getopt_long(argc, argv, "", options, NULL);
  if (option == 'h') return usage(stdout);
  if (option < 0 || option == '?' || argc - optind > 1) return usage(stderr);
  const char *filter = optind < argc ? argv[optind] : "";

  struct target targets[SETS];
  const struct subject *subjects[SUBJECTS];
  int count = find_targets(targets);
  find_subjects(subjects);
  bool good = true;
  for (int t = 0; t < count; t++)
    for (int s = 0; s < SUBJECTS; s++) {
      current = subjects[s];
      bool bfloat = targets[t].routines->elements_per_word == 2;
      for (int d = 0; d < (current->every_dtype ? 3 : 1); d++)
        if (!bfloat || dtypes[d] == FA3_BFLOAT16 || !current->every_dtype)
          good &= act((enum action)option, &targets[t], current, dtypes[d], filter);
    }
  return good ? 0 : 1;
}
