"""The drop-in distribution flash-attn-3: what other packages find of the official one."""

import functools
import importlib.metadata
import inspect

import flash_attn_3.flash_attn_interface as packaged
import flash_attn_interface as interface
import pytest
import reference
import torch
from fa3 import operators
from torch.nn import attention

# Names and defaults of the official functions' parameters (version 3.0.0).
SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None "
    "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
    "deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None q_descale=None "
    "k_descale=None v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 "
    "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv softmax_scale=None causal=False q_descale=None k_descale=None "
    "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False "
    "num_heads_q=None sm_margin=0 return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None "
    "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
    "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None q_descale=None "
    "k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 "
    "pack_gqa=None sm_margin=0 return_softmax_lse=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim "
    "cache_seqlens qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None "
    "cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) "
    "attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0",
    "_flash_attn_forward": "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None "
    "cu_seqlens_k=None cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None "
    "max_seqlen_k=None page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None "
    "rotary_sin=None seqlens_rotary=None q_descale=None k_descale=None v_descale=None "
    "softmax_scale=None causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 "
    "softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None "
    "sm_margin=0",
    "_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None "
    "sequed_q=None sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
    "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 "
    "deterministic=False sm_margin=0",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    function = getattr(interface, name)
    assert function is getattr(packaged, name)
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "")
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    assert found == SIGNATURES[name].split()


def test_distribution():
    """What Transformers looks for."""
    assert "flash-attn-3" in importlib.metadata.packages_distributions()["flash_attn_interface"]
    assert importlib.metadata.version("flash-attn-3") == "3.0.0"


def tensors(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(2, 30, 4, 64, device=device, dtype=dtype) for _ in range(3)]


def test_operators(device):
    q, k, v = tensors(device)
    out = torch.empty(2, 4, 30, 64, device=device, dtype=q.dtype).transpose(1, 2)
    arguments = [q, k, v, *(None,) * 3, out, *(None,) * 16, 0.2, True, -1, -1, 0, 0.0, True]
    arguments += [None, 0, None, 0]
    assert len(arguments) == 34
    results = torch.ops.flash_attn_3.fwd(*arguments)
    assert len(results) == 4 and results[0].data_ptr() == out.data_ptr()
    lse = results[1]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    wanted, wanted_lse = interface.flash_attn_func(
        *leaves, softmax_scale=0.2, causal=True, return_attn_probs=True
    )
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)

    grad_output = torch.randn_like(out)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    arguments = [grad_output, q, k, v, out, lse, *gradients, *(None,) * 6, 0.2, True, -1, -1, 0.0]
    arguments += [True, 0]
    assert len(arguments) == 22
    assert len(torch.ops.flash_attn_3.bwd(*arguments)) == 5
    wanted.backward(grad_output)
    for found, leaf in zip(gradients, leaves):
        assert torch.equal(found, leaf.grad)


def test_operators_of_a_cache(device):
    """fwd with new rows, which it writes into the cache; fwd_combine; get_scheduler_metadata."""
    q, k, v = (t[:, :1] for t in tensors(device))
    caches = [t[:, :20].contiguous() for t in tensors(device)[:2]]
    again = [cache.clone() for cache in caches]
    lengths = torch.tensor([7, 19], dtype=torch.int32, device=device)
    options = {"seqused_k": lengths, "is_causal": True, "num_splits": 0}
    output, lse, *_ = torch.ops.flash_attn_3.fwd(q, *caches, k, v, **options)
    wanted, wanted_lse, *_ = interface.flash_attn_with_kvcache(
        q, *again, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    assert torch.equal(output, wanted) and torch.equal(lse, wanted_lse)
    for a, b in zip(caches, again):
        assert torch.equal(a, b)
    parts = torch.stack([output, output]).float(), torch.stack([lse, lse]).transpose(-1, -2)
    both, both_lse = torch.ops.flash_attn_3.fwd_combine(*parts, None, torch.bfloat16)
    assert both.dtype == torch.bfloat16
    torch.testing.assert_close(both, output.bfloat16())
    torch.testing.assert_close(both_lse.transpose(-1, -2), lse + torch.tensor(2.0).log())
    plan = torch.ops.flash_attn_3.get_scheduler_metadata(
        2, 1, 20, 4, 4, 64, 64, torch.float32, lengths
    )
    assert plan.dtype == torch.int32


def test_private_functions(device):
    q, k, v = tensors(device)
    output, lse, *rest = interface._flash_attn_forward(q, k, v, causal=True)
    assert len(rest) == 2 and torch.equal(output, interface.flash_attn_func(q, k, v, causal=True))
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    interface._flash_attn_backward(
        torch.ones_like(output),
        q,
        k,
        v,
        output,
        lse,
        dq=gradients[0],
        dk=gradients[1],
        dv=gradients[2],
        is_causal=True,
    )
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    interface.flash_attn_func(*leaves, causal=True).backward(torch.ones_like(output))
    for found, leaf in zip(gradients, leaves):
        assert torch.equal(found, leaf.grad)


@pytest.mark.parametrize("padded", [False, True])
def test_calls_of_transformer_engine(device, padded):
    """Its ring of packed sequences (cp_p2p_fwd_flash_attn and its kin of version 2.20): lengths by
    position, the rest by name, gradients into tensors that are given."""
    q, k, v = (t.flatten(0, 1) for t in tensors(device))
    k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
    starts = torch.tensor([0, 30, 60], dtype=torch.int32, device=device)
    counted = [24, 27] if padded else [30, 30]
    used = torch.tensor(counted, dtype=torch.int32, device=device) if padded else None
    options = {"softmax_scale": 0.11, "window_size_left": -1, "window_size_right": 0}
    output, lse, *_ = interface._flash_attn_forward(
        q, k, v, None, None, None, None, starts, starts, None, used, used, 30, 30,
        *[None] * 9, causal=True, **options,
    )  # fmt: skip
    grad_output = torch.randn_like(output)
    gradients = [torch.zeros_like(t) for t in (q, k, v)]
    interface._flash_attn_backward(
        grad_output, q, k, v, output, lse, starts, starts, used, used, 30, 30, *gradients,
        is_causal=True, deterministic=True, **options,
    )  # fmt: skip
    run = functools.partial(reference.attention, causal=True, scale=0.11)
    for first, count in zip((0, 30), counted):
        rows = slice(first, first + count)
        part = [t[None, rows] for t in (q, k, v)]
        found = [t[None, rows] for t in (output, lse.T, *gradients)]
        found[1] = found[1].transpose(1, 2)
        one = grad_output[None, rows]
        exact = reference.with_gradients(run, part, one, torch.float64)
        reference.check(found, exact, reference.with_gradients(run, part, one))
        for rest in gradients:
            assert not rest[first + count : first + 30].any()


def test_private_functions_under_compile(device):
    q, k, v = tensors(device)

    def run(q, k, v):
        output, lse, *_ = interface._flash_attn_forward(q, k, v, causal=True)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        interface._flash_attn_backward(
            output * 2, q, k, v, output, lse, dq=dq, dk=dk, dv=dv, is_causal=True
        )
        return dq, dk, dv

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(q, k, v), run(q, k, v)):
        assert torch.equal(found, wanted)


@pytest.fixture
def switched():
    """PyTorch's own switch to the official package; the calls that have come to the library."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    calls = []
    original = operators.call_forward

    def counted(*arguments, **options):
        calls.append(1)
        return original(*arguments, **options)

    operators.call_forward = counted
    attention.activate_flash_attention_impl("FA3")
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            yield calls
    finally:
        attention.restore_flash_attention_impl()
        operators.call_forward = original


def heads_first(function):
    def of_heads_first(*tensors):
        output, _ = function(*(t.transpose(1, 2) for t in tensors))
        return output.transpose(1, 2), output.new_zeros(())

    return of_heads_first


@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_scaled_dot_product_attention(switched, heads_k, compiled):
    q, k, v = (t.transpose(1, 2) for t in tensors("cuda"))
    leaves = [q, k[:, :heads_k], v[:, :heads_k]]

    def ours(q, k, v):
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads_k < 4
        )
        return output, output.new_zeros(())

    grad_output = torch.randn_like(q)
    function = ours
    if compiled:
        function = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
    found = reference.with_gradients(function, leaves, grad_output)
    assert switched
    plain = heads_first(functools.partial(reference.attention, causal=True))
    exact = reference.with_gradients(plain, leaves, grad_output, torch.float64)
    reference.check(found, exact, reference.with_gradients(plain, leaves, grad_output))


def test_varlen_attention(switched):
    """PyTorch's own function of packed sequences, which goes through the switch too."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    leaves = [t.flatten(0, 1) for t in tensors("cuda")]
    starts = torch.tensor([0, 17, 60], dtype=torch.int32, device="cuda")
    causal = {"is_causal": True}
    if "window_size" in inspect.signature(varlen.varlen_attn).parameters:
        causal = {"window_size": (-1, 0)}

    def ours(q, k, v):
        output = varlen.varlen_attn(q, k, v, starts, starts, 43, 43, **causal)
        return output, output.new_zeros(())

    def each_sequence(q, k, v):
        parts = [
            reference.attention(*(t[None, rows] for t in (q, k, v)), causal=True)[0][0]
            for rows in (slice(0, 17), slice(17, 60))
        ]
        return torch.cat(parts), q.new_zeros(())

    grad_output = torch.randn_like(leaves[0])
    found = reference.with_gradients(ours, leaves, grad_output)
    assert switched
    exact = reference.with_gradients(each_sequence, leaves, grad_output, torch.float64)
    reference.check(found, exact, reference.with_gradients(each_sequence, leaves, grad_output))
