"""Random calls of every kind, against attention in float64 of one sequence at a time."""

import contextlib
import random

import fa3
import pytest
import reference
import torch

FP8 = torch.float8_e4m3fn
DTYPES = {"cpu": [torch.float32, torch.bfloat16, torch.float16, FP8]}
DTYPES["cuda"] = DTYPES["cpu"][1:]


def tensor(r, device, dtype, *shape):
    """Of (..., rows, heads, head_dim), in one of the layouts that there are."""
    layout = r.choice(["rows", "heads", "part"])
    if layout == "heads":
        made = torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1]).transpose(-2, -3)
    elif layout == "part":
        made = torch.randn(*shape[:-2], 2 * shape[-2], shape[-1])[..., shape[-2] :, :]
    else:
        made = torch.randn(shape)
    return made.to(device=device, dtype=dtype)


def integers(device, values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def draw_options(r, device, heads, longest):
    """A call's options, as ours and as the reference's."""
    ours, theirs = {}, {}
    if r.random() < 0.5:
        ours["causal"] = theirs["causal"] = True
    if r.random() < 0.3:
        ours["window_size"] = theirs["window"] = r.randrange(-1, longest), r.randrange(-1, longest)
    if r.random() < 0.2:
        ours["softcap"] = theirs["softcap"] = r.uniform(1, 20)
    if r.random() < 0.3:
        ours["softmax_scale"] = theirs["scale"] = r.uniform(0.02, 0.3)
    if r.random() < 0.3:
        ours["num_splits"] = r.randrange(5)
    sink = torch.randn(heads, device=device) if r.random() < 0.2 else None
    if r.random() < 0.25:
        ours["attention_chunk"] = theirs["chunk"] = r.randint(1, 2 * longest)
    return ours, theirs, sink


def dense(r, device, dtype, heads, heads_k, dims, most):
    batch, seqlen_q, seqlen_k = r.randint(1, 3), r.randint(1, most), r.randint(1, most)
    tensors = [
        tensor(r, device, dtype, batch, seqlen_q, heads, dims[0]),
        *(tensor(r, device, dtype, batch, seqlen_k, heads_k, dim) for dim in dims),
    ]

    def call(q, k, v, **options):
        output, lse = fa3.flash_attn_func(q, k, v, return_softmax_lse=True, **options)
        return output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def cut(q, k, v):
        return [(q[b], k[b], v[b]) for b in range(batch)]

    return tensors, call, cut


def packed(r, device, dtype, heads, heads_k, dims, most):
    """Sequences one after the other, some rows of which may not count."""
    batch = r.randint(1, 4)
    lengths = [[r.randint(0, most) for _ in range(batch)] for _ in range(2)]
    used = [[r.randint(0, n) if r.random() < 0.3 else n for n in side] for side in lengths]
    starts = [[sum(side[:b]) for b in range(batch + 1)] for side in lengths]
    tensors = [
        tensor(r, device, dtype, sum(lengths[0]) + 5, heads, dims[0]),
        *(tensor(r, device, dtype, sum(lengths[1]) + 3, heads_k, dim) for dim in dims),
    ]
    given = {"seqused_q": integers(device, used[0]), "seqused_k": integers(device, used[1])}
    rows = [[slice(s, s + n) for s, n in zip(starts[i], used[i])] for i in range(2)]

    def call(q, k, v, **options):
        ends, most = [integers(device, side) for side in starts], [max(n) for n in lengths]
        output, lse = fa3.flash_attn_varlen_func(
            q, k, v, *ends, *most, **given, return_softmax_lse=True, **options
        )
        parts = [(output[one], lse[:, one].T) for one in rows[0]]
        return tuple(torch.cat(part) for part in zip(*parts))

    def cut(q, k, v):
        return [(q[of_q], k[of_k], v[of_k]) for of_q, of_k in zip(*rows)]

    return tensors, call, cut


def cached(r, device, dtype, heads, heads_k, dims, most):
    """A few queries, and a cache in pages or in entries, which some rows of may be padding."""
    batch, seqlen_q = r.randint(1, 4), r.choice([1, 1, 2, 7, 40])
    lengths = [r.randint(1, most) for _ in range(batch)]
    given = {"cache_seqlens": integers(device, lengths)}
    padding = [0] * batch
    if r.random() < 0.3:
        padding = [r.randrange(n) for n in lengths]
        given["cache_leftpad"] = integers(device, padding)
    of_cache = FP8 if r.random() < 0.2 else dtype
    if r.random() < 0.5:
        size = r.choice([1, 4, 16, 48, 64, 128, 256])
        columns = -(-most // size)
        order = r.sample(range(batch * columns + 3), batch * columns)
        table = torch.tensor(order, device=device).view(batch, columns)
        given["page_table"] = table.int()
        shape = batch * columns + 3, size
    else:
        entries = torch.tensor(r.sample(range(batch + 2), batch), device=device)
        given["cache_batch_idx"] = entries.int()
        shape, table = (batch + 2, most), entries[:, None]
    tensors = [
        tensor(r, device, dtype, batch, seqlen_q, heads, dims[0]),
        *(tensor(r, device, of_cache, *shape, heads_k, dim) for dim in dims),
    ]

    def call(q, k, v, **options):
        with reference.fp8_cache(device) if of_cache is FP8 else contextlib.nullcontext():
            output, lse, *_ = fa3.flash_attn_with_kvcache(
                q, k, v, **given, return_softmax_lse=True, **options
            )
        return output.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def cut(q, k, v):
        # Indexing needs a dtype that PyTorch has it for.
        k, v = (cache.to(q.dtype)[table].flatten(1, 2) for cache in (k, v))
        rows = [slice(first, end) for first, end in zip(padding, lengths)]
        return [(q[b], k[b, one], v[b, one]) for b, one in enumerate(rows)]

    return tensors, call, cut


def check_sink(sink, grad_output, dtype, found, exact):
    """Of so few numbers a plain implementation's error says little. Each query adds to the sink's
    gradient its probability there times dO O, whose O was rounded."""
    output, lse, wanted = exact[0], exact[1], exact.pop()
    weights = torch.exp(sink - lse) * (grad_output * output).abs().sum(-1)
    bound = torch.finfo(dtype).eps * weights.sum(0) + 1e-5
    error = (found - wanted).abs()
    assert (error <= bound).all(), f"sink: error {error}, bound {bound}"


@pytest.mark.parametrize("kind", [dense, packed, cached])
@pytest.mark.parametrize("trial", range(20))
def test_call(device, kind, trial):
    r = random.Random(f"{kind.__name__} {trial}")
    torch.manual_seed(trial)
    dtype = r.choice(DTYPES[device])
    heads_k = r.randint(1, 3)
    heads = heads_k * r.choice([1, 1, 2, 4, 5])
    head_dim = r.choice([16, 64, 64, 80, 96, 128, 128, 192, 256])
    dims = head_dim, head_dim if dtype is FP8 else r.choice([head_dim, head_dim, 64, 128])
    most = r.choice([9, 70, 300]) if device == "cpu" else r.choice([70, 300, 1500])
    tensors, call, cut = kind(r, device, dtype, heads, heads_k, dims, most)
    options, theirs, sink = draw_options(r, device, heads, most)

    def ours(q, k, v, sink=None):
        return call(q, k, v, s_aux=sink, **options)

    def each_sequence(q, k, v, sink=None):
        parts = [
            reference.attention(*(t[None] for t in rows), sink=sink, **theirs)
            for rows in cut(q, k, v)
        ]
        return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0].T for _, lse in parts])

    if dtype is FP8:  # no gradients, and probabilities of 4 bits
        output, _ = ours(*tensors, sink)
        exact, _ = each_sequence(*(t.double() for t in tensors), sink)
        assert (output - exact).abs().max() <= 2**-4 * tensors[2].float().abs().max()
        return
    tensors.append(sink)
    if kind is cached:
        found = ours(*tensors)
        exact = each_sequence(*(t if t is None else t.double() for t in tensors))
        plain = each_sequence(*tensors)
    else:
        grad_output = torch.randn_like(ours(*tensors)[0])
        found = reference.with_gradients(ours, tensors, grad_output)
        exact = reference.with_gradients(each_sequence, tensors, grad_output, torch.float64)
        plain = reference.with_gradients(each_sequence, tensors, grad_output)
        if sink is not None:
            check_sink(sink, grad_output, dtype, found.pop(), exact)
            plain.pop()
    reference.check(found, exact, plain)
