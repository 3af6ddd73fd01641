#include "gradients.h"

#include <stdio.h>

#include "dtype.h"
#include "failure.h"

/* The input that a gradient is of. */
static const enum operand operand_of[GRADIENTS] = {QUERY, KEY, VALUE, SINK};

static fa3_tensor *field_of(fa3_backward_args *args, enum gradient gradient) {
  fa3_tensor *const fields[] = {&args->grad_query, &args->grad_key, &args->grad_value,
                                &args->grad_sink};
  return fields[gradient];
}

static void set_view(const struct operands *operands, enum gradient gradient,
                     struct gradients *gradients) {
  const struct loaded_tensor *tensor = &gradients->tensors[gradient];
  const fa3_tensor *key_or_query =
      gradient == GRAD_QUERY ? &operands->args.query : &operands->args.key;
  *field_of(&gradients->args, gradient) =
      gradient == GRAD_SINK ? fa3_vector(tensor->data, tensor->dtype, tensor->shape[0])
                            : operands_view(operands, tensor, key_or_query->rank == 3);
}

static fa3_backward_args backward_of(const fa3_forward_args *args) {
  return (fa3_backward_args){.struct_size = sizeof(fa3_backward_args),
                             .query = args->query,
                             .key = args->key,
                             .value = args->value,
                             .output = args->output,
                             .lse = args->lse,
                             .sink = args->sink,
                             .cu_seqlens_q = args->cu_seqlens_q,
                             .cu_seqlens_k = args->cu_seqlens_k,
                             .seqused_q = args->seqused_q,
                             .seqused_k = args->seqused_k,
                             .leftpad_k = args->leftpad_k,
                             .diagonal = args->diagonal,
                             .max_seqlen_q = args->max_seqlen_q,
                             .max_seqlen_k = args->max_seqlen_k,
                             .flags = args->flags,
                             .softmax_scale = args->softmax_scale,
                             .softcap = args->softcap,
                             .window_left = args->window_left,
                             .window_right = args->window_right};
}

static int read_grad_output(const char *source, const struct source_rules *rules,
                            const struct operands *operands, struct gradients *gradients) {
  static const char *const names[] = {"grad_output", "dout", "do", NULL};
  struct loaded_tensor *tensor = &gradients->grad_output;
  const struct loaded_tensor expected = operands_output_shape(operands);
  TRY(loaded_tensor_read(source, rules, names, floating_point_elements, tensor));
  TRY(loaded_tensor_check_float(tensor));
  if (tensor->dtype != operands->output.dtype)
    return fail(EXIT_INPUT, "%s: its elements are %s: expected %s, as the output's are",
                tensor->origin, dtype_name(tensor->dtype), dtype_name(operands->output.dtype));
  TRY(loaded_tensor_check_shape(tensor, &expected));
  gradients->args.grad_output = operands_view(operands, tensor, operands->args.query.rank == 3);
  return 0;
}

static int read_grad_lse(const char *source, const struct source_rules *rules,
                         const struct operands *operands, struct gradients *gradients) {
  static const char *const names[] = {"grad_lse", "dlse", NULL};
  struct loaded_tensor *tensor = &gradients->grad_lse;
  const struct loaded_tensor expected = operands_lse_shape(operands);
  TRY(loaded_tensor_read(source, rules, names, "float32", tensor));
  if (tensor->dtype != FA3_FLOAT32)
    return fail(EXIT_INPUT, "%s: its elements are not fp32", tensor->origin);
  TRY(loaded_tensor_check_shape(tensor, &expected));
  gradients->args.grad_lse = operands_lse_view(operands, tensor);
  return 0;
}

int gradients_read(const struct gradient_options *chosen, const struct source_rules *rules,
                   const struct operands *operands, struct gradients *gradients) {
  gradients->args = backward_of(&operands->args);
  if (chosen->deterministic) gradients->args.flags |= FA3_DETERMINISTIC;
  TRY(read_grad_output(chosen->grad_output, rules, operands, gradients));
  return chosen->grad_lse ? read_grad_lse(chosen->grad_lse, rules, operands, gradients) : 0;
}

int gradients_make(const struct gradient_options *chosen, const struct operands *operands,
                   struct gradients *gradients) {
  for (int i = 0; i < GRADIENTS; i++) {
    const struct loaded_tensor *model = &operands->loaded[operand_of[i]];
    struct loaded_tensor *tensor = &gradients->tensors[i];
    if (!model->rank) continue;
    *tensor = *model;
    (void)snprintf(tensor->origin, sizeof tensor->origin, "%s", gradient_tensor_names[i][0]);
    if (chosen->dtype) tensor->dtype = chosen->dtype;
    TRY(loaded_tensor_make(tensor, "gradients"));
    set_view(operands, (enum gradient)i, gradients);
  }
  return 0;
}

static int load(const char *source, const struct source_rules *rules,
                const struct operands *operands, enum gradient gradient,
                struct gradients *gradients) {
  const struct loaded_tensor *model = &operands->loaded[operand_of[gradient]];
  struct loaded_tensor *tensor = &gradients->tensors[gradient];
  loaded_tensor_free(tensor);
  TRY(loaded_tensor_read(source, rules, gradient_tensor_names[gradient], floating_point_elements,
                         tensor));
  TRY(loaded_tensor_check_dtype(tensor, model));
  TRY(loaded_tensor_check_shape(tensor, model));
  set_view(operands, gradient, gradients);
  return 0;
}

int gradients_load(const struct gradient_options *chosen, const struct source_rules *rules,
                   const struct operands *operands, struct gradients *gradients) {
  for (int i = 0; i < GRADIENTS; i++) {
    const char *source = gradient_file(chosen, (enum gradient)i);
    if (source && operands->loaded[operand_of[i]].rank)
      TRY(load(source, rules, operands, (enum gradient)i, gradients));
  }
  return 0;
}

/* Both calls on a device. */
struct calls {
  const fa3_forward_args *forward;
  const fa3_backward_args *backward;
};

static fa3_status takes(fa3_device device, const void *context) {
  const struct calls *calls = context;
  fa3_forward_args forward = *calls->forward;
  fa3_backward_args backward = *calls->backward;
  size_t bytes;
  forward.device = backward.device = device;
  fa3_status status = fa3_forward_workspace(&forward, &bytes);
  return status ? status : fa3_backward_workspace(&backward, &bytes);
}

int gradients_choose_device(struct operands *operands, struct gradients *gradients,
                            const struct device_options *chosen) {
  const struct calls calls = {&operands->args, &gradients->args};
  operands->args.num_threads = gradients->args.num_threads = chosen->num_threads;
  TRY(device_choose(chosen, takes, &calls, &operands->args.device));
  gradients->args.device = operands->args.device;
  return 0;
}

void gradients_free(struct gradients *gradients) {
  loaded_tensor_free(&gradients->grad_output);
  loaded_tensor_free(&gradients->grad_lse);
  for (int i = 0; i < GRADIENTS; i++) loaded_tensor_free(&gradients->tensors[i]);
}
