"""Attention on JAX arrays, with gradients.

    import fa3.jax"""

import functools
from typing import Any

import jax
import numpy

from fa3 import _core
from fa3.options import lse_shape, options_of, sequences

for phase in ("forward", "backward"):
    for platform in ("cpu", "CUDA"):
        handler = _core.xla_handler(phase, platform == "CUDA")
        jax.ffi.register_ffi_target(f"fa3_{phase}", handler, platform=platform)


# The options that are no integers.
FLOATS = {name for name, kind in _core.arguments("forward") if kind == "FLOAT"}


def attribute(name, number):
    """A number in the type that python/xla.c takes it in."""
    if name not in FLOATS:
        return numpy.int64(number)
    rounded = numpy.float32(number)
    if number and not rounded:  # 0 has a meaning of its own, such as no softcap
        raise OverflowError(f"{name} is {number}: as a float32 it is 0")
    return rounded


def call(phase, inputs, outputs, options, lengths):
    """The library's call. inputs are arrays, or None, and outputs what results are like, by their
    names in fa3.h; the results come in that order."""
    # Rows that no sequence uses are not written: there the results' memory begins as zeros.
    zeros = []
    if any(array is not None for array in lengths.values()):
        zeros = [jax.numpy.zeros(like.shape, like.dtype) for like in outputs.values()]
    inputs = {**inputs, **lengths}
    inputs = {name: array for name, array in inputs.items() if array is not None}
    function = jax.ffi.ffi_call(
        f"fa3_{phase}",
        [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in outputs.values()],
        vmap_method="sequential",
        input_output_aliases={len(inputs) + i: i for i in range(len(zeros))},
    )
    names = {"inputs": " ".join(inputs), "outputs": " ".join(outputs)}
    return function(*inputs.values(), *zeros, **names, **dict(options))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(query, key, value, sink, lengths, options):
    output = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
    lse = jax.ShapeDtypeStruct(lse_shape(query), numpy.float32)
    inputs = {"query": query, "key": key, "value": value, "sink": sink}
    return tuple(call("forward", inputs, {"output": output, "lse": lse}, options, lengths))


def attend_forward(query, key, value, sink, lengths, options):
    output, lse = attend(query, key, value, sink, lengths, options)
    return (output, lse), (query, key, value, sink, lengths, output, lse)


def attend_backward(options, saved, gradients):
    query, key, value, sink, lengths, output, lse = saved
    grad_output, grad_lse = gradients
    inputs = {"query": query, "key": key, "value": value, "output": output, "lse": lse}
    inputs |= {"grad_output": grad_output, "grad_lse": grad_lse, "sink": sink}
    outputs = {"grad_query": query, "grad_key": key, "grad_value": value}
    if sink is not None:
        outputs["grad_sink"] = sink
    found = call("backward", inputs, outputs, options, lengths)
    return *found[:3], found[3] if sink is not None else None, None


attend.defvjp(attend_forward, attend_backward)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: jax.Array | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    return_lse: bool = False,
    **tensors: jax.Array | None,
) -> Any:
    """softmax(scale * query key^T + mask) value, as fa3.attention: under jit, grad and vmap.

    query is (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q, of
    float16 or bfloat16, on the CPU also float32; key and value likewise. The scale, the window, the
    softcap and max_seqlen_q and max_seqlen_k, which bound the lengths of packed sequences and are
    needed on a GPU, are numbers, not arrays. Output, lse and gradients of rows that no sequence
    uses are 0."""
    options = options_of(query, softmax_scale, causal, window, softcap)
    options |= sequences(max_seqlen_q, max_seqlen_k, **tensors)
    lengths = {name: options.pop(name) for name in tensors}
    numbers = tuple((name, attribute(name, number)) for name, number in options.items())
    output, lse = attend(query, key, value, sink, lengths, numbers)
    return (output, lse) if return_lse else output
