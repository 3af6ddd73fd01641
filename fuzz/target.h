/* What libFuzzer, or replay.c, calls. */
#ifndef FA3_FUZZ_TARGET_H
#define FA3_FUZZ_TARGET_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
