#include "gradients.h"

#include "error.h"
#include "operand.h"
#include "validate.h"

/* The forward call whose gradients are wanted. */
static fa3_forward_args forward_of(const fa3_backward_args *args) {
  return (fa3_forward_args){.struct_size = sizeof(fa3_forward_args),
                            .device = args->device,
                            .stream = args->stream,
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
                            .num_threads = args->num_threads,
                            .window_left = args->window_left,
                            .window_right = args->window_right,
                            .workspace = args->workspace,
                            .workspace_size = args->workspace_size};
}

/* A tensor of another one's shape, which `lengths` packs. */
static fa3_status read_like(const char *name, const fa3_tensor *tensor, const char *model_name,
                            const fa3_tensor *model, const char *lengths, struct operand *operand) {
  TRY(check_operand(name, tensor, model->rank == 3, lengths));
  for (int d = 0; d < model->rank; d++)
    TRY(check_extent(name, tensor, d, model->shape[d], model_name));
  *operand = make_operand(tensor);
  return FA3_OK;
}

/* The gradient of an input: where it goes. */
static fa3_status read_gradient(const char *name, const fa3_tensor *tensor, const char *model_name,
                                const fa3_tensor *model, const char *lengths,
                                struct operand *operand) {
  TRY(read_like(name, tensor, model_name, model, lengths, operand));
  TRY(check_computed_dtype(name, tensor, model_name, model->dtype));
  return check_output_strides(name, tensor);
}

static fa3_status set_gradients(const fa3_backward_args *args, struct problem *problem) {
  TRY(read_like("grad_output", &args->grad_output, "output's", &args->output, "cu_seqlens_q",
                &problem->grad_output));
  TRY(check_same_dtype("grad_output", &args->grad_output, "output's", args->output.dtype));
  TRY(read_gradient("grad_query", &args->grad_query, "query's", &args->query, "cu_seqlens_q",
                    &problem->grad_query));
  TRY(read_gradient("grad_key", &args->grad_key, "key's", &args->key, "cu_seqlens_k",
                    &problem->grad_key));
  TRY(read_gradient("grad_value", &args->grad_value, "value's", &args->value, "cu_seqlens_k",
                    &problem->grad_value));
  if (!tensor_absent(&args->grad_lse)) {
    TRY(read_row_values("grad_lse", &args->grad_lse, problem, &problem->grad_lse));
    problem->features |= FA3_FEATURE_GRAD_LSE;
  }
  if (!tensor_absent(&args->grad_sink)) {
    if (tensor_absent(&args->sink))
      return set_error(FA3_INVALID_FLAGS, "grad_sink is given without sink");
    TRY(read_head_values("grad_sink", &args->grad_sink, problem, &problem->grad_sink));
    TRY(check_computed_dtype("grad_sink", &args->grad_sink, "sink's", args->sink.dtype));
  }
  return FA3_OK;
}

fa3_status read_gradients(const fa3_backward_args *args, struct problem *problem) {
  const fa3_forward_args forward = forward_of(args);
  TRY(read_attention(&forward, FA3_BACKWARD, problem));
  if (tensor_absent(&args->lse))
    return set_error(FA3_INVALID_POINTER, "lse is absent: expected what the forward pass wrote");
  TRY(set_gradients(args, problem));
  problem->accumulate = args->flags & FA3_ACCUMULATE;
  if (problem->accumulate) problem->features |= FA3_FEATURE_ACCUMULATE;
  if (args->flags & FA3_DETERMINISTIC) problem->features |= FA3_FEATURE_DETERMINISTIC;
  return FA3_OK;
}
