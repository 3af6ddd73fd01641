"""The official FlashAttention-3's functions of a cache of keys and values, on PyTorch tensors."""

import torch
from torch import Tensor

from fa3 import _core
from fa3.flash_attention import bound, refuse, scale_of
from fa3.operators import attention


@torch.library.custom_op("fa3::append", mutates_args=("key", "value"))
def append_operator(
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    query: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    positions: Tensor | None,
    cu_seqlens_new: Tensor | None,
    seqused_k: Tensor,
    cache_batch_index: Tensor | None,
    page_table: Tensor | None,
    max_seqlen_new: int,
    interleaved: bool,
) -> Tensor:
    """Writes new rows into the cache, behind those that it has. Returns the queries, rotated as the
    keys are; an empty tensor where there are none."""
    rotated_query = None if query is None else torch.empty_like(query)
    _core.append(
        new_key=new_key,
        new_value=new_value,
        key=key,
        value=value,
        query=query,
        rotated_query=rotated_query,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        positions=positions,
        cu_seqlens_q=cu_seqlens_new,
        seqused_k=seqused_k,
        cache_batch_index=cache_batch_index,
        page_table=page_table,
        max_seqlen_q=max_seqlen_new,
        flags=_core.ROTARY_INTERLEAVED if interleaved and rotary_cos is not None else 0,
    )
    return new_key.new_empty(0) if rotated_query is None else rotated_query


@append_operator.register_fake
def fake_append(new_key, new_value, key, value, query, *options):
    return new_key.new_empty(0) if query is None else torch.empty_like(query)


def rotate(tensor, cos, sin, positions, interleaved):
    """Rotary embedding of (..., heads, head_dim) rows at `positions` (...), in float32."""
    cos, sin = (table[positions.long()][..., None, :].float() for table in (cos, sin))
    width = 2 * cos.shape[-1]
    turned, rest = tensor[..., :width].float(), tensor[..., width:]
    if interleaved:
        x, y = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2)
    else:
        x, y = turned.chunk(2, -1)
        turned = torch.cat((x * cos - y * sin, x * sin + y * cos), -1)
    return torch.cat((turned.to(tensor.dtype), rest), -1)


def positions_of(rows, first, cu_seqlens, advance):
    """The positions of tensors' rows: (batch, seqlen), or (total) with cu_seqlens; from first[b],
    or all there if they don't advance."""
    if cu_seqlens is None:
        steps = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        return first[:, None] + (steps if advance else torch.zeros_like(steps))
    total = rows.shape[0]
    lengths = cu_seqlens.diff()
    at = (first - cu_seqlens[:-1] if advance else first).repeat_interleave(
        lengths, output_size=total
    )
    steps = torch.arange(total, dtype=torch.int32, device=rows.device)
    return (at + steps if advance else at).to(torch.int32)


def append(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    cache_batch_idx,
    page_table,
    cu_seqlens_q,
    cu_seqlens_k_new,
    rotary_seqlens,
    advance,
    rotary_interleaved,
):
    """Appends k and v. Returns q, rotated where that is asked for, and the lengths from then on."""
    if v is None or cache_seqlens is None:
        raise ValueError("k is given: v and cache_seqlens are needed too")
    rotary = rotary_cos is not None
    # The queries are rotated by the same call where they are the new rows' own.
    same_rows = advance and (
        q.shape[:2] == k.shape[:2] and cu_seqlens_q is None and cu_seqlens_k_new is None
    )
    first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
    positions = None
    if rotary and rotary_seqlens is not None:
        positions = positions_of(k, first, cu_seqlens_k_new, True)
    rotated = torch.ops.fa3.append(
        k,
        v,
        k_cache,
        v_cache,
        q if rotary and same_rows else None,
        rotary_cos,
        rotary_sin,
        positions,
        cu_seqlens_k_new,
        cache_seqlens,
        cache_batch_idx,
        page_table,
        0 if cu_seqlens_k_new is None else k.shape[0],
        rotary_interleaved,
    )
    if rotary and same_rows:
        q = rotated
    elif rotary:
        at = positions_of(q, first, cu_seqlens_q, advance)
        q = rotate(q, rotary_cos, rotary_sin, at, rotary_interleaved)
    new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    return q, cache_seqlens + new


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    *,
    s_aux=None,
    out=None,
):
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

    Returns the output; with return_softmax_lse (output, lse, empty, empty), where the official
    function has its partial results."""
    if qv is not None or attention_chunk:
        refuse(qv=qv, attention_chunk=attention_chunk or None)
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("k_cache and v_cache must be contiguous in their last dimension")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(
            (batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    with torch.no_grad():
        if k is not None:
            q, cache_seqlens = append(
                q,
                k_cache,
                v_cache,
                k,
                v,
                rotary_cos,
                rotary_sin,
                cache_seqlens,
                cache_batch_idx,
                page_table,
                cu_seqlens_q,
                cu_seqlens_k_new,
                rotary_seqlens,
                causal or window_size[0] >= 0 or window_size[1] >= 0,
                rotary_interleaved,
            )
        output, lse = attention(
            q,
            k_cache,
            v_cache,
            s_aux,
            cu_seqlens_q,
            None,
            None,
            cache_seqlens,
            cache_leftpad,
            cache_batch_idx,
            page_table,
            q_descale,
            k_descale,
            v_descale,
            0 if cu_seqlens_q is None else bound(max_seqlen_q),
            0,
            scale_of(q, softmax_scale),
            causal,
            window_size[0],
            window_size[1],
            softcap,
            sm_margin,
            num_splits,
            output=out,
            with_lse=return_softmax_lse,
        )
    if not return_softmax_lse:
        return output
    return output, lse, lse.new_empty(0), lse.new_empty(0)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Attention to several sets of keys -> attention to all of them.

    out_partial is float32, (sets, batch, seqlen, heads, head_dim), lse_partial (sets, batch, seqlen,
    heads). Returns the output, (batch, seqlen, heads, head_dim) in out_dtype (float32), and its lse,
    (batch, seqlen, heads)."""
    shape = out_partial.shape[1:]
    if out is None:
        out = out_partial.new_empty(shape, dtype=out_dtype or out_partial.dtype)
    lse = out_partial.new_empty((shape[0], shape[2], shape[1]))
    _core.combine(
        partial_output=out_partial.flatten(0, 1),
        partial_lse=lse_partial.transpose(-1, -2).contiguous().flatten(0, 1),
        output=out,
        lse=lse,
    )
    return out, lse.transpose(1, 2)


def get_scheduler_metadata(*arguments, **options):
    """What the official function plans ahead for flash_attn_with_kvcache's scheduler_metadata. A
    call plans for itself here, so the plan is an empty tensor."""
    return torch.empty(0, dtype=torch.int32)
