"""One query token for each sequence and a cache of keys and values: what bench/gpu.py times of it."""

import dataclasses
import math

import torch

import gpu_problem

try:
    from flash_attn_interface import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

L2_BYTES = 64 << 20  # more than any Hopper GPU has


@dataclasses.dataclass(frozen=True)
class Decode:
    heads: int
    heads_k: int
    batch: int
    keys: int
    page_size: int = 0  # 0: a dense cache
    queries: int = 1
    head_dim: int = 128

    def name(self):
        pages = f", {self.page_size}" if self.page_size else ""
        queries = f" x{self.queries}" if self.queries > 1 else ""
        return f"{self.heads}/{self.heads_k}, {self.batch}, {self.keys}{pages}{queries}"

    def cache_bytes(self):
        return 2 * 2 * self.batch * self.keys * self.heads_k * self.head_dim

    def caches_beyond_l2(self):
        return max(1, math.ceil(3 * L2_BYTES / self.cache_bytes()))


BATCHES = ((1, 1024), (1, 8192), (1, 131072), (8, 8192), (32, 8192), (64, 4096), (128, 2048))
SHAPES = [
    *[Decode(*heads, *batch) for heads in ((32, 8), (64, 8), (16, 1)) for batch in BATCHES],
    *[Decode(32, 8, *batch, page_size=64) for batch in BATCHES],
    *[Decode(32, 8, 32, 8192, page_size=size) for size in (1, 16, 256)],
    Decode(32, 8, 32, 8192, queries=8),
    Decode(32, 8, 3, 5000),
    Decode(40, 8, 7, 3333, page_size=16),
    Decode(8, 8, 16, 4096),
]


def paged(cache, page_size):
    """The cache in pages that lie anywhere, and where each page of a sequence is."""
    batch, rows = cache.shape[:2]
    pages = batch * rows // page_size
    order = torch.randperm(pages, device="cuda")
    memory = torch.empty_like(cache).view(pages, page_size, *cache.shape[2:])
    memory[order] = cache.reshape(memory.shape)
    return memory, order


def one_cache(library, shape, with_fa3):
    """{name: a function that queues the call}, each checked."""
    rows = shape.keys
    if shape.page_size:
        rows = math.ceil(rows / shape.page_size) * shape.page_size
    query = gpu_problem.random(shape.batch, shape.queries, shape.heads, shape.head_dim)
    key, value = (
        gpu_problem.random(shape.batch, rows, shape.heads_k, shape.head_dim) for _ in range(2)
    )
    used = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda")
    cache = {"key": key, "value": value, "seqused_k": None, "page_table": None}
    if shape.page_size:
        torch.manual_seed(7)
        cache["key"], order = paged(key, shape.page_size)
        torch.manual_seed(7)
        cache["value"], order = paged(value, shape.page_size)
        cache["page_table"] = order.view(shape.batch, -1).to(torch.int32)
        cache["seqused_k"] = used
    output = gpu_problem.unwritten(query)
    ours = library.forward_gpu(
        query,
        cache["key"],
        cache["value"],
        output,
        causal=shape.queries > 1,
        seqused_k=cache["seqused_k"],
        page_table=cache["page_table"],
    )
    found = {"libfa3": (ours, lambda: output)}
    if with_fa3 and flash_attn_with_kvcache:
        options = {"cache_seqlens": cache["seqused_k"], "page_table": cache["page_table"]}
        options = {name: tensor for name, tensor in options.items() if tensor is not None}
        results = []

        def official():
            tensors = (query, cache["key"], cache["value"])
            results[:] = [flash_attn_with_kvcache(*tensors, causal=shape.queries > 1, **options)]

        found["fa3"] = (official, lambda: results[0])
    for name, (call, result) in found.items():
        call()
        for b, head in ((0, 0), (shape.batch - 1, shape.heads - 1)):
            k, v = (t[b, : shape.keys, head * shape.heads_k // shape.heads] for t in (key, value))
            rows = torch.arange(shape.queries, device="cuda")
            scores = gpu_problem.scores_of(query[b, :, head], k, rows, shape.queries > 1)
            expected = torch.softmax(scores, dim=1) @ v.double()
            gpu_problem.compare(name, result()[b, :, head], expected)
    return {name: call for name, (call, _) in found.items()}


def calls(library, shape, caches, with_fa3):
    """{name: a function that queues one call for each of so many caches}."""
    each = [one_cache(library, shape, with_fa3) for _ in range(caches)]

    def all_of(name):
        def call():
            for one in each:
                one[name]()

        return call

    return {name: all_of(name) for name in each[0]}
