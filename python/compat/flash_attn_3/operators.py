"""torch.ops.flash_attn_3: the official extension's operators, with their schemas. What only serves
the official kernels comes back empty: partial results of splits, scratch of the backward pass."""

import torch
from fa3 import operators
from fa3.flash_attention import bound, refuse, scale_of

library = torch.library.Library("flash_attn_3", "DEF")
library.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
library.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    q_v=None,
    out=None,
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
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    is_rotary_interleaved=False,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    refuse(
        k_new=k_new,
        v_new=v_new,
        q_v=q_v,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary,
        attention_chunk=attention_chunk or None,
    )
    output, lse = operators.call_forward(
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
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        sm_margin,
        num_splits,
        output=out,
    )
    return output, lse, lse.new_empty(0), lse.new_empty(0)


def backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq=None,
    dk=None,
    dv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    operators.call_backward(
        dout,
        None,
        q,
        k,
        v,
        out,
        softmax_lse,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        None,
        0 if cu_seqlens_q is None else bound(max_seqlen_q),
        0 if cu_seqlens_k is None else bound(max_seqlen_k),
        scale_of(q, softmax_scale),
        is_causal,
        window_size_left,
        window_size_right,
        softcap,
        sm_margin,
        gradients=(dq, dk, dv),
    )
    return tuple(softmax_lse.new_empty(0) for _ in range(5))


def fake_backward(dout, q, k, v, out, softmax_lse, *arguments, **_):
    return tuple(softmax_lse.new_empty(0) for _ in range(5))


for device in ("CPU", "CUDA"):
    library.impl("fwd", forward, device)
    library.impl("bwd", backward, device)
# torch.compile takes no operator whose result may be an argument, so fwd has no fake: compiled code
# calls the functions of flash_attn_interface.
torch.library.register_fake("flash_attn_3::bwd", fake_backward, lib=library)
