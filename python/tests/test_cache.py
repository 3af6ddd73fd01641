"""Caches that grow: appended rows, rotary embedding, pages, combined parts."""

import fa3
import pytest
import reference
import torch


def make(device, *shapes):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def integers(device, values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def rotary_tables(device, positions, width, dtype):
    angles = torch.arange(positions, device=device)[:, None] * 0.3 ** torch.arange(
        width // 2, device=device
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(tensor, cos, sin, position, interleaved):
    """One (heads, head_dim) row at a position, element by element."""
    result = tensor.double().clone()
    half = cos.shape[1]
    for i in range(half):
        x, y = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[position, i].double(), sin[position, i].double()
        a, b = tensor[..., x].double(), tensor[..., y].double()
        result[..., x], result[..., y] = a * c - b * s, a * s + b * c
    return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seqlen_q, new", [(1, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("pages", [False, True])
def test_append(device, causal, interleaved, seqlen_q, new, pages):
    used = [20, 33]
    q, k, v = make(device, (2, seqlen_q, 4, 64), (2, new, 2, 64), (2, new, 2, 64))
    table = integers(device, [[5, 0, 3], [2, 4, 1]]) if pages else None
    k_cache, v_cache = make(device, *[(6, 16, 2, 64) if pages else (2, 48, 2, 64)] * 2)
    cos, sin = rotary_tables(device, 48, 32, q.dtype)

    def rows(cache):
        return cache[table.long()].flatten(1, 2) if pages else cache

    before = rows(k_cache).clone(), rows(v_cache).clone()
    output = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=integers(device, used),
        page_table=table,
        causal=causal,
        rotary_interleaved=interleaved,
    )
    eps = torch.finfo(q.dtype).eps
    for b, length in enumerate(used):
        keys, values = before[0][b].double(), before[1][b].double()
        for i in range(new):
            keys[length + i] = rotated(k[b, i], cos, sin, length + i, interleaved)
            values[length + i] = v[b, i].double()
        assert torch.equal(rows(v_cache)[b].double(), values)
        error = (rows(k_cache)[b].double() - keys).abs().max()
        assert error <= 4 * eps * keys.abs().max()
        assert torch.equal(rows(k_cache)[b][:length].double(), keys[:length])
        queries = torch.stack(
            [
                rotated(q[b, i], cos, sin, length + (i if causal else 0), interleaved)
                for i in range(seqlen_q)
            ]
        )
        part = (queries[None], keys[None, : length + new], values[None, : length + new])
        exact, _ = reference.attention(*part, causal=causal)
        plain, _ = reference.attention(*(t.to(q.dtype) for t in part), causal=causal)
        reference.check([output[b : b + 1]], [exact], [plain])


@pytest.mark.parametrize("behind, moved", [(0, False), (3, False), (3, True)])
def test_append_packed(device, behind, moved):
    """New rows and queries of different numbers per sequence, and some behind that are nobody's; at
    positions of their own, the queries also by starts of their own."""
    used, new = [7, 12, 0], [2, 0, 4]
    starts = integers(device, [0, 2, 2, 6])
    total = 6 + behind
    q, k, v = make(device, (total, 4, 64), (total, 2, 64), (total, 2, 64))
    k_cache, v_cache = make(device, (3, 20, 2, 64), (3, 20, 2, 64))
    cos, sin = rotary_tables(device, 20, 64, q.dtype)
    positions = integers(device, [3, 0, 9]) if moved else None
    output = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=integers(device, used),
        rotary_seqlens=positions,
        cu_seqlens_q=starts.clone() if moved else starts,
        cu_seqlens_k_new=starts,
        max_seqlen_q=4,
        causal=True,
    )
    for b, start in enumerate(starts[:-1].tolist()):
        if not new[b]:
            continue
        one = slice(start, start + new[b])
        caches = [t[b : b + 1].clone() for t in (k_cache, v_cache)]
        alone = fa3.flash_attn_with_kvcache(
            q[None, one],
            *caches,
            k[None, one],
            v[None, one],
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=used[b],
            rotary_seqlens=positions[b : b + 1] if moved else None,
            causal=True,
        )
        for cache, whole in zip(caches, (k_cache, v_cache)):
            assert torch.equal(cache[0], whole[b])
        torch.testing.assert_close(alone[0], output[one])


def test_append_is_declared_to_the_compiler(device):
    q, k, v = make(device, (1, 2, 4, 64), (1, 2, 2, 64), (1, 2, 2, 64))
    caches = make(device, (1, 30, 2, 64), (1, 30, 2, 64))
    again = [cache.clone() for cache in caches]
    lengths = integers(device, [9])

    def step(q, k, v, k_cache, v_cache, out=None):
        return fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, num_splits=0, out=out
        )

    wanted = step(q, k, v, *caches)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(q, k, v, *again)
    assert torch.equal(found, wanted)
    for a, b in zip(caches, again):
        assert torch.equal(a, b)
    out = torch.empty_like(q)
    assert compiled(q, k, v, *again, out) is out and torch.equal(out, wanted)


# What a call may have, each of which says what it needs to of the test below.
FORMS = {
    "plain": {},
    "a length for all": {"cache_seqlens": 17},
    "causal": {"causal": True},
    "one query": {"queries": 1},
    "window": {"window_size": (9, 0), "softcap": 7.0},
    "scale": {"softmax_scale": 0.3, "num_splits": 3},
    "entries": {"cache_batch_idx": [2, 0]},
    "padding": {"cache_leftpad": [5, 0], "causal": True},
    "pages": {"page_table": [[5, 0, 3], [2, 4, 1]], "causal": True},
    "chosen pages": {"page_table": [[5, 0, 3], [2, 4, 1]], "cache_batch_idx": [1, 0]},
    "rotary": {"rotary": 32, "causal": True},
    "rotary of one query": {"rotary": 64, "queries": 1},
    "rotary of halves": {"rotary": 16, "rotary_interleaved": False, "window_size": (20, 0)},
    "positions": {"rotary": 32, "rotary_seqlens": [3, 12], "causal": True},
    "packed": {"packed": True, "causal": True},
    "packed rotary": {"packed": True, "rotary": 32, "causal": True},
    "codes under scales": {"scales": 1, "causal": True},
    "codes with a scale each": {"scales": 48, "rotary": 32, "causal": True},
    "codes of codes": {"scales": 1, "codes": True, "rotary": 32, "causal": True},
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_append_and_attention_are_one_call(device, monkeypatch, form, compiled):
    """And what it does is what the two calls do."""
    options = {"cache_seqlens": [20, 33], "return_softmax_lse": True, **FORMS[form]}
    queries, width = options.pop("queries", 3), options.pop("rotary", 0)
    scales, codes = options.pop("scales", 0), options.pop("codes", False)
    entries = 3 if "cache_batch_idx" in options else 2
    shape = (6, 16, 2, 64) if "page_table" in options else (entries, 48, 2, 64)
    q, k, v, *caches = make(device, (2, queries, 4, 64), *[(2, queries, 2, 64)] * 2, shape, shape)
    if scales:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
        q, k, v = (t.to(caches[0].dtype if codes else torch.bfloat16) for t in (q, k, v))
        shape = (2, 2) if scales == 1 else (2, 2, scales)
        for name in ("k_descale", "v_descale"):
            options[name] = torch.rand(shape, device=device) + 0.5
    if width:
        tables = rotary_tables(device, 48, width, torch.float32 if codes else q.dtype)
        options |= dict(zip(("rotary_cos", "rotary_sin"), tables))
    for name, given in options.items():
        if isinstance(given, list):
            options[name] = integers(device, given)
    if options.pop("packed", False):
        starts = integers(device, [0, queries, 2 * queries])
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": queries}
    scales = [given for name, given in options.items() if "descale" in name]
    written = [*caches, *scales]
    before = [tensor.clone() for tensor in written]
    calls, one_call = [], fa3._core.append_forward

    def counted(append, forward):
        calls.append(append)
        one_call(append, forward)

    def two_calls(append, forward):
        fa3._core.append(**append)
        fa3._core.forward(**forward)

    def step(q, caches, k, v, options):
        return fa3.flash_attn_with_kvcache(q, *caches, k, v, **options)

    found = []
    for call in (counted, two_calls):
        monkeypatch.setattr(fa3._core, "append_forward", call)
        for tensor, old in zip(written, before):
            tensor.copy_(old)
        torch.compiler.reset()
        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        with reference.fp8_cache(device):
            results = run(q, caches, k, v, options)
        assert not torch.equal(caches[0].view(torch.uint8), before[0].view(torch.uint8))
        found.append([*results, *(tensor.clone() for tensor in written)])
    assert len(calls) == 1
    if "cu_seqlens_q" in options:
        assert calls[0]["max_seqlen_q"] == queries  # not of all sequences together
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_strided_queries_and_new_rows(device):
    """Tensors whose last dimension is not contiguous give what contiguous ones do."""
    q, k, v, *caches = make(device, (1, 2, 4, 64), *[(1, 2, 2, 64)] * 2, *[(1, 30, 2, 64)] * 2)
    cos, sin = rotary_tables(device, 30, 32, q.dtype)
    results = []
    for strided in (False, True):
        new = [t.transpose(2, 3).contiguous().transpose(2, 3) if strided else t for t in (q, k, v)]
        tables = [t.T.contiguous().T if strided else t for t in (cos, sin)]
        copies = [cache.clone() for cache in caches]
        options = {"cache_seqlens": 5, "rotary_cos": tables[0], "rotary_sin": tables[1]}
        output = fa3.flash_attn_with_kvcache(new[0], *copies, *new[1:], causal=True, **options)
        results.append([output, *copies])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_what_is_refused_appends_nothing(device):
    q, k, v, *caches = make(device, (1, 2, 4, 64), *[(1, 2, 2, 64)] * 2, *[(1, 30, 2, 64)] * 2)
    before = [cache.clone() for cache in caches]
    for wrong in (
        {"softcap": -1.0},
        {"softmax_scale": float("nan")},
        {"out": torch.empty_like(k)},
        {"s_aux": torch.zeros(3, device=device)},
        {"num_splits": -1},
        {"window_size": (-5, 2), "cache_leftpad": torch.zeros(2, dtype=torch.int32, device=device)},
    ):
        with pytest.raises(ValueError):
            fa3.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3, **wrong)
    for wrong, error in (
        ({"attention_chunk": -1}, ValueError),
        ({"attention_chunk": 8, "out": torch.empty_like(k)}, ValueError),
        ({"attention_chunk": 8, "out": 3}, TypeError),
    ):
        with pytest.raises(error, match="attention_chunk|out"):
            fa3.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3, **wrong)
    for a, b in zip(caches, before):
        assert torch.equal(a, b)


def test_what_two_calls_refuse_appends_nothing(device):
    """What would be said only by attention, which runs after the append there."""
    q, k, v, *caches = make(device, (1, 2, 4, 64), *[(1, 2, 2, 64)] * 2, *[(1, 30, 2, 64)] * 2)
    codes = [torch.zeros_like(cache).to(torch.float8_e4m3fn) for cache in caches]
    scale = torch.ones(1, 2, 3, device=device)
    with pytest.raises(NotImplementedError, match="blocks"):
        fa3.flash_attn_with_kvcache(
            q, *codes, k, v, cache_seqlens=3, k_descale=scale, v_descale=scale, attention_chunk=8
        )
    assert not any(cache.float().any() for cache in codes)
    caches = [cache.float() for cache in caches]
    before = [cache.clone() for cache in caches]
    with torch.autocast(device, torch.bfloat16), pytest.raises(ValueError, match="out"):
        fa3.flash_attn_with_kvcache(
            q.float(), *caches, k.float(), v.float(), cache_seqlens=3, out=torch.empty_like(k)
        )
    for a, b in zip(caches, before):
        assert torch.equal(a, b)


def test_combine(device):
    q, k, v = make(device, (2, 5, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    exact = reference.attention(*(t.double() for t in (q, k, v)))
    plain = reference.attention(q, k, v)
    parts = [
        fa3.flash_attn_func(q, k[:, rows], v[:, rows], return_attn_probs=True)
        for rows in (slice(0, 30), slice(30, 80), slice(80, 90))
    ]
    output = torch.stack([output.float() for output, _ in parts])
    lse = torch.stack([lse for _, lse in parts]).transpose(-1, -2)
    found, found_lse = fa3.flash_attn_combine(output, lse, out_dtype=q.dtype)
    assert found.dtype == q.dtype
    # Each part was rounded once more.
    error, allowed = (found.double() - exact[0]).abs().max(), (plain[0] - exact[0]).abs().max()
    assert error <= 4 * allowed + 1e-5
    assert (found_lse.transpose(1, 2) - exact[1]).abs().max() <= 1e-4 + 4 * (plain[1] - exact[1]).abs().max()


def test_errors():
    q, k, v = make("cpu", (1, 2, 4, 64), (1, 2, 2, 64), (1, 2, 2, 64))
    caches = make("cpu", (1, 30, 2, 64), (1, 30, 2, 64))
    with pytest.raises(ValueError, match="cache_seqlens"):
        fa3.flash_attn_with_kvcache(q, *caches, k, v)
    with pytest.raises(ValueError):  # no room
        fa3.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=29)
    with pytest.raises(ValueError, match="contiguous"):
        fa3.flash_attn_with_kvcache(q, caches[0].transpose(1, 3), caches[1])


def test_page_table_of_chosen_entries(device):
    """cache_batch_idx chooses rows of the page table, as it chooses entries of a dense cache."""
    q, k_cache, v_cache = make(device, (2, 3, 4, 64), (12, 8, 2, 64), (12, 8, 2, 64))
    table = torch.randperm(12, dtype=torch.int32, device=device).view(4, 3)
    chosen, lengths = integers(device, [3, 0]), integers(device, [20, 9])
    options = {"cache_seqlens": lengths, "causal": True}
    found = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_batch_idx=chosen, page_table=table, **options
    )
    dense = [cache[table.long()].flatten(1, 2) for cache in (k_cache, v_cache)]
    wanted = fa3.flash_attn_with_kvcache(q, *dense, cache_batch_idx=chosen, **options)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("options", [
    {"causal": True, "num_splits": 3},
    {"window_size": torch.tensor([9, 4]), "num_splits": 0},
    {"softcap": 5.0, "softmax_scale": 0.3, "sm_margin": 4, "pack_gqa": True},
    {"s_aux": torch.linspace(-1, 1, 4)},
])
def test_append_with_padding_and_other_positions(device, options):
    """New rows behind padded ones, in chosen entries, turned by positions that are not the rows'."""
    entries, used, padding = integers(device, [4, 1]), [11, 24], integers(device, [3, 0])
    q, k, v = make(device, (2, 2, 4, 32), (2, 2, 2, 32), (2, 2, 2, 32))
    k_cache, v_cache = make(device, (5, 40, 2, 32), (5, 40, 2, 32))
    cos, sin = rotary_tables(device, 40, 16, q.dtype)
    positions = integers(device, [5, 30])
    if "s_aux" in options:
        options = {"s_aux": options["s_aux"].to(device)}
    keys, values = k_cache.clone(), v_cache.clone()
    output, lse, *empty = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=integers(device, used),
        cache_batch_idx=entries,
        cache_leftpad=padding,
        rotary_seqlens=positions,
        return_softmax_lse=True,
        **options,
    )
    assert lse.shape == (2, 4, 2) and [t.numel() for t in empty] == [0, 0]
    window = tuple(options.get("window_size", torch.tensor([-1, -1])).tolist())
    advance = options.get("causal", False) or window != (-1, -1)
    for b, (entry, length) in enumerate(zip(entries.tolist(), used)):
        for i in range(2):
            keys[entry, length + i] = rotated(k[b, i], cos, sin, positions[b] + i, True)
            values[entry, length + i] = v[b, i]
        turned = [rotated(q[b, i], cos, sin, positions[b] + advance * i, True) for i in range(2)]
        rows = slice(padding[b], length + 2)
        part = (torch.stack(turned)[None], keys[entry, rows][None], values[entry, rows][None])
        masks = {
            "causal": options.get("causal", False),
            "window": window,
            "softcap": options.get("softcap", 0.0),
            "scale": options.get("softmax_scale"),
            "sink": options.get("s_aux"),
        }
        exact = reference.attention(*(t.double() for t in part), **masks)
        plain = reference.attention(*(t.to(q.dtype) for t in part), **masks)
        reference.check([output[b : b + 1], lse[b : b + 1]], exact, plain)
    torch.testing.assert_close(k_cache, keys)
    assert torch.equal(v_cache, values)


def test_metadata_is_planned_by_the_call(device):
    """get_scheduler_metadata's result goes into the call, and may come again."""
    q, k_cache, v_cache = make(device, (2, 1, 4, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    lengths = integers(device, [30, 7])
    metadata = fa3.get_scheduler_metadata(
        2, 1, 30, 4, 2, 64, lengths, q.dtype, headdim_v=64, causal=True, num_splits=0
    )
    assert metadata.dtype == torch.int32 and metadata.device == lengths.device
    call = [
        fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True, scheduler_metadata=plan
        )
        for plan in (None, metadata, metadata)
    ]
    assert torch.equal(call[0], call[1]) and torch.equal(call[0], call[2])


@pytest.mark.parametrize("rotary", [False, True])
def test_opcheck_of_append(device, rotary):
    q, k, v = make(device, (1, 2, 4, 64), (1, 2, 2, 64), (1, 2, 2, 64))
    caches = make(device, (1, 30, 2, 64), (1, 30, 2, 64))
    options = {}
    if rotary:
        cos, sin = rotary_tables(device, 30, 32, q.dtype)
        options = {"query": q, "rotary_cos": cos, "rotary_sin": sin}
    lengths = integers(device, [9])
    torch.library.opcheck(
        torch.ops.fa3.append.default, (k, v, lengths, *caches, None, None), options
    )
    options = {f"append_{name}": given for name, given in options.items()}
    for output in (None, torch.empty_like(q)):
        torch.library.opcheck(
            torch.ops.fa3.append_forward.default,
            (k, v, lengths, q, *caches, output, None, None),
            {**options, "seqused_k": lengths + 2},
        )


def test_combine_takes_strided_parts(device):
    """Parts as the official test has them: transposed, and some of a larger tensor's."""
    outputs = torch.randn(10, 2, 4, 7, 64, device=device).transpose(2, 3)[:5]
    lse = torch.randn(5, 2, 8, 7, device=device).transpose(-1, -2)[..., :4]
    lse[2:, :1] = float("-inf")
    out = torch.full((2, 7, 4, 64), float("nan"), device=device)
    found, found_lse = fa3.flash_attn_combine(outputs, lse, out=out)
    assert found is out
    weights = torch.softmax(lse.double(), 0)
    wanted = (weights[..., None] * outputs).sum(0)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse.double(), lse.double().logsumexp(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("scales", ["heads", "rows"])
def test_fp8_cache(device, pages, scales):
    """New rows become codes: under scales that are given for each sequence's heads, or under
    one that is written for each row. Attention is that of codes times scales."""
    used, new = [13, 30], 2
    q, k, v = make(device, (2, 2, 4, 64), (2, new, 2, 64), (2, new, 2, 64))
    q = q.bfloat16()
    table = integers(device, [[5, 0, 3, -1], [2, 4, 1, 6]]) if pages else None
    shape = (7, 8, 2) if pages else (2, 32, 2)
    caches = [
        (3 * torch.randn(*shape, 64, device=device)).to(torch.float8_e4m3fn) for _ in range(2)
    ]
    if scales == "heads":
        descales = [torch.rand(2, 2, device=device) / 8 + 0.01 for _ in range(2)]
        given = descales
        factors = [descale[:, None, :, None].expand(2, 32, 2, 1) for descale in descales]
    else:
        given = [torch.rand(shape, device=device) / 8 + 0.01 for _ in range(2)]
        descales = [rows.transpose(1, 2) for rows in given]

    def rows(cache):
        return cache[table.clamp(min=0).long()].flatten(1, 2) if pages else cache

    before = [rows(cache.float()) for cache in caches]
    with reference.fp8_cache(device):
        output = fa3.flash_attn_with_kvcache(
            q,
            *caches,
            k.bfloat16(),
            v.bfloat16(),
            cache_seqlens=integers(device, used),
            page_table=table,
            k_descale=descales[0],
            v_descale=descales[1],
            causal=True,
        )
    if scales == "rows":
        factors = [rows(scale[..., None]) for scale in given]
    for b, length in enumerate(used):
        part = []
        for cache, old, fresh, factor in zip(caches, before, (k, v), factors):
            found = rows(cache.float())[b]
            assert torch.equal(found[:length], old[b, :length])
            written, factor = found[length : length + new], factor[b, : length + new]
            fresh = fresh[b].bfloat16().float()
            if scales == "rows":
                largest = fresh.abs().amax(-1, keepdim=True) / 448
                torch.testing.assert_close(factor[length:], largest)
            # Half a step of a code of 4 bits.
            error = (written * factor[length:] - fresh).abs()
            assert (error <= 2**-4 * fresh.abs() + 2**-10 * factor[length:]).all()
            part.append((found[: length + new] * factor)[None])
        one = q[b : b + 1]
        exact, _ = reference.attention(one.double(), *(t.double() for t in part), causal=True)
        plain, _ = reference.attention(one, *(t.bfloat16() for t in part), causal=True)
        reference.check([output[b : b + 1]], [exact], [plain])


def test_scales_of_blocks_under_compile(device):
    """Whose number may be symbolic, as the sizes of the cache."""
    q, *caches = make(device, (2, 1, 4, 64), *[(2, 48, 2, 64)] * 2)
    q, caches = q.bfloat16(), [cache.to(torch.float8_e4m3fn) for cache in caches]
    lengths = integers(device, [20, 33])

    def step(q, k_cache, v_cache, scale):
        return fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, k_descale=scale, v_descale=scale
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for blocks in (4, 6):
        scale = torch.rand(2, 2, blocks, device=device) + 0.5
        with reference.fp8_cache(device):
            assert torch.equal(compiled(q, *caches, scale), step(q, *caches, scale))


def test_scales_of_shared_pages():
    """Codes of a page have one scale, whichever sequence reads them."""
    q = torch.randn(2, 1, 4, 64).bfloat16()
    pages = [torch.randn(4, 8, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    options = {"cache_seqlens": integers("cpu", [9, 12])}
    scale = torch.tensor([[0.5, 2.0], [0.5, 1.0]])
    table = integers("cpu", [[3, 1, 9], [3, 0, -1]])
    outputs = [
        fa3.flash_attn_with_kvcache(q, *pages, page_table=table, k_descale=same, **options)
        for same in (scale[:1].expand(2, 2), scale[:1].repeat(2, 1))
    ]
    assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="share a page"):
        fa3.flash_attn_with_kvcache(q, *pages, page_table=table, k_descale=scale, **options)
    table = integers("cpu", [[3, 1, 0], [2, 0, -1]])  # only what is past a length is shared
    fa3.flash_attn_with_kvcache(q, *pages, page_table=table, k_descale=scale, **options)


def test_scales_of_shared_entries():
    """And so have those of an entry of a cache that is not in pages."""
    q = torch.randn(3, 1, 4, 64).bfloat16()
    caches = [torch.randn(4, 8, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    options = {"cache_batch_idx": integers("cpu", [2, 0, 2])}
    scale = torch.tensor([[0.5, 2.0], [3.0, 1.0], [0.5, 1.0]])
    same = scale[[0, 1, 0]]
    shared = fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=8, v_descale=same, **options)
    apart = [cache[[2, 0, 2]] for cache in caches]
    assert torch.equal(shared, fa3.flash_attn_with_kvcache(q, *apart, cache_seqlens=8, v_descale=same))
    with pytest.raises(ValueError, match="value_scale.* share an entry"):
        fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=8, v_descale=scale, **options)
    used = integers("cpu", [8, 8, 0])  # a sequence without rows reads no entry
    fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=used, v_descale=scale, **options)
    with pytest.raises(ValueError, match="value_scale"):
        fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=8, v_descale=scale[:2], **options)


@pytest.mark.parametrize("blocks", [0, 2])
def test_fp8_pages_of_packed_queries(device, blocks):
    """Scales of sequences, and of blocks of a page's rows, are those of flash_attn_with_kvcache."""
    q = torch.randn(6, 4, 64, device=device).bfloat16()
    pages = [torch.randn(5, 16, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    shape = (5, 2, blocks) if blocks else (2, 2)
    options = {name: torch.rand(shape, device=device) + 0.5 for name in ("k_descale", "v_descale")}
    options["page_table"] = integers(device, [[1, 4], [0, 7]])
    starts, used = integers(device, [0, 2, 6]), integers(device, [30, 16])
    with reference.fp8_cache(device):
        wanted = fa3.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=used, cu_seqlens_q=starts, max_seqlen_q=4, num_splits=1, **options
        )
    if blocks:
        options["scale_rows"] = (0, 8, 8)
    found = fa3.flash_attn_varlen_func(
        q, *pages, starts, None, 4, 32, seqused_k=used, **options
    )
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="key_scale"):
        options["k_descale"] = torch.ones(*(4, 2, 2)[: len(shape)], device=device)
        fa3.flash_attn_varlen_func(q, *pages, starts, None, 4, 32, seqused_k=used, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_fp8_rows_are_turned(device, causal):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in make(device, *[(1, 2, 2, 64)] * 3))
    caches = [torch.zeros(1, 20, 2, 64, device=device).to(q.dtype) for _ in range(2)]
    cos, sin = rotary_tables(device, 20, 32, q.dtype)
    with reference.fp8_cache(device):
        output = fa3.flash_attn_with_kvcache(
            q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=4, causal=causal
        )
    tables = cos.float(), sin.float()
    keys, queries = [
        torch.stack([rotated(t[0, i].float(), *tables, 4 + step * i, True) for i in range(2)])[None]
        for t, step in ((k, 1), (q, int(causal)))
    ]
    assert torch.equal(caches[0][:, 4:6].float(), keys.to(torch.float8_e4m3fn).float())
    rows = [cache[:, :6].float() for cache in caches]
    turned = queries.to(torch.float8_e4m3fn).float()
    exact, _ = reference.attention(turned.double(), *(t.double() for t in rows), causal=causal)
    # What E4M3 probabilities, of 4 bits, may do to the output.
    assert (output - exact).abs().max() <= 2**-4 * rows[1].abs().max()


def test_fp8_rows_are_copied_into_an_fp8_cache(device):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in make(device, *[(2, 3, 2, 64)] * 3))
    caches = [torch.zeros(3, 20, 2, 64, device=device).to(q.dtype) for _ in range(2)]
    descales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    with reference.fp8_cache(device):
        output = fa3.flash_attn_with_kvcache(
            q,
            *caches,
            k,
            v,
            cache_seqlens=0,
            cache_batch_idx=integers(device, [2, 0]),
            q_descale=descales[0],
            k_descale=descales[1],
            v_descale=descales[2],
            causal=True,
        )
    assert output.dtype == torch.bfloat16
    for cache, fresh in zip(caches, (k, v)):
        assert torch.equal(cache.float()[[2, 0], :3], fresh.float())
    wanted = fa3.flash_attn_func(q, k, v, None, True, None, *descales)
    torch.testing.assert_close(output, wanted)
    with pytest.raises(ValueError, match="blocks"):
        scale = torch.ones(3, 2, 7, device=device)
        fa3.flash_attn_with_kvcache(q, *caches, k_descale=scale, cache_seqlens=3)
