/* AMX-BF16's product. The rest of its level is in avx512bf16.c, and its table. */
#ifndef FA3_CPU_AMX_H
#define FA3_CPU_AMX_H

#include "routines.h"

enum { AMX_TILE = 16, AMX_PANEL = 2 * AMX_TILE, AMX_STRIP = 3 * AMX_PANEL };

void amx_multiply(const struct product *p);
void amx_enter(void); /* a thread has the tiles from here */
void amx_leave(void); /* to here */

#endif
