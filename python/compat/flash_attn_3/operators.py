"""torch.ops.flash_attn_3: the official extension's operators, with their schemas. What only serves
the official kernels comes back empty: partial results of splits, scratch of the backward pass."""

import fa3
import torch
from fa3 import cache
from fa3.operators import gradients_of
from fa3.options import options_of, sequences

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
library.define(
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out = None, "
    "ScalarType? out_dtype = None) -> (Tensor(out!), Tensor)"
)
library.define(
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? leftpad_k = None, int? page_size = None, "
    "int max_seqlen_k_new = 0, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, bool has_softcap = False, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor"
)


def arguments_of(operator) -> dict:
    """The operator's arguments and their defaults, in order."""
    return {argument.name: argument.default_value for argument in operator._schema.arguments}


forward_defaults = arguments_of(torch.ops.flash_attn_3.fwd.default)
backward_names = list(arguments_of(torch.ops.flash_attn_3.bwd.default))
metadata_names = list(arguments_of(torch.ops.flash_attn_3.get_scheduler_metadata.default))


def forward_kernel(*arguments):
    """Called without the last arguments where they are the defaults."""
    left_out = list(forward_defaults.values())[len(arguments) :]
    with torch.no_grad():
        return cache.forward(*arguments, *left_out)


def backward(
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
    """Writes dq, dk and dv; with the names and defaults of the official package's private
    `_flash_attn_backward`. What it returns is empty, where that has scratch."""
    window = window_size_left, window_size_right
    options = options_of(q, softmax_scale, is_causal, window, softcap, sm_margin, 0)
    options |= sequences(
        max_seqlen_q,
        max_seqlen_k,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=sequed_q,
        seqused_k=sequed_k,
    )
    gradients_of(dout, q, k, v, out, softmax_lse, options, (dq, dk, dv))
    return softmax_lse.new_empty(0)


def backward_kernel(*arguments):
    named = dict(zip(backward_names, arguments))
    named |= {"sequed_q": named.pop("seqused_q", None), "sequed_k": named.pop("seqused_k", None)}
    with torch.no_grad():
        backward(**named)
    return tuple(named["softmax_lse"].new_empty(0) for _ in range(5))


def metadata_kernel(*arguments):
    return arguments[metadata_names.index("seqused_k")].new_empty(0)


for device in ("CPU", "CUDA"):
    library.impl("fwd", forward_kernel, device)
    library.impl("bwd", backward_kernel, device)
    library.impl("fwd_combine", fa3.flash_attn_combine, device)
    library.impl("get_scheduler_metadata", metadata_kernel, device)


# torch.compile takes no operator whose result may be an argument, so fwd and fwd_combine have no
# fake: compiled code calls the functions of flash_attn_interface.
@torch.library.register_fake("flash_attn_3::bwd", lib=library)
def fake_backward(dout, q, k, v, out, softmax_lse, *arguments):
    return tuple(softmax_lse.new_empty(0) for _ in range(5))
