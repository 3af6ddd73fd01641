#include "level.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fa3.h"
#include "test.h"

bool level_usable(const char *level) {
  for (int32_t i = 0; i < fa3_kernel_count(); i++) {
    fa3_kernel_info kernel = {.struct_size = sizeof kernel};
    if (fa3_get_kernel_info(i, &kernel)) continue;
    if (strcmp(kernel.engine, "cpu") == 0 && strcmp(kernel.name, level) == 0 && kernel.usable)
      return true;
  }
  return false;
}

void level_require(void) {
  const char *level = getenv("FA3_CPU_LEVEL");
  if (!level) return;
  if (!level_usable(level)) {
    printf("skipped: this processor can't run level %s\n", level);
    exit(TEST_SKIPPED);
  }
  fa3_device_info info = {.struct_size = sizeof info};
  if (fa3_get_device_info((fa3_device){FA3_CPU, 0}, &info) || strcmp(info.level, level) != 0) {
    printf("FA3_CPU_LEVEL=%s, but the engine runs at \"%s\" (%s)\n", level, info.level,
           fa3_last_error());
    exit(1);
  }
}
