/* The processor levels against each other: the same trials at every level that this machine can
 * run, each in a process of its own because FA3_CPU_LEVEL is read once. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined __x86_64__ || defined __i386__
#include <cpuid.h>
#endif

#include "level.h"
#include "reference.h"
#include "test.h"
#include "trial.h"

enum { TRIALS = 40, LEVELS = 5, NO_LEVEL = 3 };
static const char *const levels[LEVELS] = {"plain", "avx2", "avx512", "avx512bf16", "amx"};

/* Rows that are compared per trial. */
static const double rows_per_trial = 200;

/* Where the processes leave their outputs: all trials of a level, and then those of the next. A
 * level's output of a trial begins at `begins`, and the last entry is the size of them all. */
static char *shared;
static size_t begins[TRIALS + 1];

static char *outputs_of(int level, uint64_t number) {
  return shared + (size_t)level * begins[TRIALS] + begins[number];
}

static struct trial make_trial(uint64_t number, struct rng *rng) {
  *rng = rng_for(number);
  struct spec spec = spec_random(rng);
  spec.layout = LAYOUT_CONTIGUOUS; /* small outputs */
  return trial_new(&spec, rng);
}

static void find_begins(void) {
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng;
    struct trial trial = make_trial(number, &rng);
    const size_t size = trial.buffers[TENSOR_output].size;
    begins[number + 1] = begins[number] + (size + 63) / 64 * 64;
    trial_free(&trial);
  }
}

/* The child's work: all trials at one level. */
static int run_level(int level) {
  setenv("FA3_CPU_LEVEL", levels[level], 1);
  if (!level_usable(levels[level])) return NO_LEVEL;
  level_require();
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng;
    struct trial trial = make_trial(number, &rng);
    trial_run(&trial, &rng);
    const struct buffer *output = &trial.buffers[TENSOR_output];
    if (output->size) memcpy(outputs_of(level, number), output->data, output->size);
    trial_free(&trial);
  }
  return 0;
}

/* Two levels differ by at most the sum of what each may be off. */
static void compare_row(const struct trial *trial, const bool ran[LEVELS], uint64_t number,
                        int64_t batch, int64_t head, int64_t row) {
  double expected[256], bound[256], lse, lse_bound;
  reference_row(&trial->args, batch, head, row, expected, &lse);
  reference_bound(&trial->args, batch, head, row, expected, lse, bound, &lse_bound);
  int64_t first = reference_output_index(&trial->args, batch, head, row);
  fa3_tensor a = trial->args.output, b = trial->args.output;
  for (int level = 0; level < LEVELS; level++) {
    for (int other = level + 1; other < LEVELS; other++) {
      if (!ran[level] || !ran[other]) continue;
      a.data = outputs_of(level, number);
      b.data = outputs_of(other, number);
      for (int64_t d = 0; d < trial->spec.value_head_dim; d++) {
        double x = reference_load(&a, first + d), y = reference_load(&b, first + d);
        if (!(fabs(x - y) <= 2 * bound[d]))
          fail_msg("trial %" PRIu64 " [batch %" PRId64 ", head %" PRId64 ", row %" PRId64
                   ", %" PRId64 "]: %s gave %.9g, %s %.9g: expected at most %.3g apart",
                   number, batch, head, row, d, levels[level], x, levels[other], y, 2 * bound[d]);
      }
    }
  }
}

static void test_levels_agree(void **state) {
  (void)state;
  rng_run_seed(); /* the same in every process */
  find_begins();
  const size_t size = LEVELS * begins[TRIALS];
  shared =
      mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true(shared != MAP_FAILED);
  bool ran[LEVELS];
  for (int level = 0; level < LEVELS; level++) {
    (void)fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(run_level(level));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != NO_LEVEL))
      fail_msg("level %s did not finish: status 0x%x", levels[level], (unsigned)status);
    ran[level] = WEXITSTATUS(status) == 0;
    printf("%s: %s\n", levels[level], ran[level] ? "ran" : "not on this processor");
  }
  assert_true(ran[0]);
  for (uint64_t number = 0; number < TRIALS; number++) {
    struct rng rng;
    struct trial trial = make_trial(number, &rng);
    int64_t heads_q = trial.spec.heads_k * trial.spec.group;
    double rows = 0;
    for (int64_t b = 0; b < trial.spec.batch; b++)
      rows += (double)(heads_q * reference_seqlen_q(&trial.args, b));
    for (int64_t b = 0; b < trial.spec.batch; b++)
      for (int64_t head = 0; head < heads_q; head++)
        for (int64_t row = 0; row < reference_seqlen_q(&trial.args, b); row++)
          if (rng_chance(&rng, rows_per_trial / rows))
            compare_row(&trial, ran, number, b, head, row);
    trial_free(&trial);
  }
  munmap(shared, size);
}

/* Whether avx512bf16 is faster than avx512 depends on the processor: not on Intel's, as measured
 * (docs/notes/cpu-engine.md). Comes last, as a process chooses once. */
static void test_the_fastest_level_is_chosen(void **state) {
  (void)state;
  const char *fastest = levels[0];
  bool intel = false;
#if defined __x86_64__ || defined __i386__
  unsigned highest, ebx, ecx, edx;
  intel = __get_cpuid(0, &highest, &ebx, &ecx, &edx) && ebx == signature_INTEL_ebx;
#endif
  unsetenv("FA3_CPU_LEVEL");
  for (int level = 1; level < LEVELS; level++)
    if (level_usable(levels[level]) && !(intel && strcmp(levels[level], "avx512bf16") == 0))
      fastest = levels[level];
  fa3_device_info info = {.struct_size = sizeof info};
  assert_int_equal(fa3_get_device_info((fa3_device){FA3_CPU, 0}, &info), FA3_OK);
  assert_string_equal(info.level, fastest);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_levels_agree),
                                     cmocka_unit_test(test_the_fastest_level_is_chosen)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
