"""The official FlashAttention-3's functions of a cache of keys and values, on PyTorch tensors."""

import numbers
from typing import Any

import torch
from torch import Tensor

from fa3 import _core
from fa3.append import append, append_forward, chosen, rows_to_append
from fa3.chunks import attention_in_chunks, need_chunkable
from fa3.flash_attention import refuse
from fa3.operators import (
    autocast,
    contiguous,
    is_autocast,
    is_plain,
    need_tensors,
    operator,
    rows_contiguous,
    written,
)
from fa3.options import options_of, sequences, window_of
from fa3.scales import place_scales


def need_new_rows(q, k, v, cu_seqlens_new, rotary_seqlens):
    """Raises for what has not the form of new rows."""
    need_tensors(q=q, k=k, v=v)
    if rotary_seqlens is not None:
        need_tensors(rotary_seqlens=rotary_seqlens)
    dims = 4
    if cu_seqlens_new is not None:
        need_tensors(cu_seqlens_k_new=cu_seqlens_new)
        dims = 3
        if cu_seqlens_new.dtype is not torch.int32:
            raise TypeError(f"cu_seqlens_k_new.dtype is {cu_seqlens_new.dtype}: expected torch.int32")
    if k.dim() != dims or v.dim() != dims:
        raise ValueError(
            f"k and v, new rows, have {k.dim()} and {v.dim()} dimensions: expected 4, or 3 with "
            "cu_seqlens_k_new"
        )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    s_aux: Tensor | None = None,
    with_lse: bool = True,
) -> Any:
    """All that a forward call can do, with the names and defaults of the official package's private
    `_flash_attn_forward`. Returns (output, lse, empty, empty), where that has its partial results;
    without `with_lse` the output."""
    refuse(qv=qv)
    window, scales = (window_size_left, window_size_right), (q_descale, k_descale, v_descale)
    options = options_of(q, softmax_scale, causal, window, softcap, sm_margin, num_splits, *scales)
    starts = contiguous(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    options |= sequences(max_seqlen_q, max_seqlen_k, **starts)
    if page_table is not None:
        # A cache in pages has no entries but the table's rows.
        if kv_batch_idx is not None:
            page_table = chosen(page_table, kv_batch_idx, "kv_batch_idx", -1)
        options |= contiguous(page_table=page_table)
    elif kv_batch_idx is not None:
        options |= contiguous(cache_batch_index=kv_batch_idx)
    if leftpad_k is not None:
        options |= contiguous(leftpad_k=leftpad_k)
    if k_new is None and (v_new is not None or rotary_cos is not None):
        raise ValueError("v or rotary_cos is given: k, the new rows, is needed too")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: expected both or neither")
    rotary = contiguous(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    with torch.no_grad():
        lengths = starts["seqused_k"]
        apart = False
        if k_new is not None:
            if v_new is None or lengths is None:
                raise ValueError("k, new rows, is given: v and cache_seqlens are needed too")
            need_new_rows(q, k_new, v_new, cu_seqlens_k_new, seqlens_rotary)
            # The cache is cut into chunks, or copied into another dtype, when it has the new rows.
            copied = k.dtype is torch.float32 and is_autocast(q)
            apart = bool(attention_chunk or copied)
            if not copied:
                q, k_new, v_new = autocast(q, k_new, v_new)
            cu_seqlens_k_new = contiguous(cu_seqlens_k_new=cu_seqlens_k_new)["cu_seqlens_k_new"]
            q, new_rows = rows_to_append(
                q,
                k_new,
                v_new,
                lengths,
                starts["cu_seqlens_q"],
                options.get("max_seqlen_q"),
                cu_seqlens_k_new,
                tuple(rotary.values()),
                seqlens_rotary,
                rotary_interleaved,
                # Without a mask all queries are at the first new row's position.
                bool(options["flags"] & (_core.CAUSAL | _core.WINDOW) or attention_chunk),
            )
            lengths = lengths + (
                k_new.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
            )
            options["seqused_k"] = lengths
        place_scales(options, k, v, lengths)
        if apart:
            # What the second call refuses comes too late for the cache, so what can be said here is.
            need_chunkable(q, k, v, options, attention_chunk, out_, cache=True)
            q = append(new_rows, q, k, v, options)
        elif k_new is not None:
            output, lse = append_forward(
                new_rows, q, k, v, s_aux, options, output=out_, with_lse=with_lse
            )
    if k_new is None or apart:
        output, lse = attention_in_chunks(
            q, k, v, s_aux, options, attention_chunk, output=out_, with_lse=with_lse, cache=True
        )
    return (output, lse, lse.new_empty(0), lse.new_empty(0)) if with_lse else output


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Attention of a few new queries with a cache of keys and values; no gradient.

    q is (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q and
    max_seqlen_q; k_cache and v_cache are (batch_cache, seqlen_cache, heads_k, ...). cache_seqlens,
    an int or int32 (batch), says how many rows of the cache count; cache_batch_idx, int32 (batch),
    which entry of the cache each sequence has; cache_leftpad, int32 (batch), the first row that
    counts. With page_table, int32 (batch, pages of a sequence), the caches are (pages, page_size,
    heads_k, ...), and row r of a sequence is in its page r / page_size.

    With k and v, (batch, seqlen_new, heads_k, ...), or (total_new, heads_k, ...) with
    cu_seqlens_k_new, these rows are first written into the cache behind cache_seqlens' ones. With
    rotary_cos and rotary_sin, (positions, rotary_dim / 2), they are rotated by their positions,
    which begin at rotary_seqlens or else at cache_seqlens; and so are the queries, row by row with a
    causal mask or a window, all at the first position without.

    The caches may be float8_e4m3fn under queries of 16 bits, or of their own dtype. k_descale and
    v_descale, float32, are what their codes are multiplied with: (batch, heads_k), or, one for
    each block of an entry's or a page's rows, (entries or pages, heads_k, blocks). New rows of 16
    bits become codes under these scales; where each row has one, it is computed and written.

    Returns the output; with return_softmax_lse (output, lse, empty, empty), where the official
    function has its partial results."""
    need_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.dim() and v_cache.dim() and (k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1):
        raise ValueError("k_cache and v_cache must be contiguous in their last dimension")
    if isinstance(cache_seqlens, (int, numbers.Integral)):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full(
            (batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    with torch.no_grad():
        return forward(
            q,
            k_cache,
            v_cache,
            k,
            v,
            qv,
            out,
            cu_seqlens_q,
            None,
            cu_seqlens_k_new,
            None,
            cache_seqlens,
            max_seqlen_q,
            None,
            page_table,
            cache_batch_idx,
            cache_leftpad,
            rotary_cos,
            rotary_sin,
            rotary_seqlens,
            q_descale,
            k_descale,
            v_descale,
            softmax_scale,
            causal,
            *window_of(window_size),
            attention_chunk,
            softcap,
            rotary_interleaved,
            scheduler_metadata,
            num_splits,
            pack_gqa,
            sm_margin,
            s_aux=s_aux,
            with_lse=return_softmax_lse,
        )


def combine_results(out_partial, out_dtype):
    """New tensors for the output and the lse of flash_attn_combine."""
    batch, seqlen, heads, head_dim = out_partial.shape[1:]
    out = out_partial.new_empty(
        (batch, seqlen, heads, head_dim), dtype=out_dtype or out_partial.dtype
    )
    return out, out_partial.new_empty((batch, heads, seqlen), dtype=torch.float32).transpose(1, 2)


def combine_kernel(out_partial, lse_partial, out_dtype=None, out=None):
    found, lse = combine_results(out_partial, out_dtype)
    if out is not None:
        need_tensors(out=out)
        found = out
    _core.combine(
        partial_output=rows_contiguous(out_partial).flatten(0, 1),
        partial_lse=lse_partial.transpose(-1, -2).contiguous().flatten(0, 1),
        output=found,
        lse=lse.transpose(1, 2),
    )
    written(out)
    return found, lse


combine_operator = operator(
    "fa3::combine",
    combine_kernel,
    "(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
)


@combine_operator.register_fake
def fake_combine(out_partial, lse_partial, out_dtype=None):
    return combine_results(out_partial, out_dtype)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to several sets of keys -> attention to all of them.

    out_partial is float32, (sets, batch, seqlen, heads, head_dim), lse_partial (sets, batch, seqlen,
    heads). Returns the output, (batch, seqlen, heads, head_dim) in out_dtype (float32), and its lse,
    (batch, seqlen, heads)."""
    need_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() != 5 or lse_partial.dim() != 4:
        raise ValueError(
            f"out_partial and lse_partial have {out_partial.dim()} and {lse_partial.dim()} dimensions: "
            "expected 5 and 4"
        )
    if is_plain(out_partial, lse_partial, lse_partial):
        return combine_kernel(out_partial, lse_partial, out_dtype, out)
    if out is None:
        return torch.ops.fa3.combine(out_partial, lse_partial, out_dtype)
    need_tensors(out=out)
    found, lse = torch.ops.fa3.combine(out_partial, lse_partial, out.dtype)
    if out.shape != found.shape:
        raise ValueError(f"out has the shape {tuple(out.shape)}: expected {tuple(found.shape)}")
    return out.copy_(found), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """What the official function plans ahead for flash_attn_with_kvcache's scheduler_metadata. A
    call plans for itself here, so the plan is an empty tensor."""
    return cache_seqlens.new_empty(0)
