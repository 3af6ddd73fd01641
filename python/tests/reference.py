"""Attention in float64, written as the formula is."""

import contextlib

import pytest
import torch


def visible(seqlen_q, seqlen_k, causal, window, device=None, chunk=0):
    """Which keys a query sees, (seqlen_q, seqlen_k)."""
    diagonal = seqlen_k - seqlen_q
    offset = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None]
    left, right = window
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal or right >= 0:
        mask &= offset <= diagonal + (0 if causal else right)
    if left >= 0:
        mask &= offset >= diagonal - left
    if chunk:
        position = torch.arange(seqlen_q, device=device)[:, None] + diagonal
        mask &= position // chunk == torch.arange(seqlen_k, device=device) // chunk
    return mask


def attention(
    q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, sink=None, chunk=0
):
    """(batch, seqlen, heads, head_dim) tensors -> (output, lse), in the tensors' dtype."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible(q.shape[1], k.shape[1], causal, window, q.device, chunk)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    # A row that sees nothing is 0, and so are its gradients.
    seen = torch.isfinite(lse)
    weights = torch.exp(scores - lse.masked_fill(~seen, 0)[..., None])
    if sink is not None:
        weights = weights[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def with_gradients(function, tensors, grad_output, dtype=None):
    """function's output and lse on leaves made of the tensors, in `dtype` where it is given, and the
    leaves' gradients."""
    leaves = [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    output, lse = function(*leaves)
    output.backward(grad_output.to(output.dtype))
    return [output.detach(), lse.detach(), *(t.grad for t in leaves if t is not None)]


def check(found, exact, plain):
    """Compares lists of tensors with those in float64. A tensor may err by twice as much as the
    plain implementation in its own dtype does, and a few roundings of float32 beside; where -inf
    is expected it must be; NaN fails."""
    for index, (ours, wanted, theirs) in enumerate(zip(found, exact, plain, strict=True)):
        assert ours.shape == wanted.shape, f"{index}: {ours.shape}, expected {wanted.shape}"
        infinite = torch.isinf(wanted)
        assert torch.equal(ours[infinite].double(), wanted[infinite]), f"{index}: infinities"
        wanted = wanted.masked_fill(infinite, 0)
        error = (ours.double().masked_fill(infinite, 0) - wanted).abs()
        allowed = (theirs.double().masked_fill(infinite, 0) - wanted).abs()
        if not wanted.numel():
            continue
        bound = 2 * allowed.max() + 1e-5 * max(1.0, wanted.abs().max().item())
        assert error.max() <= bound, f"{index}: error {error.max():.3g}, bound {bound:.3g}"


@contextlib.contextmanager
def fp8_cache(device):
    """Around a call with an FP8 cache: a GPU may lack those, and says so."""
    try:
        yield
    except NotImplementedError as error:
        if device == "cpu":
            raise
        pytest.skip(str(error))
