"""One attention problem on the GPU: its tensors, the calls of each kernel that solve it, and the
comparison with float64 that comes before any timing."""

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

try:  # the official FlashAttention-3, where the person running this has installed it
    from flash_attn_interface import flash_attn_func
except ImportError:
    flash_attn_func = None

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


def compare(name, result, expected):
    if not torch.isfinite(result).all():
        refuse(f"{name}: not every element was written")
    error = (result.double() - expected).norm() / expected.norm()
    if not error <= LARGEST_ERROR:
        refuse(f"{name} is {error:.2g} off")


def scores_of(query, key, rows, causal, window=None):
    """Of one head in float64, masked, for some of its rows."""
    scores = query[rows].double() @ key.double().T / math.sqrt(query.shape[1])
    column = torch.arange(len(key), device=key.device)[None]
    if causal or window:
        scores.masked_fill_(column > rows[:, None], -math.inf)
    if window:
        scores.masked_fill_(column < rows[:, None] - window[0], -math.inf)
    return scores


def check_output(name, query, key, value, output, causal, window=None):
    """Sampled rows of the first and the last head."""
    seqlen, group = query.shape[1], query.shape[2] // key.shape[2]
    rows = [torch.arange(16), torch.randint(seqlen, (32,)), torch.arange(seqlen - 16, seqlen)]
    rows = torch.cat(rows).cuda()
    for b, head in ((0, 0), (query.shape[0] - 1, query.shape[2] - 1)):
        scores = scores_of(query[b, :, head], key[b, :, head // group], rows, causal, window)
        expected = torch.softmax(scores, dim=1) @ value[b, :, head // group].double()
        compare(name, output[b, rows, head], expected)
    if not torch.isfinite(output).all():
        refuse(f"{name}: not every element was written")


def exact_gradients(query, key, value, grad_output, causal):
    """Of the last head of each, in the last sequence, in float64: key's and value's are summed over
    the query heads that share them."""
    k, v = (tensor[-1, :, -1].double() for tensor in (key, value))
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    scale = 1 / math.sqrt(k.shape[1])
    heads, group = query.shape[2], query.shape[2] // key.shape[2]
    for head in range(heads - group, heads):
        q, g = (tensor[-1, :, head].double() for tensor in (query, grad_output))
        grad_q = torch.zeros_like(q)
        for rows in torch.arange(len(q), device=q.device).split(ROWS_AT_ONCE):
            p = torch.softmax(scores_of(q, k, rows, causal), dim=1)
            grad_v += p.T @ g[rows]
            ds = p * (g[rows] @ v.T - (g[rows] * (p @ v)).sum(1, keepdim=True)) * scale
            grad_q[rows] = ds @ k
            grad_k += ds.T @ q[rows]
    return grad_q, grad_k, grad_v


def check_gradients(name, gradients, expected):
    for part, result, right in zip(("query", "key", "value"), gradients, expected):
        compare(f"{name}'s gradient of {part}", result[-1, :, -1], right)
        if not torch.isfinite(result).all():
            refuse(f"{name}'s gradient of {part}: not every element was written")


def forward_calls(library, query, key, value, causal, window=None):
    """{name: a function that queues the call on the current stream}. PyTorch's and the official
    package's costs on the host are in it: calls are queued, so that they hide."""
    output = unwritten(query)
    calls = {"libfa3": library.forward_gpu(query, key, value, output, causal, window)}
    calls["libfa3"]()
    check_output("libfa3", query, key, value, output, causal, window)
    if window:
        return calls
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = query.shape[2] != key.shape[2]

    def through_torch(kind):
        with sdpa_kernel(kind):
            return attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    for name, kind in BACKENDS.items():
        calls[name] = lambda kind=kind: through_torch(kind)
    if flash_attn_func:
        calls["fa3"] = lambda: flash_attn_func(query, key, value, causal=causal)
        check_output("fa3", query, key, value, calls["fa3"](), causal)
    return calls


def backward_calls(library, query, key, value, causal):
    """As forward_calls, of the gradients alone. `_deterministic`: the same bits every time."""
    batch, seqlen, heads, head_dim = query.shape
    grad_output, output = random(*query.shape), unwritten(query)
    lse = torch.full((batch, heads, seqlen), math.nan, device="cuda")
    library.forward_gpu(query, key, value, output, causal, lse=lse)()
    expected = exact_gradients(query, key, value, grad_output, causal)
    calls = {}
    for name, deterministic in (("libfa3", False), ("libfa3_deterministic", True)):
        gradients = [unwritten(tensor) for tensor in (query, key, value)]
        tensors = (query, key, value, output, lse, grad_output, gradients)
        calls[name] = library.backward_gpu(*tensors, causal, deterministic)
        calls[name]()
        check_gradients(name, gradients, expected)

    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

    def differentiate(name, result):
        def call():
            return torch.autograd.grad(result, leaves, grad_output, retain_graph=True)

        calls[name] = call
        return call()

    grouped = query.shape[2] != key.shape[2]
    for name, kind in BACKENDS.items():
        with sdpa_kernel(kind):
            q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
            result = attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        differentiate(name, result.transpose(1, 2))
    if flash_attn_func:
        result = flash_attn_func(*leaves, causal=causal)
        check_gradients("fa3", differentiate("fa3", result), expected)
        if head_dim < 256:  # it refuses the others
            result = flash_attn_func(*leaves, causal=causal, deterministic=True)
            differentiate("fa3_deterministic", result)
    return calls


def backward_alone(library, query, key, value, causal, lengths=None):
    """Ours, of any head dims, also of packed sequences."""
    heads, head_dim = query.shape[-2], value.shape[-1]
    grad_output = random(*query.shape[:-1], head_dim)
    output = unwritten(grad_output)
    rows = (query.shape[0], heads, query.shape[1]) if query.dim() == 4 else (heads, len(query))
    lse = torch.full(rows, math.nan, device="cuda")
    gradients = [unwritten(tensor) for tensor in (query, key, value)]
    library.forward_gpu(query, key, value, output, causal, lengths=lengths, lse=lse)()
    tensors = (query, key, value, output, lse, grad_output, gradients)
    call = library.backward_gpu(*tensors, causal, lengths=lengths)
    call()
    inputs = (query, key, value, grad_output)
    if lengths is None:
        check_gradients("libfa3", gradients, exact_gradients(*inputs, causal))
    else:
        starts = lengths[0].tolist()
        for first, end in zip(starts, starts[1:]):
            part, results = ([t[None, first:end] for t in group] for group in (inputs, gradients))
            check_gradients("libfa3", results, exact_gradients(*part, causal))
    return call
