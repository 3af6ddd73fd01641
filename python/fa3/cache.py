"""The official FlashAttention-3's functions of a cache of keys and values, on PyTorch tensors."""

import torch

from fa3.flash_attention import bound, refuse, scale_of
from fa3.operators import attention


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

    Returns the output; with return_softmax_lse (output, lse, empty, empty), where the official
    function has its partial results."""
    refuse(
        k=k,
        v=v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
        attention_chunk=attention_chunk or None,
    )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("k_cache and v_cache must be contiguous in their last dimension")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(
            (batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    with torch.no_grad():
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
