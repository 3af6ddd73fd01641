#include "spec.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* Mostly tiny, sometimes long enough for several tiles of any engine. */
static int64_t random_seqlen(struct rng *rng) {
  int64_t longest = RNG_PICK(rng, 1, 5, 17, 40, 70, 130, 130, 300, 900);
  return rng_chance(rng, 0.03) ? 0 : rng_between(rng, 1, longest);
}

static int64_t random_window(struct rng *rng, int64_t seqlen) {
  if (rng_chance(rng, 0.3)) return -1;
  if (rng_chance(rng, 0.1)) return RNG_PICK(rng, INT64_MAX, INT64_MAX / 2, 1 << 30);
  return rng_between(rng, 0, rng_chance(rng, 0.5) ? 8 : seqlen + 3);
}

static fa3_dtype random_dtype(struct rng *rng) {
  return (fa3_dtype)RNG_PICK(rng, FA3_FLOAT32, FA3_FLOAT16, FA3_BFLOAT16);
}

static int64_t random_head_dim(struct rng *rng) {
  return rng_chance(rng, 0.5) ? RNG_PICK(rng, 64, 128) : 8 * rng_between(rng, 1, 32);
}

static void draw_codes(struct spec *spec, struct rng *rng) {
  spec->codes = true;
  spec->head_dim = (spec->head_dim + 15) / 16 * 16;
  spec->value_head_dim = (spec->value_head_dim + 15) / 16 * 16;
  spec->key_scale = (enum scale_form)rng_between(rng, 0, SCALE_FORMS - 1);
  spec->value_scale = (enum scale_form)rng_between(rng, 0, SCALE_FORMS - 1);
  spec->scale_rows = RNG_PICK(rng, 1, 1, 2, 16, 100);
}

struct spec spec_random(struct rng *rng) {
  struct spec spec = {.dtype = random_dtype(rng)};
  spec.output_dtype = rng_chance(rng, 0.3) ? FA3_FLOAT32 : spec.dtype;
  if (rng_chance(rng, 0.3)) spec.sink_dtype = rng_chance(rng, 0.5) ? FA3_FLOAT32 : spec.dtype;
  spec.batch = rng_chance(rng, 0.02) ? 0 : rng_between(rng, 1, 3);
  spec.heads_k = rng_between(rng, 1, 3);
  spec.group = RNG_PICK(rng, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8);
  spec.head_dim = random_head_dim(rng);
  spec.value_head_dim = rng_chance(rng, 0.6) ? spec.head_dim : random_head_dim(rng);
  spec.max_seqlen_q = random_seqlen(rng);
  spec.max_seqlen_k = rng_chance(rng, 0.4) ? spec.max_seqlen_q : random_seqlen(rng);
  while (spec.batch * spec.heads_k * spec.group * spec.max_seqlen_q * spec.head_dim > 300000)
    spec.max_seqlen_q /= 2;
  while (spec.batch * spec.heads_k * spec.max_seqlen_k * spec.head_dim > 300000)
    spec.max_seqlen_k /= 2;
  spec.packed_q = rng_chance(rng, 0.35);
  spec.packed_k = rng_chance(rng, 0.8) ? spec.packed_q : !spec.packed_q;
  spec.seqused_q = rng_chance(rng, 0.15);
  spec.seqused_k = rng_chance(rng, 0.25);
  spec.leftpad_k = rng_chance(rng, 0.15);
  spec.batch_index = !spec.packed_k && rng_chance(rng, 0.2);
  if (!spec.packed_k && !spec.batch_index && rng_chance(rng, 0.4))
    spec.page_size = RNG_PICK(rng, 1, 2, 7, 16, 16, 64, 64, 100, 256);
  if (rng_chance(rng, 0.2))
    spec.num_splits = (int32_t)RNG_PICK(rng, 1, 2, 3, 8, 100);
  else if (rng_chance(rng, 0.2))
    spec.split_keys = RNG_PICK(rng, 64, 128, 512);
  spec.lse = rng_chance(rng, 0.8);

  if (rng_chance(rng, 0.5)) spec.flags |= FA3_CAUSAL;
  if (rng_chance(rng, 0.35)) {
    spec.flags |= FA3_WINDOW;
    spec.window_left = random_window(rng, spec.max_seqlen_k);
    spec.window_right = random_window(rng, spec.max_seqlen_k);
  }
  spec.diagonal = (spec.flags & (FA3_CAUSAL | FA3_WINDOW)) && rng_chance(rng, 0.25);
  if (rng_chance(rng, 0.3)) {
    spec.flags |= FA3_SCALE;
    spec.scale = rng_chance(rng, 0.1) ? 0 : (float)(0.1 * rng_normal(rng));
  }
  if (rng_chance(rng, 0.25)) spec.softcap = (float)RNG_PICK(rng, 1, 15, 30, 50);
  spec.num_threads = (int32_t)RNG_PICK(rng, 0, 0, 1, 2, 3, 7);
  spec.layout = (enum layout)rng_between(rng, 0, LAYOUT_COUNT - 1);
  spec.spread = rng_chance(rng, 0.15) ? 3 : 1;
  spec.sink = 3;
  if (rng_chance(rng, 0.2)) draw_codes(&spec, rng);
  return spec;
}

/* Scores are products of a scale and two elements: the exponents of the first two are drawn, that
 * of the elements follows, within what the dtype holds. */
struct spec spec_random_extreme(struct rng *rng) {
  struct spec spec = spec_random(rng);
  const double score = (double)rng_between(rng, -10, 30);
  double scale = 0;
  spec.flags &= ~(uint32_t)FA3_SCALE;
  spec.scale = 0;
  if (rng_chance(rng, 0.6)) {
    spec.flags |= FA3_SCALE;
    scale = (double)RNG_PICK(rng, -37, -30, -10, -1, 0, 10, 25, 38);
    spec.scale = (float)((rng_chance(rng, 0.5) ? 1 : -1) * (scale == 38 ? 3.4e38 : pow(10, scale)));
  }
  const double most = spec.dtype == FA3_FLOAT16 ? 3.7 : 17; /* none is infinite */
  spec.spread = pow(10, fmax(fmin((score - scale) / 2, most), -most));
  if (rng_chance(rng, 0.1)) spec.softcap = 1.2e-38f;
  spec.one_hot = rng_chance(rng, 0.5);
  spec.sink =
      pow(10, (double)RNG_PICK(rng, -30, 0, 5, 30, spec.sink_dtype == FA3_FLOAT16 ? 4 : 38));
  return spec;
}

void spec_print(const struct spec *spec, char *text, size_t size) {
  static const char *const layouts[] = {"contiguous", "heads first", "padded", "expanded"};
  snprintf(
      text, size,
      "dtype %d codes %d scales %d/%d of %" PRId64 " output %d sink %d batch %" PRId64
      " heads %" PRId64 "x%" PRId64 " head_dim %" PRId64 "/%" PRId64 " seqlen %" PRId64 "/%" PRId64
      " packed %d/%d seqused %d/%d leftpad %d index %d pages of %" PRId64
      " splits %d split_keys %" PRId64 " diagonal %d lse %d flags 0x%" PRIx32 " window %" PRId64
      "/%" PRId64 " scale %g softcap %g threads %d %s spread %g one_hot %d sink %g",
      spec->dtype, spec->codes, (int)spec->key_scale, (int)spec->value_scale, spec->scale_rows,
      spec->output_dtype, spec->sink_dtype, spec->batch, spec->heads_k, spec->group, spec->head_dim,
      spec->value_head_dim, spec->max_seqlen_q, spec->max_seqlen_k, spec->packed_q, spec->packed_k,
      spec->seqused_q, spec->seqused_k, spec->leftpad_k, spec->batch_index, spec->page_size,
      spec->num_splits, spec->split_keys, spec->diagonal, spec->lse, spec->flags, spec->window_left,
      spec->window_right, (double)spec->scale, (double)spec->softcap, spec->num_threads,
      layouts[spec->layout], spec->spread, spec->one_hot, spec->sink);
}
