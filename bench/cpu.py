#!/usr/bin/env python3
"""The CPU engine beside PyTorch's CPU scaled_dot_product_attention, in one process.

    python3 -m venv build/bench && build/bench/bin/pip install -r bench/requirements.txt
    cmake --preset release && cmake --build --preset release
    build/bench/bin/python bench/cpu.py [--backward] [--results bench/results/NAME.json]

Both read the same random tensors, (batch, heads, seqlen, head_dim) in memory as PyTorch likes
them best, and take turns: one call of ours, one of PyTorch's, and so on. A cell's figure is the
median of its calls, its spread half the distance between the quartiles; the outputs are compared
before anything is timed. Inputs stay in the same place from call to call, so the third cache may
hold them, for both. The peak is what registers alone do (bench/peak.c), measured before each cell:
the processors of a virtual machine may have a core each now and share one a minute later.

With --backward it is the gradients of query, key and value, PyTorch's by torch.autograd.grad; the
forward pass is not timed. They are 10 operations for each score and element of the head dim, the
forward pass 4.

The process has our threads and those of PyTorch's OpenMP runtime, the same number of each.
OMP_WAIT_POLICY=passive puts PyTorch's to sleep while ours work, as ours sleep by themselves; without
it they spin and take the processors away.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADS = 8


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--backward", action="store_true", help="time the backward pass")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=31, help="calls of each, in short cells")
    parser.add_argument("--seconds", type=float, default=6, help="after which five calls do")
    parser.add_argument("--results", type=pathlib.Path, help="also write the figures there, as JSON")
    return parser.parse_args()


options = arguments()
os.environ["OMP_NUM_THREADS"] = str(options.threads)
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch  # noqa: E402  it reads the environment when it is loaded

from c_abi import Library  # noqa: E402

attention = torch.nn.functional.scaled_dot_product_attention


def peaks():
    """GFLOP/s that registers alone can feed, by level."""
    output = subprocess.run(
        [options.build / "bench/bench_peak"], check=True, capture_output=True, text=True
    ).stdout
    return {name: float(rate) for name, rate in map(str.split, output.splitlines())}


def peak_of(rates, dtype):
    """The matrix rate of the best instructions for the dtype that the processor has."""
    names = ("amx", "avx512bf16", "avx512", "avx2") if dtype == "bfloat16" else ("avx512", "avx2")
    return next((rates[name] for name in names if name in rates), math.nan)


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summary(samples):
    low, median, high = statistics.quantiles(samples, n=4)
    return {"median_ms": 1e3 * median, "spread_ms": 1e3 * (high - low) / 2, "runs": len(samples)}


def check(ours, theirs, dtype):
    """Both round differently: apart by some units of the dtype, relative to the values' size."""
    bound = {"float32": 1e-4, "bfloat16": 4e-2}[dtype]
    for a, b in zip(ours, theirs):
        error = (a.float() - b.float()).abs().max().item()
        if not error <= bound * b.float().abs().max().item():
            sys.exit(f"the results differ by {error:.3g}: nothing was timed")


def forward_calls(library, inputs, causal):
    """One call of ours, one of PyTorch's, and what ours writes."""
    output = torch.full_like(inputs[0], math.nan)
    ours = library.forward(*inputs, output, causal, options.threads)
    return ours, lambda: (attention(*inputs, is_causal=causal),), (output,)


def backward_calls(library, inputs, causal):
    output, grad_output = torch.empty_like(inputs[0]), torch.randn_like(inputs[0])
    lse = torch.empty(output.shape[:3])
    library.forward(*inputs, output, causal, options.threads, lse)()
    gradients = tuple(torch.full_like(tensor, math.nan) for tensor in inputs)
    ours = library.backward(
        *inputs, output, lse, grad_output, gradients, causal, options.threads
    )
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    result = attention(*leaves, is_causal=causal)

    def theirs():
        return torch.autograd.grad(result, leaves, grad_output, retain_graph=True)

    return ours, theirs, gradients


def cell(library, dtype, head_dim, seqlen, causal):
    torch.manual_seed(seqlen + head_dim + causal)
    shape = (1, HEADS, seqlen, head_dim)
    inputs = [torch.randn(shape, dtype=getattr(torch, dtype)) for _ in range(3)]
    calls = backward_calls if options.backward else forward_calls
    ours, theirs, written = calls(library, inputs, causal)
    ours()
    check(written, theirs(), dtype)
    samples = [], []
    deadline = time.perf_counter() + options.seconds
    while len(samples[0]) < 5 or (
        len(samples[0]) < options.runs and time.perf_counter() < deadline
    ):
        samples[0].append(seconds_of(ours))
        samples[1].append(seconds_of(theirs))
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "seqlen": seqlen,
        "causal": causal,
        "fa3": summary(samples[0]),
        "torch": summary(samples[1]),
    }


def main():
    library = Library(options.build / "libfa3.so")
    torch.set_num_threads(options.threads)
    name, level = library.cpu()
    results = {
        "date": datetime.date.today().isoformat(),
        "processor": name,
        "level": level,
        "threads": options.threads,
        "phase": "backward" if options.backward else "forward",
        "fa3": library.version(),
        "torch": torch.__version__,
        "cells": [],
    }
    seqlens = (512, 1024, 2048, 4096) if options.backward else (512, 2048, 8192)
    operations = 10 if options.backward else 4
    print(f"{name}, {options.threads} threads, level {level}; fa3 {library.version()},", end=" ")
    print(f"torch {torch.__version__}")
    print("dtype     dim seqlen mask       fa3 ms          torch ms      ratio  GFLOP/s     peak")
    for dtype in ("float32", "bfloat16"):
        for head_dim in (64, 128):
            for seqlen in seqlens:
                for causal in (False, True):
                    peak = peak_of(peaks(), dtype)
                    row = cell(library, dtype, head_dim, seqlen, causal)
                    row["peak_gflops"] = peak
                    flops = operations * HEADS * seqlen**2 * head_dim / (2 if causal else 1)
                    row["gflops"] = flops / row["fa3"]["median_ms"] * 1e-6
                    row["of_peak"] = row["gflops"] / peak
                    row["ratio"] = row["torch"]["median_ms"] / row["fa3"]["median_ms"]
                    results["cells"].append(row)
                    print(
                        f"{dtype:9} {head_dim:3} {seqlen:6} {'causal' if causal else 'full':6}"
                        f" {row['fa3']['median_ms']:9.2f} +-{row['fa3']['spread_ms']:6.2f}"
                        f" {row['torch']['median_ms']:9.2f} +-{row['torch']['spread_ms']:6.2f}"
                        f" {row['ratio']:6.2f} {row['gflops']:8.0f} {peak:5.0f} {row['of_peak']:4.0%}",
                        flush=True,
                    )
    ratios = [row["ratio"] for row in results["cells"]]
    results["geometric_mean"] = statistics.geometric_mean(ratios)
    results["smallest_ratio"] = min(ratios)
    print(f"geometric mean {results['geometric_mean']:.2f}, smallest {min(ratios):.2f}")
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


main()
