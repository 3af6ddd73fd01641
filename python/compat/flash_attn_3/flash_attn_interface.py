"""The official FlashAttention-3's functions, and the private ones that TransformerEngine and others
import."""

import torch
from fa3 import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    operators,
)
from fa3.flash_attention import bound, refuse, scale_of

import flash_attn_3.operators  # noqa: F401  makes torch.ops.flash_attn_3

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def _flash_attn_forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
):
    """(output, lse, empty, empty); the official function has partial results in the last two."""
    refuse(
        k_new=k_new,
        v_new=v_new,
        qv=qv,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary,
        attention_chunk=attention_chunk or None,
    )
    output, lse = operators.attention(
        q,
        k,
        v,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        leftpad_k,
        kv_batch_idx,
        page_table,
        q_descale,
        k_descale,
        v_descale,
        0 if cu_seqlens_q is None else bound(max_seqlen_q),
        0 if cu_seqlens_k is None else bound(max_seqlen_k),
        scale_of(q, softmax_scale),
        causal,
        window_size_left,
        window_size_right,
        softcap,
        sm_margin,
        num_splits,
        output=out_,
    )
    return output, lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    """Writes dq, dk and dv. What it returns is empty; the official function has scratch there."""
    scratch, *_ = torch.ops.flash_attn_3.bwd(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
        sm_margin,
    )
    return scratch
