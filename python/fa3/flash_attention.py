"""The official FlashAttention-3's functions on PyTorch tensors, CUDA's or the CPU's.

Signatures, defaults, shapes and returned values are the official ones. Arguments of ours come after
them and are keywords: `s_aux` (a learnable sink per head, as in gpt-oss), `out`,
`return_softmax_lse`. pack_gqa, which tunes the official kernels, changes nothing here, and results
are always deterministic."""

from typing import Any

import torch
from torch import Tensor

from fa3.chunks import attention_in_chunks
from fa3.operators import contiguous, need_tensors
from fa3.options import options_of, sequences
from fa3.scales import place_scales


def refuse(**arguments):
    """Raises for an argument that is given and has no support."""
    for name, given in arguments.items():
        if given is not None:
            raise NotImplementedError(f"{name} is not supported")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    scale_rows: int | tuple[int, int, int] = 0,
) -> Any:
    """Attention of a dense batch.

    q is (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_k, head_dim) and v (batch,
    seqlen_k, heads_k, head_dim_v); heads is a multiple of heads_k. Returns the output, (batch,
    seqlen_q, heads, head_dim_v); with return_attn_probs or return_softmax_lse also the logarithm of
    the softmax's denominator, (batch, heads, seqlen_q) in float32, which has a gradient too.

    The causal mask and the window are aligned to the bottom right: query i sees keys from
    i + seqlen_k - seqlen_q - window_size[0] to i + seqlen_k - seqlen_q + window_size[1], both
    included; -1 is unbounded, and causal means 0 on the right. A query that sees no key gives 0.

    q, k and v may be float8_e4m3fn: the output is then bfloat16, and q_descale, k_descale and v_descale,
    float32 (batch, heads_k), are what each head's codes are multiplied with; or, with scale_rows, what
    those of so many of its rows are, (batch, heads, blocks), as fa3.quantize makes them (three
    numbers if q, k and v differ in it).

    attention_chunk, where it is not 0, counts keys off in chunks of so many, from the first one: a
    query sees those of the chunk that its own position, i + seqlen_k - seqlen_q, is in.

    softcap caps the scaled scores, softcap * tanh(score / softcap). s_aux, (heads), joins the
    softmax's denominator. out is written in place of a new tensor, where no gradient is needed."""
    refuse(qv=qv)
    with_lse = return_attn_probs or return_softmax_lse
    scales = q_descale, k_descale, v_descale
    options = options_of(
        q,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sm_margin,
        num_splits,
        *scales,
        scale_rows=scale_rows,
    )
    output, lse = attention_in_chunks(
        q, k, v, s_aux, options, attention_chunk, output=out, with_lse=with_lse
    )
    return (output, lse) if with_lse else output


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    scale_rows: int | tuple[int, int, int] = 0,
    page_table: Tensor | None = None,
) -> Any:
    """As flash_attn_func, on sequences of different lengths, packed one after the other.

    q is (total_q, heads, head_dim), k and v (total_k, heads_k, ...). cu_seqlens_q and cu_seqlens_k,
    int32 (batch + 1), say where each sequence starts and the last one ends; max_seqlen_q and
    max_seqlen_k, ints or tensors of one, bound the lengths. Where one cu_seqlens is None that side
    is a dense batch. seqused_q and seqused_k, int32 (batch), say how many rows of each sequence
    count: output and gradients of the others are 0. lse is (heads, total_q). With page_table, int32
    (batch, pages of a sequence), k and v are pages of a cache, (pages, page_size, heads_k, ...), row
    r of a sequence in its page r / page_size; that has no gradient. k_descale and v_descale are
    (batch, heads_k) there too, or with scale_rows (pages, heads_k, blocks of a page's rows).

    Rows past the last sequence's end are neither read nor written."""
    refuse(qv=qv)
    with_lse = return_attn_probs or return_softmax_lse
    scales = q_descale, k_descale, v_descale
    options = options_of(
        q,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sm_margin,
        num_splits,
        *scales,
        scale_rows=scale_rows,
    )
    starts = contiguous(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    options |= sequences(max_seqlen_q, max_seqlen_k, **starts)
    if page_table is not None:
        need_tensors(k=k, v=v)
        options |= contiguous(page_table=page_table)
        with torch.no_grad():
            place_scales(options, k, v, starts["seqused_k"])
    output, lse = attention_in_chunks(
        q, k, v, s_aux, options, attention_chunk, output=out, with_lse=with_lse
    )
    return (output, lse) if with_lse else output


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    scale_rows: int | tuple[int, int, int] = 0,
) -> Any:
    """As flash_attn_func, with q, k and v in one tensor: (batch, seqlen, 3, heads, head_dim), or
    (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) with num_heads_q given."""
    need_tensors(qkv=qkv)
    if qkv.dim() == 5:
        if qkv.shape[-3] != 3:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}: expected 3 at its third dimension")
        q, k, v = qkv.unbind(dim=-3)
    else:
        heads_kv = qkv.shape[2] - (num_heads_q or 0) if qkv.dim() == 4 else 0
        if num_heads_q is None or heads_kv <= 0 or heads_kv % 2:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}, and num_heads_q is {num_heads_q}: expected 5 "
                "dimensions, or 4 and num_heads_q + 2 * heads_k heads"
            )
        q, k, v = qkv.split([num_heads_q, heads_kv // 2, heads_kv // 2], dim=-2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
        s_aux=s_aux,
        out=out,
        return_softmax_lse=return_softmax_lse,
        scale_rows=scale_rows,
    )
