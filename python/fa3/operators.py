"""Attention on PyTorch tensors: the operators fa3::forward and fa3::backward, with autograd.

A call on plain tensors goes straight to the library. The operators serve all else: torch.compile,
torch.export, fake tensors, tensor subclasses, torch.func."""

import torch
from torch import Tensor

from fa3 import _core

if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError(
        f"fa3 needs PyTorch 2.10 or newer, or the package torch-c-dlpack-ext imported before it: "
        f"tensors of PyTorch {torch.__version__} have no __dlpack_c_exchange_api__"
    )


def rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def new_output(query: Tensor, value: Tensor) -> Tensor:
    """Of query's dtype; of FP8 queries bfloat16."""
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dtype is torch.float8_e4m3fn:
        return query.new_empty(shape, dtype=torch.bfloat16)
    return query.new_empty(shape)


def lse_shape(query: Tensor) -> tuple[int, ...]:
    """Of the lse: (batch, heads, seqlen_q), or (heads, total_q) for packed queries."""
    shape = query.shape
    if len(shape) == 4:
        return shape[0], shape[2], shape[1]
    return shape[-2::-1]


def flags_of(causal: bool, window_left: int, window_right: int) -> int:
    flags = _core.SCALE
    if causal:
        flags |= _core.CAUSAL
    if window_left >= 0 or window_right >= 0:
        flags |= _core.WINDOW
    return flags


def call_forward(
    query,
    key,
    value,
    sink,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    leftpad_k,
    cache_batch_index,
    page_table,
    query_scale,
    key_scale,
    value_scale,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    sm_margin,
    num_splits,
    output=None,
    with_lse=True,
):
    """The library's call, on new tensors unless `output` is given. Returns (output, lse)."""
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    if output is None:
        output = new_output(query, value)
        if seqused_q is not None:
            output.zero_()  # rows that no sequence uses are not written
    lse = query.new_empty(lse_shape(query), dtype=torch.float32) if with_lse else None
    flags = flags_of(causal, window_left, window_right)
    windowed = flags & _core.WINDOW
    _core.forward(
        query=query,
        key=key,
        value=value,
        output=output,
        lse=lse,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        cache_batch_index=cache_batch_index,
        page_table=page_table,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=value_scale,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        flags=flags,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=max(window_left, -1) if windowed else 0,
        window_right=max(window_right, -1) if windowed else 0,
        reserved_multiprocessors=sm_margin if query.is_cuda else 0,
        num_splits=num_splits,
    )
    return output, lse


def call_backward(
    grad_output,
    grad_lse,
    query,
    key,
    value,
    output,
    lse,
    sink,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    leftpad_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    sm_margin,
    gradients=(None, None, None),
):
    """The gradients of query, key, value and sink, in `gradients` where those are given."""
    inputs = [rows_contiguous(tensor) for tensor in (query, key, value)]
    # As in call_forward: keys past a used length, or padded away, have gradient 0.
    whole = seqused_q is None and seqused_k is None and leftpad_k is None
    gradients = [
        (tensor.new_empty(tensor.shape) if whole else tensor.new_zeros(tensor.shape))
        if given is None
        else given
        for tensor, given in zip(inputs, gradients)
    ]
    grad_sink = None if sink is None else torch.empty_like(sink)
    flags = flags_of(causal, window_left, window_right) | _core.DETERMINISTIC
    windowed = flags & _core.WINDOW
    _core.backward(
        query=inputs[0],
        key=inputs[1],
        value=inputs[2],
        output=rows_contiguous(output),
        lse=lse,
        grad_output=rows_contiguous(grad_output),
        grad_query=gradients[0],
        grad_key=gradients[1],
        grad_value=gradients[2],
        grad_lse=None if grad_lse is None else rows_contiguous(grad_lse),
        sink=sink,
        grad_sink=grad_sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        flags=flags,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=max(window_left, -1) if windowed else 0,
        window_right=max(window_right, -1) if windowed else 0,
        reserved_multiprocessors=sm_margin if query.is_cuda else 0,
    )
    return *gradients, grad_sink


@torch.library.custom_op("fa3::forward", mutates_args=())
def forward_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    cache_batch_index: Tensor | None,
    page_table: Tensor | None,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
    num_splits: int,
) -> tuple[Tensor, Tensor]:
    return call_forward(
        query,
        key,
        value,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        leftpad_k,
        cache_batch_index,
        page_table,
        query_scale,
        key_scale,
        value_scale,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        sm_margin,
        num_splits,
    )


@forward_operator.register_fake
def fake_forward(query, key, value, *options):
    return (
        new_output(query, value),
        query.new_empty(lse_shape(query), dtype=torch.float32),
    )


@torch.library.custom_op("fa3::backward", mutates_args=())
def backward_operator(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sm_margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *gradients, grad_sink = call_backward(
        grad_output,
        grad_lse,
        query,
        key,
        value,
        output,
        lse,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        leftpad_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        sm_margin,
    )
    # An operator returns tensors alone: an empty one stands for no gradient.
    return *gradients, lse.new_empty(0) if grad_sink is None else grad_sink


@backward_operator.register_fake
def fake_backward(grad_output, grad_lse, query, key, value, output, lse, sink, *options):
    return (
        *(tensor.new_empty(tensor.shape) for tensor in (query, key, value)),
        lse.new_empty(0) if sink is None else sink.new_empty(sink.shape),
    )


TENSORS = 14  # how many of fa3::forward's arguments are tensors


def save_for_backward(ctx, inputs, output):
    tensors, ctx.options = inputs[:TENSORS], inputs[TENSORS:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def backward_of(call, ctx, grad_output, grad_lse):
    """What autograd asks for, with `call` one of the above: a gradient per argument."""
    *inputs, output, lse = ctx.saved_tensors
    query, key, value, sink, *lengths = inputs[:9]
    if query.dtype is torch.float8_e4m3fn or any(tensor is not None for tensor in inputs[9:]):
        raise NotImplementedError("a cache and FP8 have no gradient: they are for inference")
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    *gradients, grad_sink = call(
        grad_output, grad_lse, query, key, value, output, lse, sink, *lengths, *ctx.options[:-1]
    )
    if sink is None:
        grad_sink = None
    return *gradients, grad_sink, *(None,) * (TENSORS - 4 + len(ctx.options))


def operator_backward(ctx, grad_output, grad_lse):
    return backward_of(torch.ops.fa3.backward, ctx, grad_output, grad_lse)


forward_operator.register_autograd(operator_backward, setup_context=save_for_backward)


class Attention(torch.autograd.Function):
    """What fa3::forward does, without the cost of an operator."""

    @staticmethod
    def forward(ctx, *inputs):
        outputs = call_forward(*inputs)
        save_for_backward(ctx, inputs, outputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_lse):
        return backward_of(call_backward, ctx, grad_output, grad_lse)


def is_plain(query, key, value) -> bool:
    return (
        type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def needs_gradient(query, key, value, sink) -> bool:
    return torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sink is not None and sink.requires_grad)
    )


def autocast(query, key, value):
    """Under autocast, float32 tensors in the dtype that it asks for."""
    if query.dtype is torch.float32 or key.dtype is torch.float32 or value.dtype is torch.float32:
        device_type = query.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def attention(query, key, value, sink, *options, output=None, with_lse=True):
    """fa3::forward's arguments -> (output, lse), by the shortest way there is. Without `with_lse`
    lse may be None."""
    query, key, value = autocast(query, key, value)
    if needs_gradient(query, key, value, sink):
        if output is not None:
            raise ValueError("out is given, and a tensor requires its gradient: out has none")
        if is_plain(query, key, value):
            return Attention.apply(query, key, value, sink, *options)
    elif is_plain(query, key, value):
        return call_forward(
            query, key, value, sink, *options, output=output, with_lse=with_lse
        )
    found, lse = torch.ops.fa3.forward(query, key, value, sink, *options)
    return (found if output is None else output.copy_(found)), lse
