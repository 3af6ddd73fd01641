"""The official functions against attention in float64, on CPU and GPU tensors."""

import functools

import fa3
import pytest
import reference
import torch

DTYPES = {
    "cpu": [torch.float32, torch.bfloat16, torch.float16],
    "cuda": [torch.bfloat16, torch.float16],
}


def make(device, dtype, *shapes):
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def compare(ours, tensors, options, dtype):
    """`ours` and the reference with the same options, outputs and gradients."""
    q, k, v, sink = tensors
    grad_output = torch.randn((*q.shape[:-1], v.shape[-1]), device=q.device, dtype=dtype)
    theirs = functools.partial(reference.attention, **options)

    def reference_function(q, k, v, sink=None):
        return theirs(q, k, v, sink=sink)

    found = reference.with_gradients(ours, tensors, grad_output)
    exact = reference.with_gradients(reference_function, tensors, grad_output, torch.float64)
    plain = reference.with_gradients(reference_function, tensors, grad_output)
    reference.check(found, exact, plain)


@pytest.mark.parametrize("shape", [
    # batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v
    (2, 113, 113, 4, 4, 64, 64),
    (1, 65, 200, 6, 2, 128, 128),
    (2, 128, 33, 4, 1, 40, 40),
    (1, 77, 96, 2, 2, 192, 128),
    (1, 1, 150, 8, 2, 128, 128),
])
@pytest.mark.parametrize("options", [
    {},
    {"causal": True},
    {"window": (17, 5)},
    {"causal": True, "window": (40, -1), "softcap": 3.0},
    {"scale": 0.3},
])
def test_dense(device, shape, options):
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v = shape
    for dtype in DTYPES[device]:
        tensors = make(
            device,
            dtype,
            (batch, seqlen_q, heads, head_dim),
            (batch, seqlen_k, heads_k, head_dim),
            (batch, seqlen_k, heads_k, head_dim_v),
        )

        def ours(q, k, v, sink=None):
            return fa3.flash_attn_func(
                q,
                k,
                v,
                softmax_scale=options.get("scale"),
                causal=options.get("causal", False),
                window_size=options.get("window", (-1, -1)),
                softcap=options.get("softcap", 0.0),
                return_attn_probs=True,
            )

        compare(ours, [*tensors, None], options, dtype)


def test_sink_has_a_gradient(device):
    for dtype in DTYPES[device]:
        q, k, v, sink = make(device, dtype, (2, 70, 4, 64), (2, 70, 2, 64), (2, 70, 2, 64), (4,))

        def ours(q, k, v, sink):
            return fa3.flash_attn_func(
                q, k, v, causal=True, window_size=(20, 0), s_aux=sink, return_softmax_lse=True
            )

        compare(ours, [q, k, v, sink], {"causal": True, "window": (20, 0)}, dtype)


def test_gradient_of_lse(device):
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (1, 50, 2, 64), (1, 60, 2, 64), (1, 60, 2, 64))
    weight = torch.randn(1, 2, 50, device=device)

    def run(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        output, lse = function(*leaves)
        ((lse * weight).sum() + output.sum()).backward()
        return [t.grad for t in leaves]

    ours = functools.partial(fa3.flash_attn_func, return_attn_probs=True)
    reference.check(
        run(ours, dtype), run(reference.attention, torch.float64), run(reference.attention, dtype)
    )


LENGTHS_Q, LENGTHS_K = [30, 1, 0, 47], [41, 5, 7, 47]


def packed(lengths, device):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return starts.to(torch.int32).to(device)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(device, causal):
    dtype = DTYPES[device][-1]
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    tensors = make(device, dtype, (total_q, 4, 64), (total_k, 2, 64), (total_k, 2, 64))
    grad_output = torch.randn(total_q, 4, 64, device=device, dtype=dtype)

    def ours(q, k, v):
        return fa3.flash_attn_varlen_func(
            q,
            k,
            v,
            packed(LENGTHS_Q, device),
            packed(LENGTHS_K, device),
            torch.tensor(max(LENGTHS_Q)),
            max(LENGTHS_K),
            causal=causal,
            return_attn_probs=True,
        )

    def each_sequence(q, k, v):
        parts = [
            reference.attention(*(t[None] for t in part), causal=causal)
            for part in zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K))
        ]
        return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    reference.check(
        reference.with_gradients(ours, tensors, grad_output),
        reference.with_gradients(each_sequence, tensors, grad_output, torch.float64),
        reference.with_gradients(each_sequence, tensors, grad_output),
    )


def test_unused_rows_are_zero(device):
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (24, 2, 64), (24, 2, 64), (24, 2, 64))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    starts = packed([12, 12], device)
    used = torch.tensor([5, 12], dtype=torch.int32, device=device)
    output = fa3.flash_attn_varlen_func(*leaves, starts, starts, 12, 12, used, used)
    output.backward(torch.ones_like(output))
    for tensor in (output, *(t.grad for t in leaves)):
        assert not tensor[5:12].any()
        assert tensor[:5].any() and torch.isfinite(tensor).all()


def test_qkvpacked(device):
    dtype = DTYPES[device][0]
    (qkv,) = make(device, dtype, (2, 40, 3, 4, 64))
    (grouped,) = make(device, dtype, (2, 40, 8, 64))
    for tensor, heads in ((qkv, None), (grouped, 4)):
        leaf = tensor.clone().requires_grad_()
        output = fa3.flash_attn_qkvpacked_func(leaf, causal=True, num_heads_q=heads)
        output.sum().backward()
        parts = tensor.unbind(-3) if heads is None else tensor.split([4, 2, 2], -2)
        parts = [t.detach().requires_grad_() for t in parts]
        apart = fa3.flash_attn_func(*parts, causal=True)
        apart.sum().backward()
        assert torch.equal(output, apart)
        gradients = [t.grad for t in parts]
        together = torch.stack(gradients, -3) if heads is None else torch.cat(gradients, -2)
        assert torch.equal(leaf.grad, together)


def test_cache(device):
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (2, 3, 4, 64), (5, 60, 2, 64), (5, 60, 2, 64))
    index, used, padding = [4, 1], [33, 60], [2, 0]
    as_tensor = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    output, lse, *rest = fa3.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=as_tensor(used),
        cache_batch_idx=as_tensor(index),
        cache_leftpad=as_tensor(padding),
        causal=True,
        return_softmax_lse=True,
    )
    assert len(rest) == 2
    for b in range(2):
        rows = slice(padding[b], used[b])
        part = (q[b : b + 1], k[index[b] : index[b] + 1, rows], v[index[b] : index[b] + 1, rows])
        exact = reference.attention(*(t.double() for t in part), causal=True)
        plain = reference.attention(*part, causal=True)
        reference.check([output[b : b + 1], lse[b : b + 1]], exact, plain)
    whole = fa3.flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=60)
    assert torch.equal(whole, fa3.flash_attn_func(q, k[:2], v[:2]))


def test_layouts(device):
    """Transposed, expanded and interleaved tensors give what contiguous ones give."""
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (2, 4, 30, 64), (2, 30, 1, 64), (2, 30, 4, 128))
    q, k, v = q.transpose(1, 2), k.expand(2, 30, 4, 64), v[..., ::2]
    output = fa3.flash_attn_func(q, k, v)
    assert output.is_contiguous()
    assert torch.equal(output, fa3.flash_attn_func(*(t.contiguous() for t in (q, k, v))))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    plain = [t.contiguous().detach().requires_grad_() for t in (q, k, v)]
    for tensors in (leaves, plain):
        fa3.flash_attn_func(*tensors, causal=True).sum().backward()
    for a, b in zip(leaves, plain):
        assert torch.equal(a.grad, b.grad)


def test_out(device):
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (2, 30, 4, 64), (2, 30, 4, 64), (2, 30, 4, 64))
    out = torch.full((2, 4, 30, 64), float("nan"), device=device, dtype=dtype).transpose(1, 2)
    assert fa3.flash_attn_func(q, k, v, out=out) is out
    assert torch.equal(out, fa3.flash_attn_func(q, k, v))
    with pytest.raises(ValueError, match="out"):
        fa3.flash_attn_func(q.requires_grad_(), k, v, out=out)


@pytest.mark.parametrize("way", ["plain", "parameter", "compiled"])
@pytest.mark.parametrize("options", [{}, {"attention_chunk": 4}, {"page_table": [[0, 1], [1, 0]]}])
def test_rows_of_out(device, way, options):
    """Rows that seqused_q leaves out are 0, and those behind the last sequence's what they were."""
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (15, 2, 64), (2, 6, 2, 64), (2, 6, 2, 64))
    starts, used = packed([5, 7], device), torch.tensor([3, 7], dtype=torch.int32, device=device)
    options = dict(options)
    if "page_table" in options:
        table = torch.tensor(options["page_table"], dtype=torch.int32, device=device)
        options |= {"page_table": table, "attention_chunk": 4}

    def run(q, **given):
        return fa3.flash_attn_varlen_func(
            q, k, v, starts, None, 7, 12, used, causal=True, **given, **options
        )

    def run_dense(q, **given):
        return fa3.flash_attn_varlen_func(q, k, v, None, None, 0, 0, used, causal=True, **given)

    dense = q[:14].view(2, 7, 2, 64)
    wanted, wanted_dense = run(q), run_dense(dense)
    if way == "parameter":
        q, dense = (torch.nn.Parameter(t, requires_grad=False) for t in (q, dense))
    elif way == "compiled":
        torch.compiler.reset()
        run, run_dense = (
            torch.compile(call, fullgraph=True, backend="aot_eager") for call in (run, run_dense)
        )
    out = torch.full((15, 2, 64), 7.0, device=device, dtype=dtype)
    run(q, out=out)
    assert torch.equal(out[:12], wanted[:12]) and not out[3:5].any() and (out[12:] == 7).all()
    out = torch.full((2, 7, 2, 64), float("nan"), device=device, dtype=dtype)
    run_dense(dense, out=out)
    assert torch.equal(out, wanted_dense) and not out[0, 3:].any()


@pytest.mark.parametrize("way", ["plain", "parameter", "compiled"])
def test_out_is_checked(device, way):
    """By its shape and dtype, whichever way a call takes; float32 is exact on each."""
    q, k, v = make(device, torch.bfloat16, *[(1, 6, 2, 64)] * 3)
    parts = torch.randn(3, 1, 6, 2, 64, device=device), torch.randn(3, 1, 6, 2, device=device)
    length = torch.tensor([2], dtype=torch.int32, device=device)
    exact = fa3.flash_attn_func(q, k, v, out=torch.empty_like(q, dtype=torch.float32))

    def wrap(call):
        return torch.compile(call, fullgraph=True, backend="aot_eager") if way == "compiled" else call

    if way == "parameter":
        q = torch.nn.Parameter(q, requires_grad=False)
        parts = [torch.nn.Parameter(part, requires_grad=False) for part in parts]
    calls = [
        lambda out: fa3.flash_attn_func(q, k, v, out=out),
        lambda out: fa3.flash_attn_with_kvcache(
            q[:, :2], k, v, k[:, :2], v[:, :2], cache_seqlens=length, out=out[:, :2]
        ),
        lambda out: fa3.flash_attn_combine(*parts, out=out),
    ]
    torch.compiler.reset()
    for call in calls[: 2 if way == "compiled" else 3]:  # what is raised in Python is a compiler's error
        with pytest.raises(ValueError, match="out"):
            wrap(call)(q.new_empty(3, 6, 2, 64))
        with pytest.raises(TypeError, match="output.dtype"):
            wrap(call)(torch.empty_like(q, dtype=torch.int32))
    assert torch.equal(wrap(calls[0])(torch.empty_like(q, dtype=torch.float32)), exact)


def test_empty(device):
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (2, 5, 2, 64), (2, 0, 2, 64), (2, 0, 2, 64))
    output, lse = fa3.flash_attn_func(q.requires_grad_(), k, v, return_attn_probs=True)
    assert not output.any() and torch.isneginf(lse).all()
    output.sum().backward()
    assert not q.grad.any()


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 2, 64)])
def test_gradients_of_nothing(device, shape):
    tensors = [t.requires_grad_() for t in make(device, DTYPES[device][0], *[shape] * 3)]
    fa3.flash_attn_func(*tensors, causal=True).sum().backward()
    assert all(t.grad.shape == t.shape for t in tensors)


def test_strided_lengths(device):
    """Lengths, tables and sinks need not be contiguous."""
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (8, 2, 64), (8, 2, 64), (8, 2, 64))
    sink = torch.randn(2, 3, device=device, dtype=dtype)
    starts = torch.tensor([[0, 9], [5, 9], [8, 9]], dtype=torch.int32, device=device)
    found = fa3.flash_attn_varlen_func(
        q, k, v, starts[:, 0], starts[:, 0], 5, 5, s_aux=sink[:, 1]
    )
    starts = starts[:, 0].contiguous()
    wanted = fa3.flash_attn_varlen_func(
        q, k, v, starts, starts, 5, 5, s_aux=sink[:, 1].contiguous()
    )
    assert torch.equal(found, wanted)


def test_deterministic(device):
    dtype = DTYPES[device][0]
    tensors = make(device, dtype, (1, 300, 4, 64), (1, 300, 2, 64), (1, 300, 2, 64))
    grad_output = torch.randn(1, 300, 4, 64, device=device, dtype=dtype)
    run = functools.partial(fa3.flash_attn_func, causal=True, return_attn_probs=True)
    first = reference.with_gradients(run, tensors, grad_output)
    for _ in range(3):
        for a, b in zip(first, reference.with_gradients(run, tensors, grad_output)):
            assert torch.equal(a, b)


def test_sm_margin(device):
    """Fewer multiprocessors, the same results; on the CPU there are none to leave free."""
    dtype = DTYPES[device][0]
    tensors = make(device, dtype, (2, 300, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    grad_output = torch.randn(2, 300, 4, 64, device=device, dtype=dtype)
    run = functools.partial(fa3.flash_attn_func, causal=True, return_attn_probs=True)
    wanted = reference.with_gradients(run, tensors, grad_output)
    for margin in (8, 100):
        found = reference.with_gradients(
            functools.partial(run, sm_margin=margin), tensors, grad_output
        )
        for a, b in zip(found, wanted):
            assert torch.equal(a, b)


def test_pages(device):
    """A cache in pages gives what the same rows in one piece do."""
    dtype = DTYPES[device][0]
    page_size, used = 16, [50, 33]
    q, k, v = make(device, dtype, (2, 3, 4, 64), (9, page_size, 2, 64), (9, page_size, 2, 64))
    table = torch.tensor([[7, 0, 3, 5], [2, 8, 1, 4]], dtype=torch.int32, device=device)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    dense_k, dense_v = (t[table.long()].flatten(1, 2) for t in (k, v))
    found = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=table, causal=True
    )
    starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    packed_queries = fa3.flash_attn_varlen_func(
        q.flatten(0, 1),
        k,
        v,
        starts,
        None,
        3,
        64,
        seqused_k=lengths,
        page_table=table,
        causal=True,
    )
    for result in (found, packed_queries.view_as(found)):
        for b in range(2):
            part = (q[b : b + 1], dense_k[b : b + 1, : used[b]], dense_v[b : b + 1, : used[b]])
            exact, _ = reference.attention(*(t.double() for t in part), causal=True)
            plain, _ = reference.attention(*part, causal=True)
            reference.check([result[b : b + 1]], [exact], [plain])


def test_num_splits(device):
    dtype = DTYPES[device][0]
    q, k, v = make(device, dtype, (1, 2, 8, 64), (1, 900, 2, 64), (1, 900, 2, 64))
    exact = reference.attention(*(t.double() for t in (q, k, v)), causal=True)
    plain = reference.attention(q, k, v, causal=True)
    for splits in (0, 1, 3):
        found = fa3.flash_attn_func(
            q, k, v, causal=True, num_splits=splits, return_attn_probs=True
        )
        reference.check(found, exact, plain)


def test_fp8(device):
    """Codes and scales give what their products do, but for the rounding of the probabilities."""
    shapes = (2, 90, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64)
    codes = [t.to(torch.float8_e4m3fn) for t in make(device, torch.float32, *shapes)]
    scales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    found = fa3.flash_attn_func(*codes, None, True, None, *scales, return_attn_probs=True)
    assert found[0].dtype == torch.bfloat16
    heads = [scales[0].repeat_interleave(2, 1), *scales[1:]]
    values = [t.float() * scale[:, None, :, None] for t, scale in zip(codes, heads)]
    exact = reference.attention(*(t.double() for t in values), causal=True)
    # What E4M3 probabilities, of 4 bits, may do to the output.
    assert (found[0] - exact[0]).abs().max() <= 2**-4 * values[2].abs().max()
    # Of the sums that scores are a GPU keeps about 13 bits.
    sizes = torch.einsum("bihd,bjhd->bhij", values[0].abs(), values[1].repeat_interleave(2, 2).abs())
    bound = 2**-13 * sizes.max() / 8 if device == "cuda" else 1e-4
    assert (found[1] - exact[1]).abs().max() <= bound
    with pytest.raises(NotImplementedError, match="FP8"):
        fa3.flash_attn_func(*(t.requires_grad_() for t in codes)).sum().backward()
