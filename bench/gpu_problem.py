"""One attention problem on the GPU: its tensors, the calls of each kernel that solve it, and the
comparison with float64 that comes before any timing."""

import functools
import math

import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

try:  # the official FlashAttention-3, where the person running this has installed it
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
except ImportError:
    flash_attn_func = flash_attn_varlen_func = None

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
LARGEST_ERROR = 6e-3  # bfloat16 rounds by up to 3.9e-3
ROWS_AT_ONCE = 2048
attention = torch.nn.functional.scaled_dot_product_attention


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(torch.bfloat16)


def unwritten(tensor):
    return torch.full_like(tensor, math.nan)


def refuse(what):
    raise SystemExit(f"{what}: nothing was timed")


def compare(name, result, expected, largest_error=LARGEST_ERROR):
    if not torch.isfinite(result).all():
        refuse(f"{name}: not every element was written")
    error = (result.double() - expected).norm() / expected.norm()
    if not error <= largest_error:
        refuse(f"{name} is {error:.2g} off")


def scores_of(query, key, rows, causal, window=0):
    """Of one head in float64, masked, for some of its rows."""
    scores = query[rows].double() @ key.double().T / math.sqrt(query.shape[1])
    column = torch.arange(len(key), device=key.device)[None]
    last = rows[:, None] + len(key) - len(query)
    if causal:
        scores.masked_fill_(column > last, -math.inf)
    if window:
        scores.masked_fill_(column < last - window, -math.inf)
    return scores


def softmax(scores):
    """A row that sees no key is zero."""
    return torch.softmax(scores, dim=1).nan_to_num(0.0)


class Problem:
    """The tensors of a shape, (batch, seqlen, heads, head_dim), or (total, heads, head_dim) where
    its sequences are packed."""

    def __init__(self, shape, seed=0):
        torch.manual_seed(seed + shape.queries + shape.head_dim + shape.causal)
        self.shape = shape
        q, k = (shape.heads, shape.head_dim), (shape.heads_k, shape.head_dim)
        if shape.lengths:
            rows_q = rows_k = (sum(shape.lengths),)
            self.starts = torch.tensor((0, *shape.lengths)).cumsum(0).to(torch.int32).cuda()
            self.lengths = (self.starts, shape.queries)
        else:
            rows_q, rows_k = (shape.batch, shape.queries), (shape.batch, shape.keys)
            self.starts = self.lengths = None
        self.query, self.grad_output = random(*rows_q, *q), random(*rows_q, *q)
        self.key, self.value = random(*rows_k, *k), random(*rows_k, *k)
        self.window = (shape.window, 0) if shape.window else None
        self.output = unwritten(self.query)
        heads_first = (shape.batch, shape.heads, shape.queries)
        if shape.lengths:
            heads_first = (shape.heads, len(self.query))
        self.lse = torch.full(heads_first, math.nan, device="cuda")

    def sequences(self, *tensors):
        """The first and the last sequence of each tensor."""
        if self.starts is None:
            parts = [[t[b] for t in tensors] for b in (0, self.shape.batch - 1)]
        else:
            at = self.starts.tolist()
            parts = [[t[at[b] : at[b + 1]] for t in tensors] for b in (0, len(at) - 2)]
        return parts if len(self.shape.rows()) > 1 else parts[:1]

    def check_output(self, name, output):
        """Sampled rows of the first and the last head."""
        group = self.shape.heads // self.shape.heads_k
        for query, key, value, out in self.sequences(self.query, self.key, self.value, output):
            count = len(query)
            ends = torch.cat([torch.arange(min(16, count)), torch.arange(max(0, count - 16), count)])
            rows = torch.cat([ends, torch.randint(count, (32,))]).cuda()
            for head in (0, self.shape.heads - 1):
                k, v = key[:, head // group], value[:, head // group].double()
                scores = scores_of(query[:, head], k, rows, self.shape.causal, self.shape.window)
                compare(name, out[rows, head], softmax(scores) @ v)
        if not torch.isfinite(output).all():
            refuse(f"{name}: not every element was written")

    def check_gradients(self, name, gradients):
        """Those of the last key head and of the last query head that reads it, in the first and the
        last sequence."""
        inputs = (self.query, self.key, self.value, self.grad_output, *gradients)
        for query, key, value, grad_output, *results in self.sequences(*inputs):
            expected = self.exact_gradients(query, key, value, grad_output)
            for part, result, right in zip(("query", "key", "value"), results, expected):
                compare(f"{name}'s gradient of {part}", result[:, -1], right)
        for part, result in zip(("query", "key", "value"), gradients):
            if not torch.isfinite(result).all():
                refuse(f"{name}'s gradient of {part}: not every element was written")

    def exact_gradients(self, query, key, value, grad_output):
        k, v = (tensor[:, -1].double() for tensor in (key, value))
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        scale = 1 / math.sqrt(k.shape[1])
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        for head in range(heads - group, heads):
            q, g = (tensor[:, head].double() for tensor in (query, grad_output))
            grad_q = torch.zeros_like(q)
            for rows in torch.arange(len(q), device=q.device).split(ROWS_AT_ONCE):
                p = softmax(scores_of(q, k, rows, self.shape.causal, self.shape.window))
                grad_v += p.T @ g[rows]
                ds = p * (g[rows] @ v.T - (g[rows] * (p @ v)).sum(1, keepdim=True)) * scale
                grad_q[rows] = ds @ k
                grad_k += ds.T @ q[rows]
        return grad_q, grad_k, grad_v

    def square(self):
        """Whether PyTorch's is_causal, which is aligned to the top left, means the same mask."""
        return not self.shape.causal or self.shape.queries == self.shape.keys


def through_torch(problem, kind, tensors):
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(kind):
        result = attention(q, k, v, is_causal=problem.shape.causal, enable_gqa=grouped)
    return result.transpose(1, 2)


@functools.lru_cache
def compiled_flex_attention():
    """FlexAttention, whose kernels are Triton's, one for each problem. The gradients are asked for
    again and again, so nothing of the forward pass may be given away."""
    torch._dynamo.config.recompile_limit = 1000
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def through_triton(problem, tensors):
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    mask = None
    if problem.shape.causal:
        offset = problem.shape.keys - problem.shape.queries

        def visible(b, h, i, j):
            return i + offset >= j

        mask = create_block_mask(visible, None, None, problem.shape.queries, problem.shape.keys)
    call = compiled_flex_attention()
    grouped = q.shape[1] != k.shape[1]
    return lambda: call(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def through_fa3(problem, tensors, deterministic=False):
    shape = problem.shape
    options = {"causal": shape.causal, "deterministic": deterministic}
    if shape.window:
        options.update(causal=False, window_size=(shape.window, 0))
    if shape.lengths:
        bounds = (problem.starts, problem.starts, shape.queries, shape.queries)
        return flash_attn_varlen_func(*tensors, *bounds, **options)
    return flash_attn_func(*tensors, **options)


def peers(problem, wanted):
    """{name: a function of query, key and value that gives a function which gives the output}."""
    found = {}
    shape = problem.shape
    if flash_attn_func and "fa3" in wanted:
        found["fa3"] = lambda tensors: lambda: through_fa3(problem, tensors)
    if shape.window or shape.lengths or not problem.square():
        return found
    for name, kind in BACKENDS.items():
        if name in wanted:
            found[name] = lambda tensors, kind=kind: lambda: through_torch(problem, kind, tensors)
    if "triton" in wanted:
        found["triton"] = lambda tensors: through_triton(problem, tensors)
    return found


def forward_calls(library, problem, wanted):
    """{name: a function that queues the call on the current stream}, each checked."""
    tensors = (problem.query, problem.key, problem.value)
    options = (problem.shape.causal, problem.window, problem.lengths)
    calls = {"libfa3": library.forward_gpu(*tensors, problem.output, *options)}
    calls["libfa3"]()
    problem.check_output("libfa3", problem.output)
    for name, prepare in peers(problem, wanted).items():
        calls[name] = prepare(tensors)
        problem.check_output(name, calls[name]())
    return calls


def backward_calls(library, problem, wanted):
    """As forward_calls, of the gradients alone."""
    tensors = (problem.query, problem.key, problem.value)
    options = (problem.shape.causal, problem.window, problem.lengths)
    library.forward_gpu(*tensors, problem.output, *options, lse=problem.lse)()
    gradients = [unwritten(tensor) for tensor in tensors]
    given = (*tensors, problem.output, problem.lse, problem.grad_output, gradients)
    calls = {"libfa3": library.backward_gpu(*given, *options)}
    calls["libfa3"]()
    problem.check_gradients("libfa3", gradients)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    prepared = peers(problem, wanted)
    if flash_attn_func and "fa3_deterministic" in wanted and problem.shape.head_dim < 256:
        prepared["fa3_deterministic"] = lambda t: lambda: through_fa3(problem, t, True)
    for name, prepare in prepared.items():
        result = prepare(leaves)()

        def call(result=result):
            return torch.autograd.grad(result, leaves, problem.grad_output, retain_graph=True)

        problem.check_gradients(name, call())
        calls[name] = call
    return calls
