#include "gpu_trial.h"

#include <math.h>
#include <stdlib.h>

#include "reference.h"

/* A packed batch of many sequences, short but for one. */
static void pack_many(struct spec *spec, int64_t batch, int64_t longest, struct rng *rng) {
  spec->batch = batch;
  spec->heads_k = 1;
  spec->group = rng_between(rng, 1, 2);
  spec->max_seqlen_q = spec->max_seqlen_k = longest;
  spec->packed_q = spec->packed_k = true;
  spec->batch_index = false;
  spec->page_size = 0;
}

/* Of a large one, or the arena would not hold it; of codes, for the copy engine to take them. */
static void leave_no_gaps(struct spec *spec) {
  if (spec->layout > LAYOUT_HEADS_FIRST) spec->layout = LAYOUT_HEADS_FIRST;
}

static void clear_mask(struct spec *spec) {
  spec->flags &= ~(uint32_t)(FA3_CAUSAL | FA3_WINDOW);
  spec->diagonal = false;
  spec->window_left = spec->window_right = 0;
}

/* As many queries as keys, not packed, under a causal mask alone. */
static void set_causal_square(struct spec *spec, int64_t length) {
  spec->max_seqlen_q = spec->max_seqlen_k = length;
  spec->packed_q = spec->packed_k = false;
  clear_mask(spec);
  spec->flags |= FA3_CAUSAL;
}

/* Values of fewer columns, now and then, for the kernel of these head dims. */
static void set_head_dims(struct spec *spec, int64_t head_dim, struct rng *rng) {
  spec->head_dim = head_dim;
  spec->value_head_dim = rng_chance(rng, 0.7) ? head_dim : 8 * rng_between(rng, 1, head_dim / 8);
}

/* Rows of a call without lengths: dense, or in pages. */
static void set_dense(struct spec *spec) {
  spec->packed_q = spec->packed_k = false;
  spec->seqused_q = spec->seqused_k = false;
}

/* Dense 16-bit rows that the copy engine takes, each of which sees all keys as they are. */
static void set_plain(struct spec *spec) {
  set_dense(spec);
  spec->codes = spec->leftpad_k = false;
  spec->page_size = 0;
  spec->softcap = 0;
  leave_no_gaps(spec);
  clear_mask(spec);
}

/* Few queries against caches so long, or so many, that their keys are dealt out, or lie in more
 * parts than a cluster has, that pairs of blocks fill the GPU, or that blocks have two heads
 * (decode_splits.c); of codes a few more queries too, for chunk_fp8. */
static void decode_long(struct spec *spec, struct rng *rng) {
  enum { PARTS, DEALT, PAIRS, TWO_HEADS };
  int64_t rows = 0;                                        /* of all heads */
  const bool chunks = spec->codes && rng_chance(rng, 0.4); /* more than a block's rows */
  const int64_t most = (chunks ? RNG_PICK(rng, 32, 70) : 16) / spec->group;
  spec->max_seqlen_q = rng_between(rng, chunks ? 16 / spec->group + 1 : 1, most);
  spec->head_dim = spec->value_head_dim = RNG_PICK(rng, 16, 48, 64, 64);
  spec->num_splits = 0;
  spec->split_keys = 0;
  spec->batch_index = false;
  leave_no_gaps(spec);
  switch (rng_between(rng, 0, spec->codes ? TWO_HEADS : PAIRS)) {
    case PARTS:
      spec->batch = rng_between(rng, 1, 2);
      spec->heads_k = rng_between(rng, 1, 2);
      rows = rng_between(rng, 8200, 20000) * spec->batch * spec->heads_k;
      spec->head_dim = spec->value_head_dim = RNG_PICK(rng, 64, 120, 128, 256);
      break;
    case DEALT:
      spec->batch = rng_between(rng, 2, 12);
      spec->heads_k = rng_between(rng, 1, 6);
      rows = spec->codes ? 210000 : 110000;
      spec->seqused_k = true;
      if (!spec->codes && rng_chance(rng, 0.5)) spec->head_dim = spec->value_head_dim = 128;
      break;
    case PAIRS:
      spec->heads_k = RNG_PICK(rng, 1, 2, 4, 8);
      spec->batch = rng_between(rng, 60, 66) / spec->heads_k;
      rows = 66 * (spec->codes ? rng_between(rng, 1100, 1400) : rng_between(rng, 2200, 2500));
      set_dense(spec);
      break;
    default:
      spec->batch = rng_between(rng, 10, 40);
      spec->heads_k = 2 * rng_between(rng, 1, 4);
      spec->group = rng_between(rng, 1, 8);
      spec->max_seqlen_q = chunks ? 32 / spec->group : 1;
      spec->head_dim = spec->value_head_dim =
          chunks ? RNG_PICK(rng, 16, 112, 128) : RNG_PICK(rng, 16, 16, 32);
      rows = spec->head_dim > 64 ? 270000 : 530000;
  }
  if (spec->batch > 0) spec->max_seqlen_k = rows / (spec->batch * spec->heads_k) + 1;
}

static struct spec random_forward(bool backward, struct rng *rng) {
  const bool extreme = rng_chance(rng, backward ? 0.2 : 0.1);
  struct spec spec = extreme ? spec_random_extreme(rng) : spec_random(rng);
  spec.dtype = rng_chance(rng, 0.5) ? FA3_FLOAT16 : FA3_BFLOAT16;
  if (spec.dtype == FA3_FLOAT16) spec.spread = fmax(fmin(spec.spread, 5e3), 1e-4);
  spec.scale = fmaxf(fminf(spec.scale, 2e38f), -2e38f); /* more is refused, */
  /* and more over the softcap; with scale 0 it is 1 over the root of the head dim. */
  if (spec.softcap > 0) spec.softcap = fmaxf(spec.softcap, fmaxf(fabsf(spec.scale), 1) / 1e38f);
  spec.output_dtype = spec.dtype;
  if (spec.sink_dtype != 0 && spec.sink_dtype != FA3_FLOAT32) spec.sink_dtype = spec.dtype;
  if (!backward && rng_chance(rng, 0.1)) spec.output_dtype = FA3_FLOAT32;
  spec.num_threads = 1; /* of the CPU's forward pass; the trials have the processors */
  /* The pairs of head dims that kernels are made for, more often than chance would. */
  if (rng_chance(rng, 0.5)) {
    spec.head_dim = RNG_PICK(rng, 64, 96, 128, 192, 256);
    spec.value_head_dim = spec.head_dim == 192 && rng_chance(rng, 0.5) ? 128 : spec.head_dim;
  }
  /* Long enough for many tiles of keys, which a GPU takes and the host's reference samples. */
  if (rng_chance(rng, 0.15)) {
    spec.batch = rng_between(rng, 1, 2);
    spec.heads_k = 1;
    spec.max_seqlen_k = rng_between(rng, 500, 5000);
    if (rng_chance(rng, 0.3)) spec.max_seqlen_q = rng_between(rng, 500, 3000) / spec.group + 1;
  }
  /* Chunks of prompts beside long sequences: keys dealt out, and results put together. */
  if (!backward && rng_chance(rng, 0.04)) {
    const bool many = rng_chance(rng, 0.3);
    spec.batch = rng_between(rng, 2, many ? 10 : 5);
    spec.heads_k = rng_between(rng, 1, 2);
    spec.group = rng_between(rng, 1, 4);
    spec.max_seqlen_q = rng_between(rng, 20, many ? 900 : 250);
    spec.max_seqlen_k = rng_between(rng, 1100, 4500);
    spec.packed_q = rng_chance(rng, 0.7);
    spec.seqused_k = true;
    spec.packed_k = false;
    if (rng_chance(rng, 0.7)) spec.num_splits = 0;
    if (many) spec.split_keys = 0; /* its parts would not fit the arena */
  }
  /* The same without lengths of queries: tiles of whole chunks for several multiprocessors each. */
  if (!backward && rng_chance(rng, 0.01)) {
    spec.batch = rng_between(rng, 4, 7);
    spec.heads_k = 1;
    spec.group = rng_between(rng, 6, 12);
    spec.max_seqlen_q = rng_between(rng, 300, 600);
    spec.max_seqlen_k = rng_between(rng, 3000, 4500);
    spec.packed_q = spec.packed_k = spec.seqused_q = false;
    spec.seqused_k = true;
    spec.num_splits = 0;
    spec.split_keys = 0;
  }
  if (!backward && rng_chance(rng, 0.03)) decode_long(&spec, rng);
  /* Chunks of prompts on caches of codes: tiles whose keys have one scale, and others. */
  if (!backward && spec.codes && rng_chance(rng, 0.15)) {
    spec.batch = rng_between(rng, 1, 3);
    spec.heads_k = rng_between(rng, 1, 2);
    spec.group = rng_between(rng, 1, 4);
    spec.max_seqlen_q = rng_between(rng, 100, 300) / spec.group + 1;
    spec.max_seqlen_k = rng_between(rng, 6000, 9000) / (spec.batch * spec.heads_k);
    spec.page_size = rng_chance(rng, 0.7) ? RNG_PICK(rng, 64, 128, 192, 256) : 0;
    spec.packed_k = false;
    spec.batch_index = false;
    if (rng_chance(rng, 0.5)) spec.scale_rows = RNG_PICK(rng, 64, 128);
    if (rng_chance(rng, 0.7)) spec.softcap = 0;
    if (rng_chance(rng, 0.7)) spec.leftpad_k = false;
  }
  /* Queries enough that codes are unpacked for the forward kernel. */
  if (!backward && spec.codes && rng_chance(rng, 0.1)) {
    const bool window = spec.flags & FA3_WINDOW;
    spec.batch = rng_between(rng, 1, 2);
    spec.heads_k = rng_between(rng, 1, 2);
    spec.group = rng_between(rng, 4, 8);
    set_head_dims(&spec, RNG_PICK(rng, 64, 80, 128, 128, 192, 256), rng);
    spec.value_head_dim = (spec.value_head_dim + 15) / 16 * 16;
    spec.max_seqlen_q = rng_between(rng, 8000, 12000) / (spec.heads_k * spec.group);
    spec.max_seqlen_k = rng_between(rng, 3000, window ? 5000 : 3500) / spec.batch;
    spec.page_size = rng_chance(rng, 0.6) ? RNG_PICK(rng, 1, 7, 16, 64, 256) : 0;
    spec.packed_k = spec.leftpad_k = false;
    spec.batch_index = !spec.page_size && rng_chance(rng, 0.3);
    /* Of heads: two kinds of kernels. */
    if (rng_chance(rng, 0.5)) {
      spec.key_scale = spec.page_size ? RNG_PICK(rng, SCALE_NONE, SCALE_ONE) : SCALE_HEADS;
      spec.value_scale = spec.page_size ? RNG_PICK(rng, SCALE_NONE, SCALE_ONE) : SCALE_HEADS;
    }
    spec.output_dtype = spec.dtype;
    spec.softcap = 0;
    spec.split_keys = 0;
    spec.scale = fabsf(spec.scale);
  }
  /* Queries enough for the backward kernel that takes more of them at a time (variants.def). */
  if (rng_chance(rng, 0.06)) {
    const bool masked = spec.flags & (FA3_CAUSAL | FA3_WINDOW);
    spec.batch = 1;
    spec.heads_k = 1;
    spec.group = rng_between(rng, 1, 2);
    spec.head_dim = spec.value_head_dim = RNG_PICK(rng, 104, 112, 128, 128);
    spec.softcap = 0;
    spec.max_seqlen_q = rng_between(rng, 2048, 2300) * (masked ? 4 : 1);
    spec.max_seqlen_k = rng_between(rng, 1, 600);
  }
  /* No mask, and as many keys in all sequences: kernels that leave out what the last tile lacks. */
  if (!backward && rng_chance(rng, 0.04)) {
    spec.batch = rng_between(rng, 3, 8);
    spec.heads_k = rng_between(rng, 1, 3);
    set_head_dims(&spec, RNG_PICK(rng, 64, 64, 104, 128, 128), rng);
    spec.softcap = 0;
    spec.max_seqlen_q = rng_between(rng, 60, 300);
    spec.max_seqlen_k = rng_between(rng, 1, 600);
    set_dense(&spec);
    spec.leftpad_k = spec.codes = false;
    spec.page_size = 0;
    clear_mask(&spec);
  }
  /* No mask, and somewhat more tiles than multiprocessors: the last ones are cut. */
  if (!backward && rng_chance(rng, 0.03)) {
    set_head_dims(&spec, RNG_PICK(rng, 64, 96, 128, 192, 256), rng);
    spec.max_seqlen_q = rng_between(rng, 300, 700);
    spec.max_seqlen_k = rng_between(rng, 512, 700);
    const int64_t of_head = (spec.max_seqlen_q + 127) / 128;
    spec.batch = rng_between(rng, 3, 6);
    spec.heads_k = rng_between(rng, 134, 210) / (spec.batch * of_head) + 1;
    spec.group = 1;
    spec.softcap = spec.head_dim == 64 ? 0 : spec.softcap;
    set_dense(&spec);
    spec.codes = spec.leftpad_k = false;
    if (spec.head_dim != 128) spec.page_size = 0;
    leave_no_gaps(&spec);
    clear_mask(&spec);
  }
  /* Whole tiles under a causal mask whose diagonal crosses a tile of keys for each 64 queries. */
  if (!backward && rng_chance(rng, 0.05)) {
    set_head_dims(&spec, RNG_PICK(rng, 64, 64, 40, 104, 128, 128, 200, 256), rng);
    const int64_t tile = spec.head_dim <= 64 ? 192 : 128;
    spec.max_seqlen_q = rng_between(rng, 130, 700);
    spec.max_seqlen_k = spec.max_seqlen_q + 64 * rng_between(rng, -2, 4);
    const int64_t of_head = (spec.max_seqlen_q + tile - 1) / tile;
    spec.batch = rng_between(rng, 2, 6);
    spec.heads_k = rng_between(rng, 134, 280) / (spec.batch * of_head) + 1;
    spec.group = 1;
    set_plain(&spec);
    spec.flags |= FA3_CAUSAL;
  }
  /* Many keys of few columns: references follow lazily behind the first of them (forward.cu). */
  if (!backward && rng_chance(rng, 0.02)) {
    set_head_dims(&spec, RNG_PICK(rng, 40, 64, 64), rng);
    spec.batch = rng_between(rng, 1, 2);
    spec.heads_k = rng_between(rng, 1, 2);
    spec.group = rng_between(rng, 1, 2);
    spec.max_seqlen_q = rng_between(rng, 200, 500);
    spec.max_seqlen_k = rng_between(rng, 1600, 2600);
    spec.num_splits = 1;
    spec.split_keys = 0;
    set_plain(&spec);
    if (rng_chance(rng, 0.5)) spec.flags |= FA3_CAUSAL;
  }
  /* Few queries of grouped heads, which share tiles. */
  if (!backward && rng_chance(rng, 0.04)) {
    spec.group = rng_between(rng, 2, 8);
    spec.max_seqlen_q = rng_between(rng, 20, 250);
    spec.max_seqlen_k = rng_between(rng, 20, 500);
  }
  /* Grouped heads under a window, and more queries than the L2 cache holds: kernels that go by
   * head. */
  if (backward && rng_chance(rng, 0.04)) {
    spec.batch = 1;
    spec.heads_k = 8;
    spec.group = 4;
    spec.head_dim = spec.value_head_dim = RNG_PICK(rng, 64, 120, 128);
    spec.max_seqlen_q = spec.max_seqlen_k = rng_between(rng, 2100, 2300);
    spec.flags |= FA3_WINDOW;
    spec.window_left = rng_between(rng, 0, 800);
    spec.window_right = rng_between(rng, 0, 200);
  }
  /* Tiles that each begin at a block of their own (backward_sums.c). */
  if (backward && rng_chance(rng, 0.04)) {
    spec.batch = rng_between(rng, 1, 2);
    spec.heads_k = rng_between(rng, 12, 18) / spec.batch;
    spec.group = rng_between(rng, 1, 3);
    set_head_dims(&spec, RNG_PICK(rng, 64, 88, 128), rng);
    spec.max_seqlen_q = rng_between(rng, 1100, 1600);
    spec.max_seqlen_k = rng_between(rng, 900, 1100);
    spec.packed_q = spec.packed_k = false;
    clear_mask(&spec);
  }
  /* Few queries on many keys: up to 32 sums of dQ. */
  if (backward && rng_chance(rng, 0.03)) {
    spec.batch = rng_between(rng, 1, 2);
    spec.heads_k = rng_between(rng, 1, 4);
    spec.group = rng_between(rng, 1, 2);
    set_head_dims(&spec, RNG_PICK(rng, 64, 96, 128, 256), rng);
    spec.max_seqlen_q = rng_between(rng, 1, RNG_PICK(rng, 64, 140));
    spec.max_seqlen_k = rng_between(rng, 2000, 6000);
    spec.packed_q = spec.packed_k = false;
    clear_mask(&spec);
    if (rng_chance(rng, 0.2)) spec.flags |= FA3_CAUSAL;
    leave_no_gaps(&spec);
  }
  /* A round of tiles that visit blocks upwards, of half of the chains. */
  if (backward && rng_chance(rng, 0.04)) {
    spec.batch = rng_between(rng, 1, 2);
    spec.group = RNG_PICK(rng, 1, 1, 1, 2, 3, 4);
    spec.heads_k = rng_between(rng, 24, 32) / (spec.batch * spec.group);
    set_head_dims(&spec, RNG_PICK(rng, 64, 96, 128), rng);
    set_causal_square(&spec, rng_between(rng, 900, 1500));
  }
  /* Heads of packed sequences, most of which rise. */
  if (backward && rng_chance(rng, 0.01)) {
    set_head_dims(&spec, RNG_PICK(rng, 64, 96, 128), rng);
    set_causal_square(&spec, rng_between(rng, 900, 1200));
    spec.packed_q = spec.packed_k = true;
    spec.batch = rng_between(rng, 7, 8);
    spec.heads_k = rng_between(rng, 12, 14);
    spec.group = 1;
    leave_no_gaps(&spec);
  }
  /* So many heads that they rise section by section. */
  if (backward && rng_chance(rng, 0.006)) {
    set_head_dims(&spec, RNG_PICK(rng, 64, 96, 128), rng);
    set_causal_square(&spec, rng_between(rng, 660, 900));
    const int64_t tiles = (spec.max_seqlen_k + 127) / 128;
    const int64_t section = (24 << 20) / (8 * spec.head_dim * spec.max_seqlen_q);
    const int64_t downward = 264 / tiles + 1 > section ? 264 / tiles + 1 : section;
    spec.batch = rng_between(rng, 1, 2);
    spec.heads_k = (section + downward + rng_between(rng, 1, 9)) / spec.batch + 1;
    spec.group = 1;
    leave_no_gaps(&spec);
  }
  /* Little more than a round of long tiles: the first of a head go upwards. */
  if (backward && rng_chance(rng, 0.01)) {
    spec.batch = 1;
    spec.heads_k = rng_between(rng, 11, 14);
    spec.group = 1;
    set_head_dims(&spec, RNG_PICK(rng, 96, 120, 128), rng);
    set_causal_square(&spec, rng_between(rng, 1300, 1800));
  }
  /* Queries enough for 80 at a time under a mask: half of the chains rise, or tiles go by head. */
  if (backward && rng_chance(rng, 0.004)) {
    const bool window = rng_chance(rng, 0.5);
    spec.batch = 1;
    set_head_dims(&spec, RNG_PICK(rng, 120, 128), rng);
    spec.softcap = 0;
    spec.packed_q = spec.packed_k = false;
    leave_no_gaps(&spec);
    clear_mask(&spec);
    spec.heads_k = window ? 1 : 2;
    spec.group = window ? 20 : 4;
    spec.max_seqlen_q = rng_between(rng, 4200, 4500);
    spec.max_seqlen_k = window ? rng_between(rng, 300, 1500) : spec.max_seqlen_q;
    spec.flags |= window ? FA3_WINDOW : FA3_CAUSAL;
    if (window) spec.window_left = 2047;
    if (window) spec.window_right = rng_between(rng, 0, 50);
  }
  /* More than 32 of them are not numbered by one look of a warp. */
  if (rng_chance(rng, 0.05)) {
    const int64_t batch = rng_between(rng, 33, 300);
    pack_many(&spec, batch, rng_between(rng, 1, RNG_PICK(rng, 50, 20000 / batch)), rng);
  }
  /* Codes have to lie where the copy engine takes them. */
  spec.codes &= !backward;
  if (spec.codes) {
    spec.head_dim = (spec.head_dim + 15) / 16 * 16;
    spec.value_head_dim = (spec.value_head_dim + 15) / 16 * 16;
    leave_no_gaps(&spec);
  }
  return spec;
}

struct gradient_spec gpu_spec_random(bool backward, struct rng *rng) {
  const struct spec forward = random_forward(backward, rng);
  return backward ? gradient_spec_random(&forward, rng)
                  : (struct gradient_spec){.forward = forward};
}

struct gradient_spec gpu_spec_many(bool backward, int64_t batch, int64_t longest, bool causal,
                                   struct rng *rng) {
  struct spec forward = random_forward(backward, rng);
  pack_many(&forward, batch, longest, rng);
  /* In each split the workspace has room for `longest` queries of each sequence: two, then. */
  if (forward.split_keys && 2 * forward.split_keys < longest)
    forward.split_keys = (longest + 127) / 128 * 64;
  clear_mask(&forward);
  if (causal) forward.flags |= FA3_CAUSAL;
  return backward ? gradient_spec_random(&forward, rng)
                  : (struct gradient_spec){.forward = forward};
}

fa3_status gpu_spec_supported(const struct gradient_spec *spec, bool backward) {
  const struct spec *forward = &spec->forward;
  const fa3_dtype key_dtype = forward->codes ? FA3_FLOAT8_E4M3 : forward->dtype;
  fa3_capability capability = {.struct_size = sizeof capability,
                               .device = {FA3_CUDA, 0},
                               .phase = backward ? FA3_BACKWARD : FA3_FORWARD,
                               .query_dtype = forward->dtype,
                               .key_dtype = key_dtype,
                               .value_dtype = key_dtype,
                               .output_dtype = forward->output_dtype,
                               .head_dim = (int32_t)forward->head_dim,
                               .value_head_dim = (int32_t)forward->value_head_dim};
  const struct {
    bool wanted;
    fa3_features feature;
  } features[] = {
      {forward->packed_q, FA3_FEATURE_VARLEN_QUERY},
      {forward->packed_k, FA3_FEATURE_VARLEN_KEY},
      {forward->group > 1, FA3_FEATURE_GROUPED_HEADS},
      {forward->flags & FA3_CAUSAL, FA3_FEATURE_CAUSAL},
      {forward->flags & FA3_WINDOW, FA3_FEATURE_WINDOW},
      {forward->softcap > 0, FA3_FEATURE_SOFTCAP},
      {forward->sink_dtype, FA3_FEATURE_SINK},
      {forward->lse, FA3_FEATURE_LSE},
      {forward->seqused_q, FA3_FEATURE_SEQUSED_QUERY},
      {forward->seqused_k, FA3_FEATURE_SEQUSED_KEY},
      {forward->leftpad_k, FA3_FEATURE_LEFTPAD_KEY},
      {forward->batch_index, FA3_FEATURE_BATCH_INDEX},
      {forward->page_size, FA3_FEATURE_PAGE_TABLE},
      {forward->diagonal, FA3_FEATURE_DIAGONAL},
      {spec->grad_lse, FA3_FEATURE_GRAD_LSE},
      {spec->flags & FA3_ACCUMULATE, FA3_FEATURE_ACCUMULATE},
      {spec->flags & FA3_DETERMINISTIC, FA3_FEATURE_DETERMINISTIC},
  };
  for (size_t i = 0; i < sizeof features / sizeof *features; i++)
    if (features[i].wanted) capability.features |= features[i].feature;
  return fa3_supports(&capability);
}

/* Bounds of the lengths, which a GPU's caller has to give. Rows that no sequence uses may lie
 * behind sequences that are all empty. */
static void give_bounds(const struct spec *spec, int64_t *max_seqlen_q, int64_t *max_seqlen_k) {
  if (spec->packed_q && *max_seqlen_q == 0) *max_seqlen_q = 1;
  if (spec->packed_k) *max_seqlen_k = spec->max_seqlen_k > 0 ? spec->max_seqlen_k : 1;
}

void gpu_trial_new(struct gpu_trial *trial, const struct gradient_spec *spec, bool backward,
                   struct gpu_arena *arena, gpu_stream stream, struct rng *rng) {
  const bool aligned = spec->forward.codes || rng_chance(rng, 0.6);
  /* Up to more than a GPU has; the workspace that was asked for without them is enough. */
  const int32_t reserved = rng_chance(rng, 0.3) ? (int32_t)rng_between(rng, 1, 140) : 0;
  *trial = (struct gpu_trial){.backward = backward};
  if (backward) {
    fa3_backward_args *args = &trial->gradient.args;
    trial->gradient = gradient_trial_new(spec, rng);
    give_bounds(&spec->forward, &args->max_seqlen_q, &args->max_seqlen_k);
    trial->mirror = mirror_new_backward(&trial->gradient, arena, stream, aligned);
  } else {
    fa3_forward_args *args = &trial->gradient.forward.args;
    trial->gradient.spec = *spec;
    trial->gradient.forward = trial_new(&spec->forward, rng);
    args->device = (fa3_device){FA3_CUDA, 0}; /* the reference's bounds depend on it */
    give_bounds(&spec->forward, &args->max_seqlen_q, &args->max_seqlen_k);
    trial->mirror = mirror_new(&trial->gradient.forward, arena, stream, aligned);
  }
  trial->mirror.forward_args.reserved_multiprocessors = reserved;
  trial->mirror.backward_args.reserved_multiprocessors = reserved;
}

void gpu_trial_free(struct gpu_trial *trial) {
  mirror_free(&trial->mirror);
  gradient_trial_free(&trial->gradient);
}

static void refill(const fa3_tensor *tensor, double spread, struct rng *rng) {
  for (int64_t i = 0; i < tensor_reach(tensor); i++)
    if (fabs(reference_load(tensor, i)) > 0) tensor_store(tensor, i, spread * rng_normal(rng));
}

/* The sequences in the opposite order, where every row belongs to one and no block of rows has a
 * scale: those of blocks that only the new order has are NaN. */
static void reverse_lengths(const fa3_tensor *cu_seqlens, int64_t batch) {
  int32_t *starts = cu_seqlens->data;
  if (!starts) return;
  int32_t total = starts[batch];
  for (int64_t b = 0; 2 * b <= batch; b++) {
    int32_t start = starts[b];
    starts[b] = total - starts[batch - b];
    starts[batch - b] = total - start;
  }
}

/* And the scales of sequences: of one without keys it is NaN. */
static void reverse_scales(const fa3_tensor *scale, int64_t batch) {
  if (scale->rank != 2) return;
  for (int64_t b = 0; 2 * b < batch; b++)
    for (int64_t head = 0; head < scale->shape[1]; head++) {
      const int64_t one = b * scale->strides[0] + head * scale->strides[1];
      const int64_t other = (batch - 1 - b) * scale->strides[0] + head * scale->strides[1];
      const double held = reference_load(scale, one);
      tensor_store(scale, one, reference_load(scale, other));
      tensor_store(scale, other, held);
    }
}

void gpu_trial_refill(struct gpu_trial *trial, struct rng *rng) {
  const struct spec *spec = &trial->gradient.spec.forward;
  struct trial *forward = &trial->gradient.forward;
  for (int i = 0; i < TENSORS; i++) buffer_make_writable(&forward->buffers[i]);
  fa3_forward_args *args = &forward->args;
  if (!spec->seqused_q) reverse_lengths(&args->cu_seqlens_q, spec->batch);
  if (args->cu_seqlens_k.data && !spec->seqused_k && !spec->leftpad_k &&
      args->key_scale_rows == 0 && args->value_scale_rows == 0) {
    reverse_lengths(&args->cu_seqlens_k, spec->batch);
    reverse_scales(&args->key_scale, spec->batch);
    reverse_scales(&args->value_scale, spec->batch);
  }
  refill(&forward->args.query, spec->spread, rng);
  refill(&forward->args.key, spec->spread, rng);
  refill(&forward->args.value, 1, rng);
  if (!trial->backward) return;
  refill(&trial->gradient.args.grad_output, 1, rng);
  trial_run(forward, rng);
}

double gpu_trial_check(const struct gpu_trial *trial, struct rng *rng, double pairs) {
  return trial->backward ? gradient_trial_check(&trial->gradient, rng, pairs)
                         : trial_check(&trial->gradient.forward, rng, pairs);
}
