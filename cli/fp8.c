#include "fp8.h"

#include <string.h>

#include "attention.h"
#include "failure.h"

enum { KEY_FP8 = 0x600, ROWS_OF_SCALE = 128 };

static const struct argp_option options[] = {
    {.name = "fp8",
     .key = KEY_FP8,
     .arg = "rotate",
     .flags = OPTION_ARG_OPTIONAL,
     .doc = "Make E4M3 codes of query, key and value first, as fa3 quantize does, with a scale for "
            "128 rows of a head; rotate: rotate query and key before that. fa3 verify says then "
            "how far the output is from that of the tensors before, too",
     .group = 3},
    {0}};

static error_t parse(int key, char *arg, struct argp_state *state) {
  struct fp8_options *fp8 = state->input;
  if (key != KEY_FP8) return ARGP_ERR_UNKNOWN;
  if (arg && strcmp(arg, "rotate") != 0)
    argp_error(state, "--fp8=%s: expected --fp8 or --fp8=rotate", arg);
  *fp8 = (struct fp8_options){true, {.rows = ROWS_OF_SCALE, .rotate = arg}};
  return 0;
}

const struct argp fp8_argp = {.options = options, .parser = parse};

/* Rows that are not used make no scale larger; where keys are looked up, nothing says which are. */
static fa3_tensor used_rows(const fa3_forward_args *args, bool query) {
  const bool looked_up = args->page_table.rank || args->cache_batch_index.rank;
  if (query) return args->seqused_q;
  return looked_up ? (fa3_tensor){0} : args->seqused_k;
}

static int prepare_tensor(const struct coding *coding, enum tensor tensor, enum tensor scale,
                          int64_t *scale_rows, struct operands *operands) {
  struct loaded_tensor *loaded = &operands->loaded[tensor];
  const fa3_forward_args *args = &operands->forward.args.forward;
  const bool query = tensor == TENSOR_query, value = tensor == TENSOR_value;
  const fa3_tensor *starts = query ? &args->cu_seqlens_q : &args->cu_seqlens_k;
  const struct coding its = {.rows = coding->rows, .rotate = coding->rotate && !value};
  struct coded coded = {0};
  if (loaded->dtype == FA3_FLOAT8_E4M3)
    return fail(EXIT_INPUT, "%s: --fp8 makes codes of what is none: it is e4m3 already",
                loaded->origin);
  const int code = coded_make(loaded, argument_in(args, find_argument(FA3_FORWARD, tensor)), starts,
                              &its, &coded);
  if (code) {
    loaded_tensor_free(&coded.codes);
    loaded_tensor_free(&coded.scale);
    return code;
  }
  coded.call.args.quantize.seqused_q = used_rows(args, query);
  memcpy(coded.codes.origin, loaded->origin, sizeof loaded->origin);
  memcpy(coded.scale.origin, loaded->origin, sizeof loaded->origin);
  operands->quantize[operands->quantize_count] = coded.call;
  operands->originals[operands->quantize_count++] = *loaded;
  *loaded = coded.codes;
  operands->loaded[scale] = coded.scale;
  *scale_rows = coded.call.args.quantize.codes_scale_rows;
  TRY(operands_set_view(operands, tensor));
  return operands_set_view(operands, scale);
}

int fp8_prepare(const struct coding *coding, struct operands *operands) {
  fa3_forward_args *args = &operands->forward.args.forward;
  TRY(prepare_tensor(coding, TENSOR_query, TENSOR_query_scale, &args->query_scale_rows, operands));
  TRY(prepare_tensor(coding, TENSOR_key, TENSOR_key_scale, &args->key_scale_rows, operands));
  TRY(prepare_tensor(coding, TENSOR_value, TENSOR_value_scale, &args->value_scale_rows, operands));
  return operands_check(operands, &operands->forward);
}

int fp8_quantize(const struct operands *operands) {
  for (int i = 0; i < operands->quantize_count; i++) TRY(attention_run(&operands->quantize[i]));
  return 0;
}
