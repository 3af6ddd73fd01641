/* The processor levels, and which one calls run on. */
#ifndef FA3_CPU_LEVEL_H
#define FA3_CPU_LEVEL_H

#include "routines.h"

struct level {
  const char *name;
  bool (*usable)(void);
  bool (*preferred)(void);        /* to the ones below, where it is usable; null: always */
  const struct routines *floats;  /* float32 and float16 */
  const struct routines *bfloats; /* bfloat16 */
};

/* Each is above the one before. */
extern const struct level cpu_levels[];
extern const int32_t cpu_level_count;

/* The level that calls run on: the one that FA3_CPU_LEVEL names, or else the highest usable one
 * that is preferred. Decided once. Null and FA3_INVALID_ENVIRONMENT's message if the variable is
 * wrong. */
const struct level *cpu_level(void);

const struct routines *level_routines(const struct level *level, fa3_dtype dtype);

#endif
