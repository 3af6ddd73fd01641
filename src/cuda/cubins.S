/* The compiled kernels of variants.def as bytes: `cubin_NAME` each. */
#include "kernels/variants.h"

#define CUBIN(name, ...)                                   \
  .balign 64; .global cubin_##name; .hidden cubin_##name;  \
  .type cubin_##name, %object;                             \
  cubin_##name: .incbin TEXT(name.cubin);                  \
  .size cubin_##name, . - cubin_##name;
#define TEXT(name) #name

  .section .rodata
  FA3_KERNELS(CUBIN)

  .section .note.GNU-stack, "", %progbits
