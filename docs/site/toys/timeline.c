/* A model of the forward kernel's main loop ([FA3] sections 3.1 and 3.2): a producer that fills
 * rings of buffers, two consumer warpgroups, one matrix unit. Whoever has products under way shares
 * the unit evenly, as the hardware interleaves them; a warpgroup's own products run in their order.
 * How long each thing takes is the caller's to say. */
#include <float.h>
#include <stdbool.h>

#include "toys.h"

enum { WARPGROUPS = 2 };

enum phase { STARTING, READY, ISSUING, WAITING, SOFTMAX, FINISHING, FINISHED };

struct product {
  int kind, tile;
  double begin, left; /* clocks of the unit that it still needs */
};

struct consumer {
  enum phase phase;
  int round;               /* scores of this tile, output of the one before */
  double begin, until;     /* of a phase that takes a time of its own */
  struct product queue[2]; /* under way, the first one running */
  int queued;
  int scores_done, outputs_done;
};

struct simulation {
  const struct timeline *t;
  struct consumer consumers[WARPGROUPS];
  int turn;
  int loads; /* done, in their order: keys 0, keys 1, values 0, keys 2, values 1, ... */
  bool loading;
  double load_begin;
  double now;
  struct span *spans;
  int count, most;
};

static void note(struct simulation *s, int lane, int kind, int tile, int warpgroup, double begin) {
  if (s->count == s->most || begin == s->now) return;
  s->spans[s->count++] = (struct span){lane, kind, tile, warpgroup, begin, s->now};
}

/* The place of a tile's load in their order. */
static int keys_load(int tile) {
  return tile == 0 ? 0 : 2 * tile - 1;
}

static int values_load(const struct simulation *s, int tile) {
  return tile == s->t->tiles - 1 ? 2 * tile + 1 : 2 * tile + 2;
}

static bool load_is_keys(const struct simulation *s, int load) {
  return load == 0 || (load % 2 == 1 && load < 2 * s->t->tiles - 1);
}

static int load_tile(const struct simulation *s, int load) {
  if (load_is_keys(s, load)) return (load + 1) / 2;
  return load % 2 == 1 ? load / 2 : load / 2 - 1;
}

/* A buffer is free again when both warpgroups are done with the tile that was in it. */
static bool load_has_buffer(const struct simulation *s, int load) {
  const bool keys = load_is_keys(s, load);
  const int before = load_tile(s, load) - s->t->stages;
  for (int w = 0; w < WARPGROUPS; w++) {
    const struct consumer *c = &s->consumers[w];
    if ((keys ? c->scores_done : c->outputs_done) <= before) return false;
  }
  return true;
}

static void start_product(struct simulation *s, struct consumer *c, int kind, int tile) {
  c->queue[c->queued++] =
      (struct product){.kind = kind, .tile = tile, .begin = s->now, .left = s->t->product};
}

/* This tile's scores and the output of the one before, the scores first where the softmax can begin
 * while the output is computed. */
static void issue(struct simulation *s, struct consumer *c) {
  const bool scores = c->round<s->t->tiles, output = c->round> 0;
  if (scores && s->t->overlap) start_product(s, c, SPAN_SCORES, c->round);
  if (output) start_product(s, c, SPAN_OUTPUT, c->round - 1);
  if (scores && !s->t->overlap) start_product(s, c, SPAN_SCORES, c->round);
}

static bool has_data(const struct simulation *s, const struct consumer *c) {
  if (c->round < s->t->tiles && s->loads <= keys_load(c->round)) return false;
  return c->round == 0 || s->loads > values_load(s, c->round - 1);
}

/* What a warpgroup waits for after it has issued. */
static bool has_products(const struct simulation *s, const struct consumer *c) {
  if (s->t->overlap && c->round < s->t->tiles) return c->scores_done > c->round;
  return c->queued == 0;
}

static void enter(struct simulation *s, struct consumer *c, enum phase phase, double clocks) {
  c->phase = phase;
  c->begin = s->now;
  c->until = s->now + clocks;
}

/* Takes a warpgroup to its next phase if it can go there now. */
static bool step_consumer(struct simulation *s, int w) {
  struct consumer *c = &s->consumers[w];
  const int lane = LANE_FIRST + w;
  switch (c->phase) {
    case STARTING:
      if (c->until > s->now) return false;
      c->phase = READY;
      return true;
    case READY:
      if ((s->t->turns && s->turn != w) || !has_data(s, c)) return false;
      enter(s, c, ISSUING, s->t->issue);
      return true;
    case ISSUING:
      if (c->until > s->now) return false;
      note(s, lane, SPAN_ISSUE, c->round, w, c->begin);
      issue(s, c);
      c->phase = WAITING;
      return true;
    case WAITING:
      if (!has_products(s, c)) return false;
      s->turn = 1 - w;
      if (c->round == s->t->tiles)
        c->phase = FINISHED;
      else
        enter(s, c, SOFTMAX, s->t->softmax);
      return true;
    case SOFTMAX:
      if (c->until > s->now) return false;
      note(s, lane, SPAN_SOFTMAX, c->round, w, c->begin);
      c->phase = FINISHING;
      return true;
    case FINISHING: /* the output of the tile before has to be there */
      if (c->queued > 0) return false;
      c->round++;
      c->phase = READY;
      return true;
    case FINISHED:
      return false;
  }
  return false;
}

static bool step_producer(struct simulation *s) {
  if (s->loading && s->load_begin + s->t->load <= s->now) {
    const bool keys = load_is_keys(s, s->loads);
    note(s, LANE_LOADS, keys ? SPAN_LOAD_KEYS : SPAN_LOAD_VALUES, load_tile(s, s->loads), 0,
         s->load_begin);
    s->loading = false;
    s->loads++;
    return true;
  }
  if (s->loading || s->loads == 2 * s->t->tiles || !load_has_buffer(s, s->loads)) return false;
  s->loading = true;
  s->load_begin = s->now;
  return true;
}

static int running_products(const struct simulation *s) {
  int running = 0;
  for (int w = 0; w < WARPGROUPS; w++) running += s->consumers[w].queued > 0;
  return running;
}

static double next_event(const struct simulation *s) {
  double next = DBL_MAX;
  for (int w = 0; w < WARPGROUPS; w++) {
    const struct consumer *c = &s->consumers[w];
    const bool timed = c->phase == STARTING || c->phase == ISSUING || c->phase == SOFTMAX;
    if (timed && c->until < next) next = c->until;
    if (c->queued > 0 && s->now + c->queue[0].left * running_products(s) < next)
      next = s->now + c->queue[0].left * running_products(s);
  }
  if (s->loading && s->load_begin + s->t->load < next) next = s->load_begin + s->t->load;
  return next;
}

/* Lets the matrix unit work until then. */
static void advance(struct simulation *s, double then) {
  const double rounding = 1e-6; /* clocks */
  const double share = (then - s->now) / (running_products(s) ? running_products(s) : 1);
  s->now = then;
  for (int w = 0; w < WARPGROUPS; w++) {
    struct consumer *c = &s->consumers[w];
    if (c->queued == 0) continue;
    c->queue[0].left -= share;
    if (c->queue[0].left > rounding) continue;
    const struct product done = c->queue[0];
    note(s, LANE_UNIT, done.kind, done.tile, w, done.begin);
    if (done.kind == SPAN_SCORES)
      c->scores_done++;
    else
      c->outputs_done++;
    c->queue[0] = c->queue[1];
    c->queue[0].begin = then;
    c->queued--;
  }
}

int toy_timeline(const struct timeline *timeline, struct span *spans, int most) {
  struct simulation s = {.t = timeline, .spans = spans, .most = most};
  s.consumers[1].until = timeline->load + timeline->second_starts;
  for (;;) {
    bool stepped = true;
    while (stepped) {
      stepped = step_producer(&s);
      for (int w = 0; w < WARPGROUPS; w++) stepped |= step_consumer(&s, w);
    }
    const double then = next_event(&s);
    if (then == DBL_MAX) return s.count;
    advance(&s, then);
  }
}
