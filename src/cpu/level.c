#include "level.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#ifdef FA3_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

struct cpuid {
  unsigned eax, ebx, ecx, edx;
};

/* All zero for a leaf that the processor does not have. */
static struct cpuid cpuid(unsigned leaf, unsigned subleaf) {
  struct cpuid id = {0, 0, 0, 0};
  __get_cpuid_count(leaf, subleaf, &id.eax, &id.ebx, &id.ecx, &id.edx);
  return id;
}

/* Which register states the operating system saves (XCR0). */
static bool saves(unsigned states) {
  if (!(cpuid(1, 0).ecx & bit_OSXSAVE)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & states) == states;
}

static bool usable_avx2(void) {
  const unsigned base = bit_AVX | bit_FMA | bit_F16C;
  const unsigned sse_and_ymm = 0x6;
  return (cpuid(1, 0).ecx & base) == base && cpuid(7, 0).ebx & bit_AVX2 && saves(sse_and_ymm);
}

static bool usable_avx512(void) {
  const unsigned base = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  const unsigned masks_and_zmm = 0xe0;
  return usable_avx2() && (cpuid(7, 0).ebx & base) == base && saves(masks_and_zmm);
}

static bool usable_avx512bf16(void) {
  const unsigned avx512_bf16 = 1u << 5;
  return usable_avx512() && cpuid(7, 1).eax & avx512_bf16 && cpuid(7, 0).ecx & bit_AVX512VBMI;
}

/* Intel's VDPBF16PS takes as long as the float32 multiply-adds that it stands for (a Sapphire
 * Rapids: 26.7 ms with it, 15.0 without), AMD's half as long. */
static bool prefers_avx512bf16(void) {
  const struct cpuid vendor = cpuid(0, 0);
  return !(vendor.ebx == signature_INTEL_ebx && vendor.edx == signature_INTEL_edx &&
           vendor.ecx == signature_INTEL_ecx);
}

/* Linux hands out the tile registers on request only (Documentation/arch/x86/xstate.rst). */
static bool usable_amx(void) {
  const unsigned amx_bf16_and_tile = 1u << 22 | 1u << 24;
  const unsigned tile_config_and_data = 0x60000;
  const long request_permission = 0x1023, tile_data = 18;
  return usable_avx512bf16() && (cpuid(7, 0).edx & amx_bf16_and_tile) == amx_bf16_and_tile &&
         saves(tile_config_and_data) && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

static bool usable_always(void) {
  return true;
}

const struct level cpu_levels[] = {
    {"plain", usable_always, NULL, &plain_routines, &plain_routines},
#ifdef FA3_X86
    {"avx2", usable_avx2, NULL, &avx2_routines, &avx2_routines},
    {"avx512", usable_avx512, NULL, &avx512_routines, &avx512_routines},
    {"avx512bf16", usable_avx512bf16, prefers_avx512bf16, &avx512_routines, &avx512bf16_routines},
    {"amx", usable_amx, NULL, &avx512_routines, &amx_routines},
#endif
};
const int32_t cpu_level_count = sizeof cpu_levels / sizeof *cpu_levels;

static const struct level *selected;
static char mistake[200];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void select_level(void) {
  const char *wanted = getenv("FA3_CPU_LEVEL");
  char possible[100] = "";
  for (int32_t i = 0; i < cpu_level_count; i++) {
    if (!cpu_levels[i].usable()) continue;
    const bool preferred = !cpu_levels[i].preferred || cpu_levels[i].preferred();
    if (wanted && *wanted ? strcmp(wanted, cpu_levels[i].name) == 0 : preferred)
      selected = &cpu_levels[i];
    size_t length = strlen(possible);
    snprintf(possible + length, sizeof possible - length, "%s%s", i ? ", " : "",
             cpu_levels[i].name);
  }
  if (!selected)
    snprintf(mistake, sizeof mistake, "FA3_CPU_LEVEL is \"%.40s\": expected one of %s", wanted,
             possible);
}

const struct level *cpu_level(void) {
  pthread_once(&once, select_level);
  if (!selected) set_error(FA3_INVALID_ENVIRONMENT, "%s", mistake);
  return selected;
}

const struct routines *level_routines(const struct level *level, fa3_dtype dtype) {
  return dtype == FA3_BFLOAT16 ? level->bfloats : level->floats;
}
