#!/usr/bin/env python3
"""Makes golden.bin: attention as PyTorch computes it, in float64 on the CPU.

Needs torch and numpy. The seed is fixed and the inputs come from numpy, so that another version of
torch gives the same file but for the last bits of the outputs.

    python3 make.py golden.bin

A case is 18 little-endian int32 (dtype as in fa3.h, batch, heads_q, heads_k, seqlen_q, seqlen_k,
head_dim, value_head_dim, causal, has window, window_left, window_right, has sink, three that are 0,
and the bits of softcap and softmax_scale as float32; scale 0: the default), then query, key, value
in the dtype, the sinks in float32, output and lse in float64; all contiguous in fa3.h's shapes.
"""
import sys

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

FLOAT32, FLOAT16, BFLOAT16 = 1, 2, 3
TORCH_DTYPE = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}


def attention(query, key, value, allowed, softcap, scale, sink):
    """Tensors of (batch, heads, seqlen, dim) in float64; returns output and lse."""
    group = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(group, 1)
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if sink is not None:
        column = sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = torch.logsumexp(scores, -1)
    if softcap or sink is not None:
        probabilities = torch.softmax(scores, -1)[..., : key.shape[2]]
        return probabilities @ value.repeat_interleave(group, 1), lse
    with sdpa_kernel(SDPBackend.MATH):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)
    return output, lse


def mask(seqlen_q, seqlen_k, causal, window):
    """True where the query sees the key, aligned to the bottom right."""
    distance = (torch.arange(seqlen_k)[None, :]
                - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q))
    allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window:
        left, right = window
        if left >= 0:
            allowed &= distance >= -left
        if right >= 0:
            allowed &= distance <= right
    if causal:
        allowed &= distance <= 0
    return allowed


def write_case(file, rng, dtype, batch=1, heads_q=2, heads_k=2, seqlen_q=5, seqlen_k=5,
               head_dim=16, value_head_dim=16, causal=False, window=None, softcap=0.0, scale=0.0,
               sink=False):
    def tensor(seqlen, heads, dim):
        values = rng.standard_normal((batch, seqlen, heads, dim)).astype(np.float32)
        return torch.from_numpy(values).to(TORCH_DTYPE[dtype])

    query = tensor(seqlen_q, heads_q, head_dim)
    key = tensor(seqlen_k, heads_k, head_dim)
    value = tensor(seqlen_k, heads_k, value_head_dim)
    sinks = torch.from_numpy(rng.standard_normal(heads_q).astype(np.float32)) if sink else None

    def wide(t):
        return t.double().transpose(1, 2)

    output, lse = attention(wide(query), wide(key), wide(value),
                            mask(seqlen_q, seqlen_k, causal, window), softcap,
                            float(np.float32(scale)) or head_dim**-0.5, sinks)
    left, right = window or (0, 0)
    header = np.array([dtype, batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim,
                       value_head_dim, causal, window is not None, left, right, sink, 0, 0, 0],
                      dtype="<i4")
    file.write(header.tobytes() + np.array([softcap, scale], dtype="<f4").tobytes())
    for t in (query, key, value):
        file.write(t.contiguous().view(torch.uint8).numpy().tobytes())
    if sink:
        file.write(sinks.numpy().tobytes())
    file.write(output.transpose(1, 2).contiguous().numpy().tobytes())
    file.write(lse.contiguous().numpy().tobytes())


def main():
    rng = np.random.default_rng(20240712)
    with open(sys.argv[1], "wb") as file:
        for dtype in (FLOAT32, FLOAT16, BFLOAT16):
            write_case(file, rng, dtype)
            write_case(file, rng, dtype, seqlen_q=4, seqlen_k=9, causal=True)
            write_case(file, rng, dtype, heads_q=6, heads_k=2, seqlen_q=3, seqlen_k=7, head_dim=24,
                       value_head_dim=8, window=(2, 1))
            write_case(file, rng, dtype, batch=2, seqlen_q=3, seqlen_k=6, causal=True,
                       window=(3, -1), softcap=2.5, scale=0.7)
            write_case(file, rng, dtype, heads_q=4, heads_k=1, seqlen_k=8, sink=True, causal=True)
            write_case(file, rng, dtype, heads_q=1, heads_k=1, seqlen_q=2, seqlen_k=70,
                       head_dim=8, value_head_dim=24, sink=True, softcap=15.0)


main()
