"""One query token for each sequence and a cache of keys and values: what bench/gpu.py times of it."""

import dataclasses
import itertools
import math
import random

import torch

import gpu_float8
import gpu_problem

try:
    from flash_attn_interface import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

CHUNK = 512
START = 4.5  # microseconds that a cold call may take beside its bytes' time
APPEND = 1.5  # that an append may add to attention
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
    # E4M3 keys and values, and what has a scale of its own: "head" (of a page, where there are
    # pages) or "token"; "all": queries too, and a head of the whole cache has one
    codes: str = ""
    skewed: bool = False  # lengths from 1 to `keys`, few of them long
    chunks: int = 0  # the last so many sequences have 512 queries, packed with the others' one
    appended: bool = False  # the last key and value are put there first, turned by rotary embedding

    def name(self):
        pages = f", {self.page_size}" if self.page_size else ""
        queries = f" x{self.queries}" if self.queries > 1 else ""
        queries += f" and {self.chunks} x{CHUNK}" if self.chunks else ""
        codes = f" e4m3 {self.codes}" if self.codes else ""
        codes += " appended" if self.appended else ""
        keys = f"1..{self.keys}" if self.skewed else str(self.keys)
        return f"{self.heads}/{self.heads_k}, {self.batch}, {keys}{pages}{queries}{codes}"

    def lengths(self):
        if not self.skewed:
            return [self.keys] * self.batch
        draw = random.Random(self.batch)
        drawn = [int(self.keys * draw.random() ** 3) for _ in range(self.batch)]
        return [max(*lengths) for lengths in zip(drawn, self.query_lengths())]

    def query_lengths(self):
        return [self.queries] * (self.batch - self.chunks) + [CHUNK] * self.chunks

    def cache_bytes(self):
        row = self.head_dim + 4 * (self.codes == "token") if self.codes else 2 * self.head_dim
        return 2 * sum(self.lengths()) * self.heads_k * row

    def share(self):
        """Of the read bandwidth: what a cold call has to have beside START; None: other figures count."""
        if self.queries >= CHUNK or self.chunks or self.appended:
            return None
        if self.codes or self.skewed:
            return 0.88
        return {1: 0.75, 16: 0.90}.get(self.page_size, 0.94)

    def most_microseconds(self, bandwidth):
        return START + 1e6 * self.cache_bytes() / (self.share() * bandwidth)

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
    *[Decode(32, 8, 32, 32768, page_size=size, skewed=True) for size in (16, 64)],
    *[Decode(32, 8, 16, 32768, page_size=size, queries=16, skewed=True) for size in (0, 64)],
    *[Decode(32, 8, *batch, codes="head") for batch in BATCHES],
    Decode(64, 8, 128, 2048, codes="head"),
    *[Decode(32, 8, 32, 8192, codes="token", page_size=size) for size in (0, 16, 64)],
    Decode(32, 8, 32, 32768, codes="head", page_size=64, skewed=True),
    *[
        Decode(32, 8, 1, keys, page_size=size, queries=queries)
        for keys, queries in ((8192, 512), (8192, 2048), (131072, 512))
        for size in (0, 16, 64)
    ],
    Decode(32, 8, 32, 32768, page_size=64, skewed=True, chunks=2),
    Decode(32, 8, 32, 8192, codes="head", queries=8),
    Decode(32, 8, 32, 8192, codes="head", page_size=64, queries=8),
    Decode(32, 8, 32, 32768, codes="head", page_size=64, queries=8, skewed=True),
    *[
        Decode(32, 8, 1, keys, codes="head", page_size=size, queries=queries)
        for keys, queries in ((8192, 512), (8192, 2048), (131072, 512))
        for size in (0, 64)
    ],
    Decode(32, 8, 32, 32768, codes="head", page_size=64, skewed=True, chunks=2),
    *[
        Decode(32, 8, 1, 8192, codes="all", page_size=size, queries=queries)
        for queries in (512, 2048)
        for size in (16, 64)
    ],
    *[
        Decode(32, 8, *batch, page_size=64, appended=True)
        for batch in ((1, 1024), (1, 8192), (32, 8192))
    ],
]


def page_table(shape):
    """Where each page of a sequence is: anywhere among as many pages as there are in all."""
    counts = [math.ceil(length / shape.page_size) for length in shape.lengths()]
    order = torch.randperm(sum(counts), device="cuda").to(torch.int32)
    table = torch.zeros(shape.batch, max(counts), dtype=torch.int32, device="cuda")
    for row, pages in zip(table, order.split(counts)):
        row[: len(pages)] = pages
    return table


def rows_of(cache, tensor, b, length):
    """The first rows of a sequence."""
    if cache["page_table"] is None:
        return tensor[b, :length]
    pages = cache["page_table"][b, : math.ceil(length / tensor.shape[1])]
    return tensor.view(torch.uint8)[pages].view(tensor.dtype).flatten(0, 1)[:length]


def append_call(library, shape, cache, query):
    """A function that queues the append of each sequence's last row; `query` becomes another one,
    turned as the keys are."""
    new = [gpu_problem.random(shape.batch, 1, shape.heads_k, shape.head_dim) for _ in range(2)]
    angles = torch.rand(shape.keys, shape.head_dim // 2, device="cuda")
    return library.append_gpu(
        new_key=new[0],
        new_value=new[1],
        key=cache["key"],
        value=cache["value"],
        seqused_k=cache["seqused_k"] - 1,
        query=gpu_problem.random(*query.shape),
        rotated_query=query,
        rotary_cos=angles.cos().bfloat16(),
        rotary_sin=angles.sin().bfloat16(),
        page_table=cache["page_table"],
    )


def one_cache(library, shape, with_fa3):
    """{name: a function that queues the call}, each checked."""
    causal = max(shape.query_lengths()) > 1
    starts = [0, *itertools.accumulate(shape.query_lengths())]
    query = gpu_problem.random(shape.batch, shape.queries, shape.heads, shape.head_dim)
    options = {}
    if shape.chunks:
        query = gpu_problem.random(starts[-1], shape.heads, shape.head_dim)
        cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device="cuda")
        options = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": CHUNK}
    cache = {"seqused_k": None, "page_table": None, "scales": None}
    entries, rows = shape.batch, shape.keys
    if shape.page_size:
        cache["page_table"] = page_table(shape)
        entries, rows = int(cache["page_table"].max()) + 1, shape.page_size
    for name in ("key", "value"):
        tensor = gpu_problem.random(entries, rows, shape.heads_k, shape.head_dim)
        cache[name] = tensor.to(torch.float8_e4m3fn) if shape.codes else tensor
    if shape.page_size or shape.skewed:
        cache["seqused_k"] = torch.tensor(shape.lengths(), dtype=torch.int32, device="cuda")
    if shape.codes:  # scales of 1, in memory like any
        blocks = (rows,) if shape.codes == "token" else ()
        shapes = (entries, shape.heads_k, *blocks)
        scales = [torch.ones(shapes, device="cuda") for _ in range(2)]
        if shape.codes == "all":
            scales = [scale[:1].expand(entries, -1) for scale in scales]
        cache["scales"] = (None, *scales)
    output = gpu_problem.unwritten(query)
    if shape.codes == "all":
        query = query.to(torch.float8_e4m3fn)
    ours = library.forward_gpu(
        query,
        cache["key"],
        cache["value"],
        output,
        causal=causal,
        query_lengths=tuple(options.values()),
        seqused_k=cache["seqused_k"],
        page_table=cache["page_table"],
        scales=cache["scales"],
        scale_rows=int(shape.codes == "token"),
    )
    found = {"libfa3": (ours, lambda: output)}
    if shape.appended:
        append = append_call(library, shape, cache, query)

        def append_and_attend():
            append()
            ours()

        found["append and attend"] = (append_and_attend, lambda: output)
        found["in one call"] = (library.append_forward(append, ours), lambda: output)
    # The official function takes no packed queries beside a cache.
    if with_fa3 and flash_attn_with_kvcache and not (shape.codes or shape.chunks or shape.appended):
        options |= {"cache_seqlens": cache["seqused_k"], "page_table": cache["page_table"]}
        options = {name: tensor for name, tensor in options.items() if tensor is not None}
        results = []

        def official():
            tensors = (query, cache["key"], cache["value"])
            results[:] = [flash_attn_with_kvcache(*tensors, causal=causal, **options)]

        found["fa3"] = (official, lambda: results[0])
    for kernel, (call, result) in found.items():
        call()
        for b, head in ((0, 0), (shape.batch - 1, shape.heads - 1)):
            kv_head, length = head * shape.heads_k // shape.heads, shape.lengths()[b]
            tensors = (rows_of(cache, cache[name], b, length) for name in ("key", "value"))
            k, v = (tensor[:, kv_head].double() for tensor in tensors)
            some = slice(starts[b], starts[b + 1]) if shape.chunks else b
            queries = query[some][:, head].double()
            rows = torch.arange(len(queries), device="cuda")
            scores = gpu_problem.scores_of(queries, k, rows, causal)
            expected = torch.softmax(scores, dim=1).nan_to_num(0.0) @ v
            bounds = [gpu_float8.LARGEST_ERROR] if shape.codes == "all" else []
            gpu_problem.compare(kernel, result()[some][:, head], expected, *bounds)
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


def misses(cells):
    """What falls short of the least that we accept (docs/notes/hopper-decode.md), one line each."""
    found = []
    for shape, cell in zip(SHAPES, cells):
        hot, cold = cell["hot"], cell["cold"]
        if "fa3" in hot and hot["fa3"] < hot["libfa3"]:
            found.append(f"{shape.name()}: {hot['fa3'] / hot['libfa3']:.3f} of FlashAttention-3, hot")
        if shape.share() is not None:
            most = shape.most_microseconds(cell["read_bandwidth"])
            if cold["libfa3"] > most:
                found.append(f"{shape.name()}: {cold['libfa3']:.1f} us cold, at most {most:.1f}")
        if shape.appended:
            found += [
                f"{shape.name()}: {times['in one call'] - times['libfa3']:.1f} us more {name}"
                for name, times in (("hot", hot), ("cold", cold))
                if times["in one call"] > times["libfa3"] + APPEND
            ]
    return found
