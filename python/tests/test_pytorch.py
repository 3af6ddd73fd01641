"""What PyTorch does around a call: gradcheck, opcheck, compile, graphs, autocast, threads, fork."""

import concurrent.futures
import functools
import multiprocessing

import fa3
import pytest
import torch
from fa3.options import options_of


def tensors(device="cpu", dtype=None, seqlen=9, requires_grad=True):
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    shapes = [(2, seqlen, 4, 64), (2, seqlen, 2, 64), (2, seqlen, 2, 64), (4,)]
    return [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=requires_grad)
        for shape in shapes
    ]


def test_gradcheck():
    q, k, v, sink = tensors(seqlen=4)
    q, k, v = (t[:1, ..., :8].detach().requires_grad_() for t in (q, k, v))

    def run(q, k, v, sink):
        return fa3.flash_attn_func(q, k, v, causal=True, s_aux=sink, return_attn_probs=True)

    # In float32: differences over 1e-2 lose half of its digits.
    assert torch.autograd.gradcheck(run, (q, k, v, sink), eps=1e-2, atol=2e-3, rtol=1e-2)


def operator_arguments(device):
    q, k, v, sink = tensors(device)
    options = options_of(q, None, True, (5, 0), 3.0)
    return (q, k, v, sink), options


def test_opcheck(device):
    arguments, options = operator_arguments(device)
    torch.library.opcheck(torch.ops.fa3.forward.default, arguments, options)
    q, k, v, sink = (t.detach() for t in arguments)
    output, lse = torch.ops.fa3.forward(q, k, v, sink, **options)
    torch.library.opcheck(
        torch.ops.fa3.forward_into.default, (q, k, v, torch.empty_like(q), sink), options
    )
    gradients = torch.randn_like(output), torch.randn_like(lse)
    backward = q, k, v, output, lse, *gradients, sink
    torch.library.opcheck(torch.ops.fa3.backward.default, backward, options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(device, backend):
    q, k, v, sink = tensors(device)

    def model(q, k, v, sink):
        output = fa3.flash_attn_func(q * 2, k, v, causal=True, s_aux=sink)
        starts = torch.arange(0, 3 * q.shape[1], q.shape[1], dtype=torch.int32, device=device)
        flat = [t.flatten(0, 1) for t in (output, k, v)]
        length = q.shape[1]
        return fa3.flash_attn_varlen_func(*flat, starts, starts, length, length).square().sum()

    wanted = torch.autograd.grad(model(q, k, v, sink), (q, k, v, sink))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(q, k, v, sink), (q, k, v, sink))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)
    # Another length, which may be symbolic.
    q, k, v, sink = tensors(device, seqlen=14)
    torch.testing.assert_close(compiled(q, k, v, sink), model(q, k, v, sink))


def test_export(device):
    q, k, v, _ = tensors(device, requires_grad=False)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fa3.flash_attn_func(q, k, v, causal=True)

    exported = torch.export.export(Model(), (q, k, v)).module()
    assert torch.equal(exported(q, k, v), fa3.flash_attn_func(q, k, v, causal=True))


def test_fake_tensors():
    """Shapes without numbers, of a call that looks at numbers where there are some."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        q, k, v = torch.zeros(2, 1, 4, 64), *torch.zeros(2, 2, 1, 2, 64)
        caches = [torch.zeros(6, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
        options = {"page_table": torch.zeros(3, 2, dtype=torch.int32), "cache_seqlens": 5}
        options |= {"cache_batch_idx": torch.zeros(2, dtype=torch.int32), "causal": True}
        options |= {"rotary_cos": torch.zeros(32, 8), "rotary_sin": torch.zeros(32, 8)}
        options |= {"k_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 2)}
        output, lse, *_ = fa3.flash_attn_with_kvcache(
            q.bfloat16(), *caches, k.bfloat16(), v.bfloat16(), return_softmax_lse=True, **options
        )
        assert output.shape == (2, 1, 4, 64) and output.dtype == torch.bfloat16
        assert lse.shape == (2, 4, 1)


def test_trace(device):
    """A graph that records operators has the call, not one result of it."""
    q, k, v, _ = tensors(device, requires_grad=False)

    def run(q, k, v):
        return fa3.flash_attn_func(q, k, v, causal=True)

    traced = torch.jit.trace(run, (q, k, v))
    assert torch.equal(traced(2 * q, k, v), run(2 * q, k, v))


def test_autocast(device):
    q, k, v, _ = tensors(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        output = fa3.flash_attn_func(q, k, v)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_autocast_of_a_cache(device, dtype, chunk):
    """New rows are cast as queries are; a cache stays what it is, and codes have their scales."""
    q, k, v, _ = (t.detach() for t in tensors(device, torch.float32, seqlen=1))
    caches = [torch.zeros(2, 8, 2, 64, device=device).to(dtype) for _ in range(2)]
    options = {"cache_seqlens": torch.full((2,), 3, dtype=torch.int32, device=device)}
    options["attention_chunk"] = chunk
    if dtype is torch.float8_e4m3fn:
        options |= {name: torch.full((2, 2), 0.5, device=device) for name in ("k_descale", "v_descale")}
    again = [cache.clone() for cache in caches]
    half = [t.bfloat16() for t in (q, k, v)]
    if dtype is torch.float32:
        wanted = fa3.flash_attn_with_kvcache(half[0], *(t.bfloat16() for t in again), *half[1:], **options)
    else:
        wanted = fa3.flash_attn_with_kvcache(half[0], *again, *half[1:], **options)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = fa3.flash_attn_with_kvcache(q, *caches, k, v, **options)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted)
        options["cache_seqlens"] += 1
        torch.testing.assert_close(fa3.flash_attn_with_kvcache(q, *caches, **options), wanted)
    assert caches[0].dtype == dtype and caches[0][:, 3].float().abs().sum() > 0


def test_modes(device):
    """Autocast in autocast, inference mode, deterministic algorithms."""
    q, k, v, sink = tensors(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.autocast(device, dtype=torch.float16):
            assert fa3.flash_attn_func(q, k, v).dtype == torch.float16
        with torch.autocast(device, enabled=False):
            half = [t.half() for t in (q, k, v)]
            assert fa3.flash_attn_func(*half, s_aux=sink).dtype == torch.float16
        assert fa3.flash_attn_func(q, k, v, s_aux=sink).dtype == torch.bfloat16
    q, k, v, sink = tensors(device)
    wanted = fa3.flash_attn_func(q, k, v, s_aux=sink)
    with torch.inference_mode():
        found = fa3.flash_attn_func(q, k, v, s_aux=sink, out=torch.empty_like(q))
        assert found.is_inference() and torch.equal(found, wanted)
    torch.use_deterministic_algorithms(True)
    try:
        fa3.flash_attn_func(q, k, v, s_aux=sink).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert q.grad is not None and sink.grad is not None


def test_parameters_and_subclasses(device):
    q, k, v, _ = tensors(device)
    wanted = fa3.flash_attn_func(q, k, v)
    parameter = torch.nn.Parameter(q.detach())
    found = fa3.flash_attn_func(parameter, k, v)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert parameter.grad is not None


def test_transforms(device):
    """torch.func's grad and vmap, and autograd's many gradients at once."""
    q, k, v, sink = tensors(device)
    options = {"causal": True, "s_aux": sink.detach()}

    def loss(q, k, v):
        return fa3.flash_attn_func(q, k, v, **options).square().sum()

    plain = [t.detach() for t in (q, k, v)]
    wanted = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*plain), wanted):
        torch.testing.assert_close(a, b)
    per_entry = torch.vmap(torch.func.grad(lambda *t: loss(*(x[None] for x in t))))(*plain)
    torch.testing.assert_close(per_entry, wanted[0])
    out = torch.empty_like(q).detach()
    torch.vmap(lambda q, k, v, out: fa3.flash_attn_func(q, k, v, out=out, **options))(
        *(t.unflatten(0, (2, 1)) for t in (*plain, out))
    )
    output = fa3.flash_attn_func(q, k, v, **options)
    torch.testing.assert_close(out, output)
    with pytest.raises(ValueError, match="out"):
        torch.vmap(lambda q: fa3.flash_attn_func(q, k[:1], v[:1], out=out[:1]))(plain[0][:, None])
    many = torch.randn(3, *output.shape, device=device, dtype=output.dtype)
    found = torch.autograd.grad(output, (q, v), many, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(many):
        wanted = torch.autograd.grad(output, (q, v), one, retain_graph=True)
        for a, b in zip(found, wanted):
            torch.testing.assert_close(a[i], b)


def test_compile_of_what_is_beside_attention(device):
    """fa3.quantize and flash_attn_combine have fakes, so whole graphs may hold them."""
    x = torch.randn(2, 20, 3, 32, device=device)
    partial = torch.randn(3, 2, 5, 4, 64, device=device), torch.randn(3, 2, 5, 4, device=device)

    def run(x, output, lse):
        codes, scale = fa3.quantize(x * 2, 8, rotate=True, seed=2**64 - 1)
        return codes.float(), scale, *fa3.flash_attn_combine(output, lse)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x, *partial), run(x, *partial)):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    torch.library.opcheck(torch.ops.fa3.quantize.default, (x, 8))
    torch.library.opcheck(torch.ops.fa3.combine.default, partial)


def test_checkpoint(device):
    from torch.utils.checkpoint import checkpoint

    q, k, v, _ = tensors(device)
    wanted = torch.autograd.grad(fa3.flash_attn_func(q, k, v).square().sum(), (q, k, v))
    output = checkpoint(fa3.flash_attn_func, q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(output.square().sum(), (q, k, v)), wanted):
        assert torch.equal(a, b)


def test_threads(device):
    calls = [tensors(device, seqlen=40 + i) for i in range(8)]

    def run(call):
        q, k, v, sink = call
        output = fa3.flash_attn_func(q, k, v, causal=True, s_aux=sink)
        return [output, *torch.autograd.grad(output.sum(), (q, k, v, sink))]

    wanted = [run(call) for call in calls]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(run, calls * 5), wanted * 5):
            for a, b in zip(found, expected):
                assert torch.equal(a, b)


def in_child(queue, arrays):
    q, k, v = (torch.from_numpy(array) for array in arrays)
    queue.put(fa3.flash_attn_func(q, k, v, causal=True).numpy())


def test_fork():
    q, k, v, _ = tensors(requires_grad=False, seqlen=200)
    wanted = fa3.flash_attn_func(q, k, v, causal=True)  # the parent's threads exist now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue, [t.numpy() for t in (q, k, v)]))
    child.start()
    try:
        found = queue.get(timeout=60)
        child.join(timeout=60)
        assert child.exitcode == 0
    finally:
        child.kill()
    assert (found == wanted.numpy()).all()


def test_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    q, k, v, _ = tensors("cuda", seqlen=300)

    def run():
        output = fa3.flash_attn_func(q, k, v, causal=True)
        return [output, *torch.autograd.grad(output, (q, k, v), torch.ones_like(output))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for a, b in zip(found, run()):
        assert torch.equal(a, b)


def test_cuda_graph_of_a_cache():
    """A decoding step, captured once, that replays with lengths which grow on the device."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(2, 1, 8, 128), make(2, 1, 2, 128), make(2, 1, 2, 128)
    caches = [make(24, 16, 2, 128) for _ in range(2)]
    table = torch.randperm(24, dtype=torch.int32, device="cuda").view(2, 12)
    tables = make(192, 32), make(192, 32)
    lengths = torch.tensor([100, 37], dtype=torch.int32, device="cuda")

    def step(caches, lengths):
        return fa3.flash_attn_with_kvcache(
            q,
            *caches,
            k,
            v,
            rotary_cos=tables[0],
            rotary_sin=tables[1],
            cache_seqlens=lengths,
            page_table=table,
            causal=True,
        )

    again, lengths_again = [cache.clone() for cache in caches], lengths.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step([cache.clone() for cache in caches], lengths)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(caches, lengths)
        lengths += 1
    for _ in range(20):
        for tensor in (q, k, v):
            tensor.normal_()
        graph.replay()
        assert torch.equal(found, step(again, lengths_again))
        lengths_again += 1
        for a, b in zip(caches, again):
            assert torch.equal(a, b)


def test_streams():
    """Work goes to the current stream, and the memory that a call used to that stream's pool."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    q, k, v, _ = tensors("cuda", seqlen=300, requires_grad=False)
    wanted = fa3.flash_attn_func(q, k, v)
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            late = q.clone()
            found = fa3.flash_attn_func(late, k, v)
        side.synchronize()
        assert torch.equal(found, wanted)


def test_memory_of_streams():
    """A block that a call works in is no other stream's before the call is done with it."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    q, k, v, _ = tensors("cuda", seqlen=2000)

    def run():
        output = fa3.flash_attn_func(q, k, v, causal=True)
        return [output, *torch.autograd.grad(output, (q, k, v), output.detach())]

    wanted = run()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        with torch.cuda.stream(first):
            torch.cuda._sleep(1_000_000)
            results.append(run())
        with torch.cuda.stream(second):
            for size in (1 << 16, 1 << 20, 1 << 24):
                torch.full((size,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    for found in results:
        for a, b in zip(found, wanted):
            assert torch.equal(a, b)


def test_cuda_graph_of_two_streams():
    """Two calls beside each other in one graph do not share what they work in."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    calls = [[t.detach() for t in tensors("cuda", seqlen=900 + i)[:3]] for i in range(2)]
    wanted = [fa3.flash_attn_func(*call, causal=True, num_splits=4) for call in calls]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = fa3.flash_attn_func(*calls[1], causal=True, num_splits=4)
        first = fa3.flash_attn_func(*calls[0], causal=True, num_splits=4)
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(5):
        first.zero_(), second.zero_()
        graph.replay()
        assert torch.equal(first, wanted[0]) and torch.equal(second, wanted[1])


def test_second_gpu():
    """Tensors say where work runs, whatever the current device is; two GPUs don't mix."""
    if torch.cuda.device_count() < 2:
        pytest.skip("no two GPUs here")
    first = tensors("cuda:0", torch.bfloat16, seqlen=300)
    second = [t.detach().to("cuda:1").requires_grad_() for t in first]

    def run(q, k, v, sink):
        output = fa3.flash_attn_func(q, k, v, causal=True, s_aux=sink)
        return [output, *torch.autograd.grad(output.sum(), (q, k, v, sink))]

    for a, b in zip(run(*first), run(*second)):
        assert b.device.index == 1 and torch.equal(a, b.to(a.device))
    with pytest.raises(ValueError, match="key is on CUDA device 1"):
        fa3.flash_attn_func(first[0], second[1], second[2])
