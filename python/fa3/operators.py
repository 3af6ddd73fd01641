"""Attention on PyTorch tensors: the operators fa3::forward, fa3::forward_into and fa3::backward, with
autograd.

A call on plain tensors goes straight to the library. The operators serve all else: torch.compile,
torch.export, fake tensors, tensor subclasses, torch.func. What a call takes beside its main tensors
are its `options`, named as in fa3.h's argument structs; only those that are given are there."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa3 import _core
from fa3.options import SEQUENCES, lse_shape, optional_inputs, schema

if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError(
        f"fa3 needs PyTorch 2.10 or newer, or the package torch-c-dlpack-ext imported before it: "
        f"tensors of PyTorch {torch.__version__} have no __dlpack_c_exchange_api__"
    )

# What has no gradient: tensors that the backward pass does not take.
INFERENCE = optional_inputs("forward") - optional_inputs("backward")
# What may say that some rows do not count.
PARTS = SEQUENCES - {"cu_seqlens_q", "cu_seqlens_k", "diagonal"}


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is contiguous."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor has the layout {tensor.layout}: expected torch.strided")
    if tensor.stride(-1) == 1:
        return tensor
    # Of no elements contiguous() takes any strides for its own.
    return tensor.contiguous() if tensor.numel() else tensor.new_empty(tensor.shape)


def new_output(query: Tensor, value: Tensor) -> Tensor:
    """Of query's dtype; of FP8 queries bfloat16."""
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dtype is torch.float8_e4m3fn:
        return query.new_empty(shape, dtype=torch.bfloat16)
    return query.new_empty(shape)


def new_results(query, key, value, output, with_lse, seqused_q):
    """What a forward call writes: (output, lse), on new tensors unless `output` is given."""
    if query.dim() < 3 or key.dim() < 3 or value.dim() < 3:
        raise ValueError(
            f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions: "
            "expected 3 or 4"
        )
    if output is None:
        output = new_output(query, value)
        if seqused_q is not None:
            output.zero_()  # rows that no sequence uses are not written
    lse = query.new_empty(lse_shape(query), dtype=torch.float32) if with_lse else None
    return output, lse


def clear_unused(output, options):
    """After a call, where a tensor was given for the output: makes its rows 0 that seqused_q leaves
    out. What lies behind the last of cu_seqlens_q stays as it is."""
    seqused_q, cu_seqlens_q = options.get("seqused_q"), options.get("cu_seqlens_q")
    if output is None or seqused_q is None:
        return
    rows = torch.arange(output.shape[-3], dtype=torch.int32, device=output.device)
    if cu_seqlens_q is None:
        unused = rows >= seqused_q[:, None]
    else:
        ends = cu_seqlens_q[:-1] + seqused_q
        ends = torch.nn.functional.pad(ends, (0, 1), value=output.shape[0])
        unused = rows >= ends[torch.searchsorted(cu_seqlens_q[1:], rows, right=True)]
    output.masked_fill_(unused[..., None, None], 0)


def call_forward(query, key, value, sink=None, *, output=None, with_lse=True, **options):
    """The library's call. Returns (output, lse), as above."""
    given = output
    output, lse = new_results(query, key, value, output, with_lse, options.get("seqused_q"))
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    _core.forward(
        query=query, key=key, value=value, output=output, lse=lse, sink=sink, **options
    )
    clear_unused(given, options)
    return output, lse


def written(*tensors):
    """Tells autograd that the library has written to tensors that it was given."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def call_backward(
    query,
    key,
    value,
    output,
    lse,
    grad_output,
    grad_lse=None,
    sink=None,
    *,
    flags=0,
    gradients=(None, None, None),
    **options,
):
    """The gradients of query, key, value and sink, in `gradients` where those are given."""
    if query.stride(-1) != 1 or key.stride(-1) != 1 or value.stride(-1) != 1:
        query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    # As in call_forward: keys past a used length, or padded away, have gradient 0.
    part = any(name in PARTS and options[name] is not None for name in options)
    make = torch.zeros_like if part else torch.empty_like
    grad_query, grad_key, grad_value = gradients
    if grad_query is None:
        grad_query = make(query)
    if grad_key is None:
        grad_key = make(key)
    if grad_value is None:
        grad_value = make(value)
    grad_sink = None if sink is None else torch.empty_like(sink)
    _core.backward(
        query=query,
        key=key,
        value=value,
        output=rows_contiguous(output),
        lse=lse,
        grad_output=rows_contiguous(grad_output).resolve_neg(),
        grad_query=grad_query,
        grad_key=grad_key,
        grad_value=grad_value,
        grad_lse=None if grad_lse is None else rows_contiguous(grad_lse),
        sink=sink,
        grad_sink=grad_sink,
        flags=flags | _core.DETERMINISTIC,
        **options,
    )
    return grad_query, grad_key, grad_value, grad_sink


def names_of(operator) -> list[str]:
    """Of an operator's arguments."""
    return [argument.name for argument in operator._opoverload._schema.arguments]


def forward_kernel(*arguments):
    return call_forward(**dict(zip(forward_names, arguments)))


def forward_into_kernel(*arguments):
    return call_forward(**dict(zip(forward_into_names, arguments)))[1]


def backward_kernel(*arguments):
    *gradients, grad_sink = call_backward(**dict(zip(backward_names, arguments)))
    # An operator returns tensors alone: an empty one stands for no gradient.
    return *gradients, gradients[0].new_empty(0) if grad_sink is None else grad_sink


def operator(name, function, schema, mutates=()):
    return torch.library.custom_op(name, function, mutates_args=mutates, schema=schema)


forward_operator = operator("fa3::forward", forward_kernel, schema(_core.arguments("forward"), 2))
# The same with `out`, which has no gradient.
forward_into_operator = operator(
    "fa3::forward_into",
    forward_into_kernel,
    schema(_core.arguments("forward"), 1, ("output",)),
    ("output",),
)
backward_operator = operator("fa3::backward", backward_kernel, schema(_core.arguments("backward"), 4))
forward_names = names_of(forward_operator)
forward_into_names = names_of(forward_into_operator)
backward_names = names_of(backward_operator)


@forward_operator.register_fake
def fake_forward(query, key, value, *options):
    return (
        new_output(query, value),
        query.new_empty(lse_shape(query), dtype=torch.float32),
    )


@forward_into_operator.register_fake
def fake_forward_into(query, *arguments):
    return query.new_empty(lse_shape(query), dtype=torch.float32)


@forward_into_operator.register_vmap
def forward_into_each(info, in_dims, *arguments):
    """One call after the other, as PyTorch does by itself where nothing is written to."""
    if in_dims[forward_into_names.index("output")] is None:
        raise ValueError("out is one tensor for all of vmap's calls: expected one for each")
    calls = [
        [a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims)]
        for i in range(info.batch_size)
    ]
    return torch.stack([torch.ops.fa3.forward_into(*call) for call in calls]), 0


@backward_operator.register_fake
def fake_backward(
    query, key, value, output, lse, grad_output, grad_lse=None, sink=None, *options
):
    return (
        *(torch.empty_like(rows_contiguous(tensor)) for tensor in (query, key, value)),
        lse.new_empty(0) if sink is None else sink.new_empty(sink.shape),
    )


def save_for_backward(ctx, query, key, value, sink, options, outputs):
    ctx.save_for_backward(query, key, value, *outputs, sink)
    ctx.options = options
    ctx.set_materialize_grads(False)


def backward_of(call, ctx, grad_output, grad_lse):
    """What autograd asks for, with `call` one of the above: gradients of the four tensors."""
    query, key, value, output, lse, sink = ctx.saved_tensors
    options = ctx.options
    if query.dtype is torch.float8_e4m3fn or not INFERENCE.isdisjoint(options):
        raise NotImplementedError("a cache and FP8 have no gradient: they are for inference")
    options = {name: value for name, value in options.items() if name in backward_names}
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    *gradients, grad_sink = call(
        query, key, value, output, lse, grad_output, grad_lse, sink, **options
    )
    return *gradients, None if sink is None else grad_sink


def operator_setup(ctx, inputs, output):
    options = zip(forward_names[4:], inputs[4:])
    given = {name: value for name, value in options if value is not None}
    save_for_backward(ctx, *inputs[:4], given, output)


def operator_backward(ctx, grad_output, grad_lse):
    gradients = backward_of(torch.ops.fa3.backward, ctx, grad_output, grad_lse)
    return *gradients, *(None,) * (len(forward_names) - 4)


forward_operator.register_autograd(operator_backward, setup_context=operator_setup)


def is_batched(gradient) -> bool:
    """Whether it is many gradients that autograd asks for at once (is_grads_batched)."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)


class Backward(torch.autograd.Function):
    """fa3::backward as a step that has no derivative of its own, and says so when one is asked for;
    in the form that torch.func's transforms ask for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(options, *tensors):
        return torch.ops.fa3.backward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("attention has no second derivative")


def differentiable_backward(*tensors, **options):
    return Backward.apply(options, *tensors)


class Attention(torch.autograd.Function):
    """What fa3::forward does, without the cost of an operator."""

    @staticmethod
    def forward(ctx, query, key, value, sink, options):
        outputs = call_forward(query, key, value, sink, **options)
        save_for_backward(ctx, query, key, value, sink, options, outputs)
        return outputs

    @staticmethod
    def backward(ctx, grad_output, grad_lse):
        call = call_backward
        if torch.is_grad_enabled():  # with create_graph
            call = differentiable_backward
        elif is_batched(grad_output) or is_batched(grad_lse):
            call = torch.ops.fa3.backward
        return *backward_of(call, ctx, grad_output, grad_lse), None


class TransformedAttention(torch.autograd.Function):
    """fa3::forward in that form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, sink, options):
        return torch.ops.fa3.forward(query, key, value, sink, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        save_for_backward(ctx, *inputs, output)

    @staticmethod
    def backward(ctx, grad_output, grad_lse):
        return *backward_of(differentiable_backward, ctx, grad_output, grad_lse), None


def is_transformed() -> bool:
    """Whether a transform of torch.func that takes derivatives or many calls at once is at work."""
    return (
        torch._C._are_functorch_transforms_active()
        and torch._C._functorch.peek_interpreter_stack().key()
        != torch._C._functorch.TransformType.Functionalize
    )


def need_tensors(**arguments):
    """Raises for what is no tensor."""
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is of {type(tensor)}: expected a tensor")
        if tensor.is_nested:
            raise NotImplementedError(
                f"{name} is a nested tensor: its values() and offsets() are what "
                "flash_attn_varlen_func takes"
            )


def contiguous(**tensors) -> dict:
    """These tensors, or None, with their last dimensions contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and (type(tensor) is not Tensor or not tensor.is_contiguous()):
            need_tensors(**{name: tensor})
            if tensor.dim() and tensor.stride(-1) != 1:
                tensors[name] = tensor.contiguous()
    return tensors


def is_watched() -> bool:
    """Whether a compiler, mode, transform or tracer of PyTorch's has to see what is done."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
    )


def is_plain(query, key, value) -> bool:
    """Whether the library can read these as they are. A negative view's memory has the other sign."""
    return (
        type(query) is type(key) is type(value) is Tensor
        and not is_watched()
        and not (query.is_neg() or key.is_neg() or value.is_neg() or query.is_meta)
    )


def needs_gradient(query, key, value, sink) -> bool:
    """Or a derivative in forward mode, which autograd.Function refuses."""
    return (
        torch.is_grad_enabled()
        and (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (sink is not None and sink.requires_grad)
        )
        or forward_ad._current_level >= 0
    )


def is_autocast(tensor) -> bool:
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def autocast(query, key, value):
    """Under autocast, where one is of float32, all but codes in the dtype that it asks for."""
    if query.dtype is torch.float32 or key.dtype is torch.float32 or value.dtype is torch.float32:
        if is_autocast(query):
            dtype = torch.get_autocast_dtype(query.device.type)
            return [
                t if t.dtype is torch.float8_e4m3fn else t.to(dtype) for t in (query, key, value)
            ]
    return query, key, value


def attention(query, key, value, sink, options, *, output=None, with_lse=True):
    """fa3::forward's arguments -> (output, lse), by the shortest way there is. Without `with_lse`
    lse may be None."""
    plain = is_plain(query, key, value)
    if not plain:
        need_tensors(q=query, k=key, v=value)
    if sink is not None:
        sink = contiguous(s_aux=sink)["s_aux"]
    if output is not None:
        need_tensors(out=output)
    query, key, value = autocast(query, key, value)
    if needs_gradient(query, key, value, sink):
        if output is not None:
            raise ValueError("out is given, and a tensor requires its gradient: out has none")
        if plain:
            return Attention.apply(query, key, value, sink, options)
    elif output is not None and output.requires_grad and torch.is_grad_enabled():
        raise ValueError("out requires its gradient, and has none")
    elif plain:
        found = call_forward(query, key, value, sink, output=output, with_lse=with_lse, **options)
        if output is not None:
            written(output)
        return found
    if output is not None:
        lse = torch.ops.fa3.forward_into(query, key, value, output, sink=sink, **options)
        return output, lse
    if not torch.compiler.is_compiling() and is_transformed():
        return TransformedAttention.apply(query, key, value, sink, options)
    return torch.ops.fa3.forward(query, key, value, sink, **options)


def gradients_of(grad_output, query, key, value, output, lse, options, gradients):
    """Writes the gradients of query, key and value into `gradients`."""
    if is_plain(query, key, value):
        call_backward(
            query, key, value, output, lse, grad_output, gradients=gradients, **options
        )
        written(*gradients)
        return
    found = torch.ops.fa3.backward(query, key, value, output, lse, grad_output, **options)
    for given, gradient in zip(gradients, found):
        if given is not None:
            given.copy_(gradient)
