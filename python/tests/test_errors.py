"""What is refused, and as what."""

import fa3
import numpy
import pytest
import torch


def tensors(device="cpu"):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(1, 8, 2, 64, device=device, dtype=dtype) for _ in range(3)]


def test_shapes(device):
    q, k, v = tensors(device)
    with pytest.raises(ValueError, match="query"):
        fa3.flash_attn_func(q[0, 0], k, v)
    with pytest.raises(ValueError, match="value"):
        fa3.flash_attn_func(q, k, v[:, :5])
    with pytest.raises(ValueError, match="heads"):
        fa3.flash_attn_func(q.repeat(1, 1, 2, 1)[:, :, :3], k, v)
    with pytest.raises(NotImplementedError, match="head.dims? (is )?7"):
        fa3.flash_attn_func(q[..., :7], k[..., :7], v)
    with pytest.raises(ValueError, match="qkv"):
        fa3.flash_attn_qkvpacked_func(torch.stack((q, k), 2))


def test_dtypes(device):
    q, k, v = tensors(device)
    with pytest.raises(TypeError):
        fa3.flash_attn_func(q, k.half(), v)
    with pytest.raises(TypeError, match="query"):
        fa3.flash_attn_func(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        starts = torch.tensor([0, 8], device=device)
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 8, 8)
    if device == "cuda":
        with pytest.raises(NotImplementedError, match="query"):
            fa3.flash_attn_func(q.float(), k.float(), v.float())


def test_lengths():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        starts = torch.tensor([0, 8], dtype=torch.int32)
        wrong = torch.tensor([0, 9], dtype=torch.int32)
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], starts, wrong, 8, 9)


def test_options(device):
    q, k, v = tensors(device)
    with pytest.raises(ValueError, match="softcap"):
        fa3.flash_attn_func(q, k, v, softcap=-1.0)
    with pytest.raises(ValueError, match="softmax_scale"):
        fa3.flash_attn_func(q, k, v, softmax_scale=float("inf"))
    with pytest.raises(ValueError, match="attention_chunk"):
        fa3.flash_attn_func(q, k, v, attention_chunk=-4)
    with pytest.raises(NotImplementedError, match="qv"):
        fa3.flash_attn_func(q, k, v, qv=q)


def test_options_are_named(device):
    """What is no number, or not two, is said to be none by its name."""
    q, k, v = tensors(device)
    for option, wrong in (("softcap", "3"), ("num_splits", 1.5), ("attention_chunk", 2.5),
                          ("num_splits", torch.tensor(2.5)), ("sm_margin", None),
                          ("softmax_scale", "half")):
        with pytest.raises(TypeError, match=option):
            fa3.flash_attn_func(q, k, v, **{option: wrong})
    starts = torch.tensor([0, 8], dtype=torch.int32, device=device)
    for longest in ((8.5, 8), (8, 8.5)):
        with pytest.raises(TypeError, match="max_seqlen_.*8.5"):
            fa3.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, *longest)
    with pytest.raises(OverflowError, match="softcap"):
        fa3.flash_attn_func(q, k, v, softcap=1e-50)  # as a float32 that is 0, which means none
    for wrong in (5, (1,), (1, None), (1, 2, 3), (1.5, 0)):
        with pytest.raises(TypeError, match="window"):
            fa3.flash_attn_func(q, k, v, window_size=wrong)
        with pytest.raises(TypeError, match="window"):
            fa3.flash_attn_with_kvcache(q, k, v, window_size=wrong)
    nested = torch.nested.nested_tensor(list(q), layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="nested"):
        fa3.flash_attn_func(nested, nested, nested)


@pytest.mark.parametrize("wrong, error, text", [
    ({"k": torch.zeros(3), "v": torch.zeros(3)}, ValueError, "dimensions"),
    ({"k": torch.zeros(1, 2, 64)}, ValueError, "dimensions"),
    ({"rotary_seqlens": 3}, TypeError, "rotary_seqlens"),
    ({"k_descale": 1.0}, TypeError, "key_scale"),
    ({"cache_seqlens": 3.0}, TypeError, "seqused_k"),
    ({"cu_seqlens_k_new": torch.tensor([0, 1])}, TypeError, "cu_seqlens_k_new"),
])
def test_what_new_rows_need(wrong, error, text):
    q, k, v = tensors()
    new = {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": numpy.int64(3)}
    fa3.flash_attn_with_kvcache(q, k.clone(), v.clone(), **new)
    with pytest.raises(error, match=text):
        fa3.flash_attn_with_kvcache(q, k, v, **{**new, **wrong})


def test_what_is_new_rows_is_whole():
    q, k, v = tensors()
    tables = {"rotary_cos": torch.ones(8, 8), "rotary_sin": torch.ones(8, 8)}
    with pytest.raises(ValueError, match="k, the new rows"):
        fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=3, **tables)
    new = [t[:, :1] for t in (k, v)]
    with pytest.raises(ValueError, match="both or neither"):
        fa3.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=3, rotary_cos=torch.ones(8, 8))
    with pytest.raises(ValueError, match="page_table"):
        codes = [t.to(torch.float8_e4m3fn) for t in (k, v)]
        table = torch.tensor([[4]], dtype=torch.int32)
        fa3.flash_attn_with_kvcache(
            q, *codes, cache_seqlens=8, page_table=table, k_descale=torch.ones(1, 2)
        )


def test_negative_views(device):
    """A view whose sign is not in its memory is not taken for the memory."""
    q, k, v = tensors(device)
    wanted = fa3.flash_attn_func(-q, k, v)
    torch.testing.assert_close(fa3.flash_attn_func(torch._neg_view(q), k, v), wanted)
    leaf = v.clone().requires_grad_()
    fa3.flash_attn_func(q, k, leaf).backward(torch._neg_view(torch.ones_like(v)))
    again = v.clone().requires_grad_()
    fa3.flash_attn_func(q, k, again).backward(-torch.ones_like(v))
    assert torch.equal(leaf.grad, again.grad)


def test_meta_tensors_have_shapes():
    q, k, v = (t.to("meta") for t in tensors())
    output, lse = fa3.flash_attn_func(q, k, v, return_softmax_lse=True)
    assert output.is_meta and output.shape == q.shape and lse.shape == (1, 2, 8)


def test_not_a_tensor():
    q, k, v = tensors()
    for wrong in ((None, k, v), (q, k.numpy(), v), (q, k, [1.0])):
        with pytest.raises(TypeError, match="expected a tensor"):
            fa3.flash_attn_func(*wrong)
    with pytest.raises(ValueError, match="dimensions"):
        fa3.flash_attn_func(*[torch.tensor(1.0)] * 3)
    with pytest.raises(ValueError, match="dimensions"):
        fa3.flash_attn_combine(torch.randn(2, 8, 64), torch.randn(2, 8))
    with pytest.raises(ValueError, match="reserved_multiprocessors"):
        fa3.flash_attn_func(q, k, v, sm_margin=-1)
    with pytest.raises(TypeError, match="key"):
        fa3.attention(q.numpy(), [1.0], v.numpy())
    with pytest.raises(TypeError, match="no argument"):
        fa3._core.forward(question=q)
    with pytest.raises(TypeError, match="keyword"):
        fa3._core.forward(q, k, v)


def test_what_has_no_plain_memory():
    q, k, v = tensors()
    for wrong in (k.to("meta"), k.to_sparse()):
        with pytest.raises((TypeError, ValueError), match="dense|strided"):
            fa3.flash_attn_func(q, wrong, v)


@pytest.mark.parametrize("wrong", [None, [1.0], 3])
def test_every_tensor_is_one(wrong):
    q, k, v = tensors()
    calls = [
        lambda: fa3.flash_attn_with_kvcache(q, k, wrong),
        lambda: fa3.flash_attn_qkvpacked_func(wrong),
        lambda: fa3.flash_attn_combine(wrong, q),
        lambda: fa3.quantize(wrong),
    ]
    if wrong is not None:
        calls += [
            lambda: fa3.flash_attn_func(q, k, v, s_aux=wrong),
            lambda: fa3.flash_attn_func(q, k, v, out=wrong),
            lambda: fa3.flash_attn_varlen_func(q[0], k[0], v[0], wrong, None, 8, 8),
            lambda: fa3.flash_attn_with_kvcache(q, k, v, page_table=wrong),
            lambda: fa3.quantize(q, positions=wrong),
        ]
    for call in calls:
        with pytest.raises(TypeError, match="expected a tensor"):
            call()


def test_out_takes_no_part_in_autograd():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="out requires"):
        fa3.flash_attn_func(q, k, v, out=torch.empty_like(q, requires_grad=True))
    # What was saved for a gradient and is then written to is found out.
    leaf, out = torch.ones_like(q, requires_grad=True), torch.ones_like(q)
    product = leaf * out
    fa3.flash_attn_func(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    cache = torch.ones_like(q)
    product = leaf * cache
    fa3.flash_attn_with_kvcache(q, cache, v, k[:, :1], v[:, :1], cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_rows_of_tables_are_there(device):
    """A number that is none of a table's rows: an error, and on a GPU no harm."""
    q, k, v = tensors(device)
    new, far = [t[:, :1] for t in (k, v)], torch.tensor([7], dtype=torch.int32, device=device)
    short = torch.ones(2, 16, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    codes = [t.to(torch.float8_e4m3fn) for t in (k, v)]
    scale = torch.ones(1, 2, device=device)
    calls = [
        lambda: fa3.flash_attn_with_kvcache(
            q, k, v, *new, rotary_cos=short, rotary_sin=short, cache_seqlens=4
        ),
        lambda: fa3.flash_attn_with_kvcache(
            q, k, v, page_table=table, cache_batch_idx=far, cache_seqlens=4
        ),
        lambda: fa3.flash_attn_with_kvcache(
            q.bfloat16(), *codes, cache_batch_idx=far, cache_seqlens=4, k_descale=scale
        ),
    ]
    for call in calls:
        if device == "cuda":
            call()
            torch.cuda.synchronize()
        else:
            with pytest.raises(ValueError):
                call()
    with pytest.raises(ValueError, match="rotary_cos"):
        wide = torch.ones(8, 64, device=device)
        fa3.flash_attn_with_kvcache(
            q, k, v, *new, rotary_cos=wide, rotary_sin=wide, cache_seqlens=4
        )


def test_forward_mode_is_refused(device):
    q, k, v = tensors(device)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda q: fa3.flash_attn_func(q, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        fa3.flash_attn_func(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_mixed_devices():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    q, k, v = tensors()
    with pytest.raises(ValueError, match="key is on CUDA device 0"):
        fa3.flash_attn_func(q, k.cuda(), v)


@pytest.mark.parametrize("is_operator", [False, True])
def test_double_backward_is_refused(device, is_operator):
    """Also where the gradient that comes in is a constant, and another way to the tensor is not."""
    q, k, v = (t.requires_grad_() for t in tensors(device))
    output = torch.ops.fa3.forward(q, k, v)[0] if is_operator else fa3.flash_attn_func(q, k, v)
    for loss in (output.square().sum(), output.sum()):
        for tensor in (q, v):
            (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
            with pytest.raises(RuntimeError, match="second derivative|no autograd formula"):
                (loss + gradient.square().sum()).backward(retain_graph=True)
    if not is_operator:
        with pytest.raises(NotImplementedError, match="second derivative"):
            torch.func.grad(lambda q: torch.func.grad(lambda q: fa3.flash_attn_func(q, k, v).sum())(q).sum())(q)


def test_an_error_leaves_things_as_they_were(device):
    q, k, v = tensors(device)
    wanted = fa3.flash_attn_func(q, k, v)
    with pytest.raises(ValueError):
        fa3.flash_attn_func(q, k, v, softcap=-1.0)
    assert torch.equal(fa3.flash_attn_func(q, k, v), wanted)
