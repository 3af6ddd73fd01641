/* Keys and values of E4M3 codes under queries of 16 bits, unpacked to these (kernels/unpack.cu):
 * the forward kernel then has them, which is faster than to unpack them for each block of queries,
 * where there are many. */
#ifndef FA3_SRC_CUDA_UNPACK_H
#define FA3_SRC_CUDA_UNPACK_H

#include "cuda/context.h"
#include "cuda/staging.h"
#include "kernels/unpack_params.h"
#include "problem.h"

struct cuda_facts;
struct kernel;
extern const struct kernel_kind unpack_kind;

/* A kernel's `unpacked`: of codes with scales of heads, or of rows. */
enum { UNPACKED_HEADS = 1, UNPACKED_ROWS = 2 };

struct unpack_plan {
  const struct kernel *kernel; /* null: nothing is unpacked ahead */
  int64_t heads;               /* key heads at a time: the workspace has room for so many */
  struct reservation room;
};

/* What a call's codes would become. */
int32_t unpacked_form(const struct problem *problem);

/* Whether a call's codes can be unpacked, and enough rows read each that it may pay. The workspace
 * then has room for it, even if the call has too few keys, or too many: so its size never falls
 * when a dimension grows. */
bool may_unpack(const struct problem *problem, const struct cuda_facts *facts);

/* Key heads that are unpacked at a time, which divide all of them; 0 where to attend to codes is
 * faster, for this call. */
int64_t unpacked_heads(const struct problem *problem, const struct cuda_facts *facts);

/* So many key heads of a call, and their queries', from number `first` on. */
struct problem part_of_heads(const struct problem *problem, int64_t first, int64_t heads);

/* The call on unpacked keys and values, which are in the workspace if there is one. */
struct problem unpacked_problem(const struct problem *problem, const struct unpack_plan *plan,
                                char *workspace);

/* Room for unpacked keys and values of as many heads as are unpacked at a time, or would be. */
fa3_status reserve_unpacked(const struct problem *problem, struct reservation *room,
                            size_t *workspace_size);

/* Of the scales of unpacked rows, how many a head of keys has. */
int64_t unpacked_scale_rows(const struct problem *problem);

/* The scales of its keys and values, by unpacked_form. */
void *unpacked_scales(const struct problem *problem, const struct unpack_plan *plan,
                      char *workspace);

/* For the forward kernel, in scope; of sequences with more than `few_queries` queries. */
fa3_status launch_unpack(const struct cuda_scope *scope, const struct problem *problem,
                         const struct unpack_plan *plan, int32_t few_queries, char *workspace);

#endif
