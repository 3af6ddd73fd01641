"""Attention on NumPy arrays, and on whatever else has DLPack and Python's array API."""

from fa3 import _core


def attention(
    query,
    key,
    value,
    *,
    causal=False,
    window=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    sink=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
    stream=None,
    num_threads=0,
    return_lse=False,
):
    """softmax(scale * query key^T + mask) value, in a new array of query's kind.

    Shapes are fa3.h's: query (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with
    cu_seqlens_q; key and value likewise. window is (left, right), -1 unbounded. With return_lse
    also the float32 logarithm of the softmax's denominator. Arrays on a GPU whose type has no
    __dlpack_c_exchange_api__ need `stream`, the address of the CUDA stream to run on."""
    namespace = query.__array_namespace__()
    device = query.device
    shape = query.shape
    # Rows that no sequence uses are not written, so they are made zero.
    output = namespace.zeros((*shape[:-1], value.shape[-1]), dtype=query.dtype, device=device)
    lse = None
    if return_lse:
        lse_shape = shape[-2::-1] if len(shape) == 3 else (shape[0], *shape[-2:0:-1])
        lse = namespace.zeros(lse_shape, dtype=namespace.float32, device=device)
    left, right = window
    windowed = left >= 0 or right >= 0
    flags = _core.CAUSAL if causal else 0
    if windowed:
        flags |= _core.WINDOW
    if softmax_scale is not None:
        flags |= _core.SCALE
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
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        flags=flags,
        softmax_scale=softmax_scale,
        softcap=softcap,
        num_threads=num_threads,
        window_left=left if windowed else 0,
        window_right=right if windowed else 0,
        stream=stream,
    )
    return (output, lse) if return_lse else output
