/* The compiled kernels of variants.def as bytes, which the driver unpacks: `fatbin_NAME` each. */
#include "kernels/variants.h"

#define FATBIN(name, ...)                                    \
  .balign 64; .global fatbin_##name; .hidden fatbin_##name;  \
  .type fatbin_##name, %object;                              \
  fatbin_##name: .incbin TEXT(name.fatbin);                  \
  .size fatbin_##name, . - fatbin_##name;
#define TEXT(name) #name

  .section .rodata
  FA3_KERNELS(FATBIN)

  .section .note.GNU-stack, "", %progbits
