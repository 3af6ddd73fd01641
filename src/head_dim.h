/* What rows of one head fit in. */
#ifndef FA3_SRC_HEAD_DIM_H
#define FA3_SRC_HEAD_DIM_H

enum { LARGEST_HEAD_DIM = 256 };

#endif
