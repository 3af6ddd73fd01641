#!/usr/bin/env python3
"""The error of FP8 attention against the number of keys, on a GPU.

    python3 bench/far_keys.py [--library build/release/libfa3.so] [--results bench/results/NAME.json]

256 queries of four heads, four times over, against 1024 to 1048576 keys, E4M3 codes with a scale for
each head. The error is the root mean square of the difference from float64 attention of the same
codes, divided by the output's own: the kernel's arithmetic alone, not the codes. Scores are from

    even            N(0, 1): every key counts for about as much
    share           N(0, 1), but for one key in the first eighth, which is visited last: it has as
                    great a part of the sum as all others together, so that its score grows with the
                    logarithm of their number
    share, score    the same where that score is 14 whatever the number of keys, and those of the
                    others have a mean that leaves its part of the sum as it is

"scores" is the root mean square difference of the log-sum-exp, which is off by what the scores are.
With the official FlashAttention-3 where it is installed.
"""

import argparse
import json
import math
import pathlib
import time

import torch

from c_abi import Library
from gpu_problem import flash_attn_func

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEYS = tuple(1 << n for n in (10, 12, 14, 16, 17, 18, 20))
HEAD_DIMS = 64, 128, 256
QUERIES, HEADS, SOUGHT = 256, 4, 8
SEEDS = 4
SCORE = 14.0
KINDS = "even", "share", "share, score"
AT_ONCE = 1 << 17  # keys, in float64


def make(kind, keys, head_dim, seed):
    """Query, key and value in bfloat16. Query i seeks one of SOUGHT keys, whose direction has half of
    its squared length; a quarter is along a direction that all queries share, by which the other
    keys' scores get their mean."""
    torch.manual_seed(seed)
    key, value = (
        torch.randn(1, keys, HEADS, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    query = torch.randn(1, QUERIES, HEADS, head_dim, device="cuda")
    if kind != "even":
        score = SCORE if kind == "share, score" else math.log(keys) + 0.5
        mean = score - math.log(keys) - 0.5
        axes = torch.randn(HEADS, head_dim, SOUGHT + 1, device="cuda")
        axes = torch.linalg.qr(axes).Q.permute(2, 0, 1)
        query -= torch.einsum("bqhd,ahd,ahe->bqhe", query, axes, axes)
        sought = axes[torch.arange(QUERIES, device="cuda") % SOUGHT]
        size = math.sqrt(head_dim)
        query = query / 2 + sought * size * math.sqrt(0.5) + axes[SOUGHT] * size / 2
        key += (2 * mean * axes[SOUGHT]).to(torch.bfloat16)
        places = torch.randperm(keys // 8, device="cuda")[:SOUGHT]
        key[0, places] = (axes[:SOUGHT] * score * math.sqrt(2)).to(torch.bfloat16)
    return query.to(torch.bfloat16), key, value


def encode(library, tensor):
    codes = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    scale = torch.full((1, HEADS), math.nan, device="cuda")
    library.quantize_gpu(tensor, codes, scale, 0)()
    return codes, scale


def exact(codes, scales, head):
    """Output and log-sum-exp of a head in float64."""
    query, key, value = (tensor[0, :, head] for tensor in codes)
    q_scale, k_scale, v_scale = (scale[0, head].double() for scale in scales)
    factor = q_scale * k_scale / math.sqrt(query.shape[1])
    most = torch.full((QUERIES, 1), -math.inf, device="cuda", dtype=torch.float64)
    total = torch.zeros_like(most)
    output = torch.zeros(QUERIES, value.shape[1], device="cuda", dtype=torch.float64)
    for first in range(0, len(key), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        scores = query.double() @ key[part].double().T * factor
        now = torch.maximum(most, scores.max(1, keepdim=True).values)
        before, p = torch.exp(most - now), torch.exp(scores - now)
        total = total * before + p.sum(1, keepdim=True)
        output = output * before + p @ value[part].double() * v_scale
        most = now
    return output / total, (most + total.log())[:, 0]


def measure(library, kind, keys, head_dim, seed):
    """Mean squares."""
    codes, scales = zip(*(encode(library, tensor) for tensor in make(kind, keys, head_dim, seed)))
    output = torch.full(codes[0].shape, math.nan, device="cuda", dtype=torch.float32)
    lse = torch.full((1, HEADS, QUERIES), math.nan, device="cuda")
    call = library.forward_gpu(*codes, output, lse=lse, scales=scales)
    call.args.num_splits = 1  # else the kernels for caches have it, whose probabilities are float16
    call()
    expected, expected_lse = map(torch.stack, zip(*(exact(codes, scales, h) for h in range(HEADS))))
    results = {"output": torch.zeros_like(output), "ours": output}
    if flash_attn_func:
        names = ("q_descale", "k_descale", "v_descale")
        results["fa3"] = flash_attn_func(*codes, **dict(zip(names, scales))).float()
    errors = {name: result[0].transpose(0, 1).double() - expected for name, result in results.items()}
    errors["scores"] = lse[0].double() - expected_lse
    return {name: error.square().mean().item() for name, error in errors.items()}


def cell(library, kind, keys, head_dim):
    squares = [measure(library, kind, keys, head_dim, keys + seed) for seed in range(SEEDS)]
    sizes = {name: math.sqrt(sum(one[name] for one in squares) / SEEDS) for name in squares[0]}
    size = sizes.pop("output")
    errors = {name: found / (1 if name == "scores" else size) for name, found in sizes.items()}
    return {"kind": kind, "keys": keys, "head_dim": head_dim, "output_rms": size, **errors}


def print_table(cells):
    kernels = [name for name in ("ours", "fa3", "scores") if name in cells[0]]
    for name in kernels:
        columns = [f"{kind}, d={d}" for kind in KINDS for d in HEAD_DIMS]
        print(f"\n{name}\n\n| keys | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
        for keys in KEYS:
            line = {(c["kind"], c["head_dim"]): c[name] for c in cells if c["keys"] == keys}
            figures = (line.get((kind, d), math.nan) for kind in KINDS for d in HEAD_DIMS)
            print(f"| {keys} | " + " | ".join(f"{figure:.2e}" for figure in figures) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default=str(ROOT / "build/release/libfa3.so"))
    parser.add_argument("--results", type=pathlib.Path)
    options = parser.parse_args()
    begin = time.monotonic()
    library = Library(options.library)
    cells = [
        cell(library, kind, keys, head_dim)
        for head_dim in HEAD_DIMS
        for keys in KEYS
        for kind in KINDS
    ]
    print_table(cells)
    record = {"device": torch.cuda.get_device_name(), "command": "bench/far_keys.py", "cells": cells}
    if options.results:
        options.results.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
