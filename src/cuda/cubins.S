/* The compiled kernels of variants.def as bytes: `cubin_NAME` each. */
#define CUBIN(name, file)                                  \
  .balign 64; .global cubin_##name; .hidden cubin_##name;  \
  .type cubin_##name, %object;                             \
  cubin_##name: .incbin file;                              \
  .size cubin_##name, . - cubin_##name

#define FA3_FORWARD(dtype, head_dim, value_head_dim, softcap, ...)      \
  CUBIN(forward_##dtype##_##head_dim##_##value_head_dim##_##softcap,    \
        FILE(forward_##dtype##_##head_dim##_##value_head_dim##_##softcap))
#define FA3_BACKWARD(dtype, head_dim, value_head_dim, softcap, ...)     \
  CUBIN(backward_##dtype##_##head_dim##_##value_head_dim##_##softcap,   \
        FILE(backward_##dtype##_##head_dim##_##value_head_dim##_##softcap))
#define FA3_BACKWARD_WIDE FA3_BACKWARD
#define FA3_HELPER(name) CUBIN(name, FILE(name))
#define FA3_HELPER_OF(dtype, name) CUBIN(name##_##dtype, FILE(name##_##dtype))
#define FILE(name) TEXT(name.cubin)
#define TEXT(name) #name

  .section .rodata
#include "kernels/variants.def"

  .section .note.GNU-stack, "", %progbits
