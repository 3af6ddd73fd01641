#include "attention_options.h"

#include <float.h>
#include <string.h>

#include "numbers.h"
#include "path.h"

enum { KEY_SOURCES = 0x100, KEY_IN = 0x200, KEY_BF16, KEY_LAYOUT };
enum { KEY_CAUSAL = 0x300, KEY_WINDOW, KEY_SCALE, KEY_SOFTCAP };

static const struct argp_option options[] = {
    {.doc = "Tensors:", .group = 1},
    {.name = "in", .key = KEY_IN, .arg = "FILE", .doc = "A .safetensors file with the tensors"},
    {.name = "q",
     .key = KEY_SOURCES + QUERY,
     .arg = "TENSOR",
     .doc = "Query: (batch, seqlen, heads, head_dim), or 3-d without batch"},
    {.name = "k", .key = KEY_SOURCES + KEY, .arg = "TENSOR", .doc = "Key"},
    {.name = "v", .key = KEY_SOURCES + VALUE, .arg = "TENSOR", .doc = "Value"},
    {.name = "layout",
     .key = KEY_LAYOUT,
     .arg = "bshd|bhsd",
     .doc = "Order of the axes in all files; bhsd has heads before seqlen"},
    {.name = "bf16",
     .key = KEY_BF16,
     .doc = "Take untyped 2-byte .npy elements ('<V2'), which is how ml_dtypes saves them, as "
            "bfloat16"},
    {.doc = "Masks and scores:", .group = 2},
    {.name = "causal",
     .key = KEY_CAUSAL,
     .doc = "Query i sees key j if j <= i + seqlen_k - seqlen_q: the last query sees the last key"},
    {.name = "window",
     .key = KEY_WINDOW,
     .arg = "LEFT,RIGHT",
     .doc = "How many keys a query sees on either side of its own, which is counted as for "
            "--causal; -1: all"},
    {.name = "scale",
     .key = KEY_SCALE,
     .arg = "X",
     .doc = "Factor of the scores (default: 1/sqrt(head_dim))"},
    {.name = "softcap",
     .key = KEY_SOFTCAP,
     .arg = "X",
     .doc = "Cap scores smoothly: X * tanh(score / X)"},
    {.name = "sink",
     .key = KEY_SOURCES + SINK,
     .arg = "TENSOR",
     .doc = "A logit per head that joins the softmax's denominator: (heads)"},
    {.doc = "Lengths (LIST: integers such as 0,5,9, or a TENSOR):", .group = 3},
    {.name = "cu-seqlens-q",
     .key = KEY_SOURCES + CU_SEQLENS_Q,
     .arg = "LIST",
     .doc = "Where each sequence of a packed query (total, heads, head_dim) begins, and the total"},
    {.name = "cu-seqlens-k",
     .key = KEY_SOURCES + CU_SEQLENS_K,
     .arg = "LIST",
     .doc = "Where each sequence of a packed key and value begins, and the total"},
    {.name = "seqused-q",
     .key = KEY_SOURCES + SEQUSED_Q,
     .arg = "LIST",
     .doc = "How many rows of each query sequence count; the output is zero in the rest"},
    {.name = "seqused-k",
     .key = KEY_SOURCES + SEQUSED_K,
     .arg = "LIST",
     .doc = "How many rows of each key sequence count"},
    {.name = "leftpad-k",
     .key = KEY_SOURCES + LEFTPAD_K,
     .arg = "LIST",
     .doc = "The first row of each key sequence that counts"},
    {.name = "cache-batch-index",
     .key = KEY_SOURCES + CACHE_BATCH_INDEX,
     .arg = "LIST",
     .doc = "Which batch entry of key and value each sequence reads"},
    {.name = "diagonal",
     .key = KEY_SOURCES + DIAGONAL,
     .arg = "LIST",
     .doc = "Each sequence's causal and window diagonal, in place of seqlen_k - seqlen_q; "
            "with --causal or --window"},
    {0}};

static void parse_window(const char *text, struct attention_options *attention,
                         struct argp_state *state) {
  int64_t sides[2];
  size_t count;
  if (!parse_integers(text, -1, INT64_MAX, sides, 2, &count) || count != 2)
    argp_error(state, "--window %s: expected LEFT,RIGHT of -1 or more", text);
  attention->flags |= FA3_WINDOW;
  attention->window_left = sides[0];
  attention->window_right = sides[1];
}

static void check_sources(const struct attention_options *attention, struct argp_state *state) {
  static const char *const names[] = {"--q", "--k", "--v"};
  const char *container = attention->rules.container;
  if (container && !path_has_suffix(container, ".safetensors"))
    argp_error(state, "--in %s: expected a .safetensors file", container);
  for (int i = QUERY; i <= VALUE; i++) {
    if (!attention->sources[i] && !container)
      argp_error(state, "%s is missing, and there is no --in", names[i]);
  }
  if (attention->sources[DIAGONAL] && !(attention->flags & (FA3_CAUSAL | FA3_WINDOW)))
    argp_error(state, "--diagonal needs --causal or --window");
}

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct attention_options *attention = state->input;
  if (key >= KEY_SOURCES && key < KEY_SOURCES + OPERANDS) {
    attention->sources[key - KEY_SOURCES] = arg;
    return 0;
  }
  switch (key) {
    case KEY_IN:
      attention->rules.container = arg;
      return 0;
    case KEY_BF16:
      attention->rules.untyped_is_bfloat16 = true;
      return 0;
    case KEY_LAYOUT:
      attention->heads_first = strcmp(arg, "bhsd") == 0;
      if (!attention->heads_first && strcmp(arg, "bshd") != 0)
        argp_error(state, "--layout %s: expected bshd or bhsd", arg);
      return 0;
    case KEY_CAUSAL:
      attention->flags |= FA3_CAUSAL;
      return 0;
    case KEY_WINDOW:
      parse_window(arg, attention, state);
      return 0;
    case KEY_SCALE:
      attention->flags |= FA3_SCALE;
      if (!parse_real(arg, -FLT_MAX, &attention->softmax_scale))
        argp_error(state, "--scale %s: expected a finite number", arg);
      return 0;
    case KEY_SOFTCAP:
      if (!parse_real(arg, 0, &attention->softcap))
        argp_error(state, "--softcap %s: expected a finite number of 0 or more", arg);
      return 0;
    case ARGP_KEY_END:
      check_sources(attention, state);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

const struct argp attention_argp = {.options = options, .parser = parse};
