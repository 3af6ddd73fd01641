/* What rows of one head fit in. */
#ifndef FA3_CPU_HEAD_DIM_H
#define FA3_CPU_HEAD_DIM_H

enum { LARGEST_HEAD_DIM = 256 };

#endif
