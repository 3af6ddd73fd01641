"""attention_chunk: a query sees the keys of its own position's chunk alone."""

import fa3
import pytest
import reference
import torch


def make(device, *shapes):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("lengths", [(40, 40), (23, 40), (40, 23), (1, 40), (40, 0)])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"window": (5, 3)}])
@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_dense(device, lengths, options, chunk):
    tensors = make(device, (2, lengths[0], 4, 64), *[(2, lengths[1], 2, 64)] * 2)
    ours = {"causal": options.get("causal", False), "window_size": options.get("window", (-1, -1))}

    def run(q, k, v):
        return fa3.flash_attn_func(
            q, k, v, attention_chunk=chunk, return_softmax_lse=True, **ours
        )

    def wanted(q, k, v):
        return reference.attention(q, k, v, chunk=chunk, **options)

    grad_output = torch.randn_like(tensors[0])
    found = reference.with_gradients(run, tensors, grad_output)
    exact = reference.with_gradients(wanted, tensors, grad_output, torch.float64)
    reference.check(found, exact, reference.with_gradients(wanted, tensors, grad_output))
    assert found[0].is_contiguous() and found[1].is_contiguous()


@pytest.mark.parametrize("where", ["cache", "entries", "pages", "padding"])
@pytest.mark.parametrize("seqlen_q", [1, 7])
def test_cache(device, where, seqlen_q):
    """New rows behind those of a cache whose lengths are on the device, rotated by their positions."""
    q, k, v = make(device, (2, seqlen_q, 4, 64), *[(2, seqlen_q, 2, 64)] * 2)
    caches = make(device, *[(6, 16, 2, 64) if where == "pages" else (3, 48, 2, 64)] * 2)
    table = torch.tensor([[5, 0, 3], [2, 4, 1]], device=device)
    lengths = torch.tensor([20, 37], dtype=torch.int32, device=device)
    angle = torch.rand(48, 16, device=device)
    given, padding, entries = {}, [0, 0], [0, 1]
    if where == "cache":
        caches = [cache[:2] for cache in caches]
    elif where == "pages":
        given["page_table"] = table.int()
    else:
        entries = [2, 0]
        given["cache_batch_idx"] = torch.tensor(entries, dtype=torch.int32, device=device)
    if where == "padding":
        padding = [3, 11]
        given["cache_leftpad"] = torch.tensor(padding, dtype=torch.int32, device=device)
    again = [cache.clone() for cache in caches]
    tables = {"rotary_cos": angle.cos().to(q.dtype), "rotary_sin": angle.sin().to(q.dtype)}
    output, lse, *_ = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, causal=True, attention_chunk=16,
        return_softmax_lse=True, **tables, **given,
    )  # fmt: skip
    # The rows that are there now, and the queries, turned by a call without chunks.
    given.pop("cache_leftpad", None)
    fa3.flash_attn_with_kvcache(
        q, *again, k, v, cache_seqlens=lengths, causal=True, **tables, **given
    )
    for a, b in zip(caches, again):
        assert torch.equal(a, b)
    ones = [torch.zeros(2, 48, 4, 64, device=device, dtype=q.dtype) for _ in range(2)]
    fa3.flash_attn_with_kvcache(
        q, *ones, q, q, cache_seqlens=lengths, causal=True, **tables
    )
    for b in range(2):
        rows = slice(padding[b], lengths[b].item() + seqlen_q)
        turned = ones[0][b, rows][-seqlen_q:]
        dense = [
            (cache[table[b]].flatten(0, 1) if where == "pages" else cache[entries[b]])[rows]
            for cache in caches
        ]
        part = [t[None] for t in (turned, *dense)]
        exact = reference.attention(*(t.double() for t in part), causal=True, chunk=16)
        plain = reference.attention(*part, causal=True, chunk=16)
        reference.check([output[b : b + 1], lse[b : b + 1]], exact, plain)


def test_out_and_compile(device):
    q, k, v = make(device, *[(2, 30, 2, 64)] * 3)
    starts = torch.tensor([0, 25, 60], dtype=torch.int32, device=device)

    def run(q, k, v):
        output = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=8)
        flat = [t.flatten(0, 1) for t in (output, k, v)]
        return fa3.flash_attn_varlen_func(*flat, starts, starts, 35, 35, attention_chunk=8)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(q, k, v), run(q, k, v))
    wanted = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=8)
    for shape, order in (((2, 30, 2, 64), (0, 1, 2, 3)), ((2, 2, 30, 64), (0, 2, 1, 3))):
        out = torch.empty(shape, device=device, dtype=q.dtype).permute(order)
        assert fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=8, out=out) is out
        assert torch.equal(out, wanted)
        torch.compiler.reset()
        write = torch.compile(fa3.flash_attn_func, fullgraph=True, backend="aot_eager")
        write(q, k, v, causal=True, attention_chunk=8, out=out.fill_(float("nan")))
        assert torch.equal(out, wanted)
