"""Attention on NumPy arrays, and on whatever else has DLPack and Python's array API."""

from typing import Any

from fa3 import _core
from fa3.options import lse_shape, options_of, sequences


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    stream: int | None = None,
    num_threads: int = 0,
    return_lse: bool = False,
    **tensors: Any,
) -> Any:
    """softmax(scale * query key^T + mask) value, in a new array of query's kind.

    Shapes are fa3.h's: query (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with
    cu_seqlens_q; key and value likewise. window is (left, right), -1 unbounded. `tensors` say where
    sequences lie, by the names of fa3_forward_args: cu_seqlens_q and cu_seqlens_k, lengths, padding,
    pages of a cache, diagonals. With return_lse also the float32 logarithm of the softmax's
    denominator. Arrays on a GPU whose type has no
    __dlpack_c_exchange_api__ need `stream`, the address of the CUDA stream to run on."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not hasattr(array, "__array_namespace__"):
            raise TypeError(
                f"{name} is of {type(array)}: expected an array with __array_namespace__, as NumPy's "
                "have from 2.0 on; for PyTorch's tensors there is flash_attn_func"
            )
    namespace = query.__array_namespace__()
    device = query.device
    # Rows that no sequence uses are not written, so they are made zero.
    output = namespace.zeros((*query.shape[:-1], *value.shape[-1:]), dtype=query.dtype, device=device)
    lse = None
    if return_lse:
        lse = namespace.zeros(lse_shape(query), dtype=namespace.float32, device=device)
    options = options_of(query, softmax_scale, causal, window, softcap)
    options |= sequences(max_seqlen_q, max_seqlen_k, **tensors)
    _core.forward(
        query=query,
        key=key,
        value=value,
        output=output,
        lse=lse,
        sink=sink,
        stream=stream,
        num_threads=num_threads,
        **options,
    )
    return (output, lse) if return_lse else output
