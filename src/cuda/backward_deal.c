#include "cuda/backward_deal.h"

#include <math.h>

#include "cuda/backward_parts.h"
#include "cuda/backward_sections.h"
#include "cuda/backward_sums.h"
#include "cuda/kernels.h"
#include "cuda/sequences.h"
#include "integer.h"

/* Between two tiles of a window that come to the same block of queries. */
enum { BETWEEN_BYTES = 30 << 20 };

/* Whether a tile of keys should be done with a query head before it takes the next. Under a window
 * a tile begins at a block of its own, and comes to those of the tile before it so many blocks
 * later, times the heads of the group that take a block in turn. What all multiprocessors read and
 * add to in between, Q, dO and dQ, is to stay in the L2 cache. At the end of a sequence tiles begin
 * at the same block, and by head would wait for each other at each: so the window is to be short.
 */
static bool goes_by_head(const struct problem *problem, const fa3_key_tiles *tiles) {
  const int64_t longest = longest_query(problem);
  const double heads = (double)problem->heads_q / (double)larger(problem->heads_k, 1);
  const double between = heads / tiles->head_parts * MULTIPROCESSORS * TILE_K;
  const double all = (double)(problem->query.batch * problem->rows_q * problem->heads_q);
  const double bytes_of_row = (double)(6 * problem->head_dim + 2 * problem->value_head_dim);
  return heads > 1 && problem->window_left + problem->window_right <= longest / 2 &&
         fmin(between, all) * bytes_of_row > BETWEEN_BYTES;
}

/* The kernel that does so, or the same if there is none of its size. */
static const struct kernel *find_by_head(const struct kernel *kernel, bool softcap) {
  const struct kernel_need need = {.kind = kernel->kind,
                                   .architecture = kernel->architecture,
                                   .dtype = (fa3_dtype)kernel->dtype,
                                   .head_dim = kernel->head_dim,
                                   .value_head_dim = kernel->value_head_dim,
                                   .softcap = softcap,
                                   .by_head = true,
                                   .queries = kernel->least_queries};
  const struct kernel *other = find_kernel(&need);
  return other && other->head_dim == kernel->head_dim && other->tile_q == kernel->tile_q ? other
                                                                                         : kernel;
}

/* Whether packed sequences are taken longest first, so that the tiles that end last are short ones.
 * Under a window these are short in any case. Where all begin at once, sorting costs more than it
 * gains. */
static bool takes_longest_first(const struct problem *problem, const struct backward_plan *plan) {
  return lengths_differ(problem) && !has_window(problem) && plan->cluster == 1 &&
         fa3_key_tile_count(&plan->tiles) > MULTIPROCESSORS / 2 && problem->batch > 1 &&
         problem->batch <= FA3_MOST_SORTED;
}

void deal_tiles(const struct problem *problem, int64_t workers, struct backward_plan *plan) {
  const struct visits visits = count_visits(problem, plan->kernel, &plan->tiles);
  plan->tiles.head_parts = plan->tiles.row_parts = 1;
  if (fa3_key_tile_count(&plan->tiles) > 0) {
    deal_parts(problem, &visits, MULTIPROCESSORS / plan->cluster, plan);
    deal_groups(problem, &visits, plan);
  }
  if (goes_by_head(problem, &plan->tiles))
    plan->kernel = find_by_head(plan->kernel, problem->softcap > 0);
  plan->tiles.longest_first = takes_longest_first(problem, plan);
  plan->tiles.section = (int32_t)find_section(problem, &visits, plan, workers);
  plan->tiles.sums_log2 = plan->tiles.upward = plan->tiles.rising = 0;
  plan->tiles.staggered = plan->tiles.stagger_log2 = 0;
  plan->finished_later = false;
  if (fa3_key_tile_count(&plan->tiles) > 0 && plan->blocks_q > 0) {
    deal_sums(problem, &visits, plan);
    deal_rising(problem, &visits, plan);
    deal_half_rising(problem, &visits, plan);
  }
  /* With 128 queries a step the last tile takes all sums, if it is not the last of all blocks. */
  const bool takes_sums = plan->kernel->tile_q == 128 && !alike(&visits) && !has_window(problem);
  if ((fa3_sum_count(&plan->tiles) > 1 && !takes_sums) || finish_later(problem, plan))
    plan->finished_later = true;
}
