#include "failure.h"
#include "operands.h"

int operands_read_gradients(const struct attention_options *options, struct operands *operands) {
  static const enum tensor starts[] = {TENSOR_grad_output, TENSOR_grad_lse};
  for (int i = 0; i < GRADIENTS; i++) {
    const struct loaded_tensor *input = &operands->loaded[tensor_rows[input_gradients[i]].model];
    if (input->given && input->dtype == FA3_FLOAT8_E4M3)
      return fail(EXIT_UNSUPPORTED, "%s: FP8 has no gradients", input->origin);
  }
  for (int i = 0; i < 2; i++) {
    const char *source = options->sources[starts[i]];
    if (!source && starts[i] == TENSOR_grad_lse) continue;
    TRY(operands_load(options, starts[i], source, operands));
  }
  return 0;
}

int operands_make_gradients(const struct attention_options *options, struct operands *operands) {
  for (int i = 0; i < GRADIENTS; i++)
    if (operands->loaded[tensor_rows[input_gradients[i]].model].given)
      TRY(operands_make(operands, input_gradients[i], options->gradient_dtype));
  return operands_check(operands, &operands->backward);
}

int operands_load_gradients(const struct attention_options *options, struct operands *operands) {
  for (int i = 0; i < GRADIENTS; i++) {
    const char *source = file_of(options, input_gradients[i]);
    if (!source || !operands->loaded[tensor_rows[input_gradients[i]].model].given) continue;
    TRY(operands_load(options, input_gradients[i], source, operands));
  }
  return operands_check(operands, &operands->backward);
}
