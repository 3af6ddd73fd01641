/* What to compute, as options say it: the tensors and the masks, the same for every command. */
#ifndef FA3_CLI_ATTENTION_OPTIONS_H
#define FA3_CLI_ATTENTION_OPTIONS_H

#include <argp.h>

#include "fa3.h"
#include "loaded_tensor.h"

/* The tensors that a call reads. */
enum operand {
  QUERY,
  KEY,
  VALUE,
  SINK,
  CU_SEQLENS_Q,
  CU_SEQLENS_K,
  SEQUSED_Q,
  SEQUSED_K,
  LEFTPAD_K,
  CACHE_BATCH_INDEX,
  DIAGONAL,
  OPERANDS
};

struct attention_options {
  const char *sources[OPERANDS]; /* null: not given */
  struct source_rules rules;
  bool heads_first; /* bhsd instead of bshd */
  uint32_t flags;
  int64_t window_left;
  int64_t window_right;
  float softmax_scale;
  float softcap;
};

/* A child of each command's argp; its input is a struct attention_options. */
extern const struct argp attention_argp;

#endif
